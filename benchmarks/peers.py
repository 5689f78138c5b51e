"""Our time over that of the best peer in the same process: 0.5 is twice as fast, and a noisy machine slows both."""

import stiefelkit as sk
from benchmarks.suite import PLACES, Suite, map_race, optimizer_race, patience, row_of
from stiefelkit.measuring import scan
from stiefelkit.measuring.implementations import own_implementations, peers
from stiefelkit.measuring.moved_frames import YARDSTICKS, peer_optimizers
from stiefelkit.measuring.plans import CASES, OptimizerRace, ScanRace
from stiefelkit.measuring.scan import recurrence_peers

SIZES = {
    "64x64": "quick",
    "256x256": "smoke",
    "512x32": "quick",
    "512x512": "full",
    "1024x1024": "full",
    "2048x32": "full",  # peers fill tall frames up to square ones, and take minutes
}


def _families() -> list[str]:
    """Members that have a peer of the map; those of frames that are moved have a table of their own."""
    raced = {peer.family for peer in peers.values()}
    return [name for name in sk.available() if name in raced]


class Parametrizations(Suite, track="ratio"):
    """A parametrization beside torch, geotorch and the other peers of its family."""

    unit = "ratio"
    axes = (tuple(own_implementations(_families(), (), {})), ("forward_backward", "step"), tuple(SIZES), tuple(PLACES))
    param_names = ("contender", "operation", "size", "device")

    def level(self, *cell: str) -> str:
        contender, operation, size, _ = cell
        if operation == "step" or "(exact)" not in contender:
            return "full"
        return SIZES[size]

    def measure(self, *cell: str) -> float:
        contender, *_ = cell
        race = map_race(*cell, peers=True)
        missing = [reason for reason in race.left_out.values() if "not installed" in reason]
        if missing:
            raise NotImplementedError(f"the best peer is known only with all: {missing[0]}")
        return _inverse(row_of(race, contender)["ratio_to_best_peer"])


class Optimizers(Suite, track="ratio"):
    """A step of an optimizer of frames beside geoopt's Riemannian SGD."""

    unit = "ratio"
    axes = (tuple(OptimizerRace().implementations()), tuple(SIZES), tuple(PLACES))
    param_names = ("optimizer", "size", "device")

    def level(self, *cell: str) -> str:
        optimizer, size, _ = cell
        if optimizer == "multiplicative_cayley (exact)":
            return SIZES[size]
        return "full" if SIZES[size] == "full" or "(exact)" not in optimizer else "quick"

    def measure(self, *cell: str) -> float:
        optimizer, size, device = cell
        race = optimizer_race(optimizer, filter(peer_optimizers.__contains__, YARDSTICKS), size, device)
        return _inverse(row_of(race, optimizer)["ratio_to_best_peer"])


class Scan(Suite, track="ratio"):
    """The scan beside one other recurrence; torch's layers are of another kind, and have as many units."""

    unit = "ratio"
    axes = (tuple(CASES), tuple(recurrence_peers), tuple(PLACES))
    param_names = ("case", "peer", "device")

    def level(self, *cell: str) -> str:
        case, peer, _ = cell
        if case == "A" and peer == "eager_loop":
            return "smoke"
        return "quick" if case in "BCD" and peer in ("eager_loop", "torch_lstm") else "full"

    def measure(self, *cell: str) -> float:
        case, peer, device = cell
        plan = ScanRace(cases=(CASES[case],), backends=("auto",), named_peers=(peer,), device=device, **patience())
        (race,) = scan.races(plan)
        return _inverse(row_of(race, peer)["time_over_ours"])


def _inverse(ratio: float | None) -> float:
    if ratio is None:
        raise NotImplementedError("there is no peer that can do it")
    return 1 / ratio
