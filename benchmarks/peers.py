"""Our time over that of the best peer in the same process: 0.5 is twice as fast, and a noisy machine slows both."""

import stiefelkit as sk
from benchmarks.scan import forward_backward
from benchmarks.suite import PLACES, Suite, of_race, patience, row_of, seconds_of, size_of
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.races import frames, scan
from stiefelkit.measuring.races.contenders import our_contenders
from stiefelkit.measuring.races.peers import peers
from stiefelkit.measuring.races.plan import OptimizerRace, ParametrizationRace, ScanRace
from stiefelkit.measuring.races.recurrences import recurrence_peers
from stiefelkit.measuring.races.scan_cases import CASES

SIZES = {
    "64x64": "quick",
    "256x256": "smoke",
    "512x32": "quick",
    "512x512": "full",
    "1024x1024": "full",
    "2048x32": "full",  # peers fill tall frames up to square ones, and take minutes
}
SLOWER = 5
"""Times of our time: a peer."""


def _families() -> list[str]:
    """Members that have a peer of the map; those of frames that are moved have a table of their own."""
    raced = {peer.family for peer in peers.available().values() if "forward_backward" in peer.operations}
    return [name for name in sk.available() if name in raced]


class Parametrizations(Suite):
    """A parametrization beside torch, geotorch and the other peers of its family."""

    unit = "ratio"
    axes = (tuple(our_contenders(_families(), (), {})), ("forward_backward", "step"), tuple(SIZES), tuple(PLACES))
    param_names = ("contender", "operation", "size", "device")

    def level(self, *cell: str) -> str:
        contender, operation, size, _ = cell
        if operation == "step" or "(exact)" not in contender:
            return "full"
        return SIZES[size]

    def predicted(self, named: str, *cell: str) -> float:
        name = cell[0].partition(" ")[0]
        ours = seconds_of(name, *size_of(cell[2]))
        of_peers = [SLOWER * ours for peer in peers.available().values() if peer.family == name]
        return of_race(named, [ours, ours / 15, *of_peers])

    def measure(self, *cell: str) -> float:
        contender, operation, size, device = cell
        name, precision = contender.removesuffix(")").split(" (")
        plan = ParametrizationRace(
            parametrizations=(name,),
            precisions=(precision,),
            operations=(operation,),
            sizes=(size_of(size),),
            peers=True,
            device=device,
            **patience(),
        )
        missing = plan.missing_peers()
        if missing:
            raise NotImplementedError(f"the best peer is known only with {' and '.join(missing)}; install it")
        (race,) = frames.races(plan)
        return _inverse(row_of(race, contender)["ratio_to_best_peer"])

    def track_ratio(self, *cell: str) -> float:
        return self.figure


class Optimizers(Suite):
    """A step of an optimizer of frames beside geoopt's Riemannian SGD."""

    unit = "ratio"
    axes = (tuple(OptimizerRace().contenders()), tuple(SIZES), tuple(PLACES))
    param_names = ("optimizer", "size", "device")

    def level(self, *cell: str) -> str:
        optimizer, size, _ = cell
        if optimizer == "multiplicative_cayley (exact)":
            return SIZES[size]
        return "full" if SIZES[size] == "full" or "(exact)" not in optimizer else "quick"

    def predicted(self, named: str, *cell: str) -> float:
        ours = seconds_of(cell[0].partition(" ")[0], *size_of(cell[1]))
        return of_race(named, [ours, ours / 15, SLOWER * ours, SLOWER * ours])

    def measure(self, *cell: str) -> float:
        optimizer, size, device = cell
        name, precision = optimizer.removesuffix(")").split(" (")
        yardsticks = [peer for peer, found in peer_optimizers.available().items() if found.yardstick]
        plan = OptimizerRace(
            optimizers=(name, *yardsticks),
            precisions=(precision,),
            sizes=(size_of(size),),
            device=device,
            **patience(),
        )
        (race,) = frames.races(plan)
        return _inverse(row_of(race, optimizer)["ratio_to_best_peer"])

    def track_ratio(self, *cell: str) -> float:
        return self.figure


class Scan(Suite):
    """The scan beside one other recurrence; torch's layers are of another kind, and have as many units."""

    unit = "ratio"
    axes = (tuple(CASES), tuple(recurrence_peers.names()), tuple(PLACES))
    param_names = ("case", "peer", "device")

    def level(self, *cell: str) -> str:
        case, peer, _ = cell
        if case == "A" and peer == "eager_loop":
            return "smoke"
        return "quick" if peer in ("eager_loop", "torch_lstm") else "full"

    def predicted(self, named: str, *cell: str) -> float:
        case, peer, _ = cell
        return of_race(named, [forward_backward(case), *(forward_backward(case, of) for of in ("ours", "last", peer))])

    def measure(self, *cell: str) -> float:
        case, peer, device = cell
        plan = ScanRace(cases=(CASES[case],), backends=("auto",), named_peers=(peer,), device=device, **patience())
        (race,) = scan.races(plan)
        return _inverse(row_of(race, peer)["time_over_ours"])

    def track_ratio(self, *cell: str) -> float:
        return self.figure


def _inverse(ratio: float | None) -> float:
    if ratio is None:
        raise NotImplementedError("there is no peer that can do it")
    return 1 / ratio
