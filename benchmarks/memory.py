"""Peak memory, in bytes over what was there before."""

import stiefelkit as sk
from benchmarks.suite import PLACES, Suite, map_race, row_of
from stiefelkit.machine import threads
from stiefelkit.measuring.implementations import own_implementations
from stiefelkit.measuring.plans import CASES, ScanRace
from stiefelkit.measuring.scan import LOOP, LOSSES, drawn, memory_of, ours, recurrence_peers
from stiefelkit.scan import BACKENDS

SIZES = {"1024x1024": "quick", "2048x32": "quick", "2048x2048": "full"}
STEPS = 784
"""The fewest of the cases whose memory is looked at."""


class Parametrizations(Suite, track="peak"):
    """Allocations of the forward and backward of a parametrization."""

    unit = "bytes"
    axes = (tuple(own_implementations(sk.available(), (), {})), tuple(SIZES), tuple(PLACES))
    param_names = ("contender", "size", "device")

    def level(self, *cell: str) -> str:
        return "full" if cell[0].startswith("householder") else SIZES[cell[1]]

    def measure(self, *cell: str) -> float:
        contender, size, device = cell
        return row_of(map_race(contender, "forward_backward", size, device, memory=True), contender)["bytes"]


class Scan(Suite, track="peak"):
    """Allocations of a long case, by the scan and by the loop that a user writes."""

    unit = "bytes"
    version = "2"
    axes = (
        tuple(name for name, case in CASES.items() if case.T >= STEPS),
        (*BACKENDS, LOOP, "rotation_rnn"),
        LOSSES,
        tuple(PLACES),
    )
    param_names = ("case", "contender", "loss", "device")

    def level(self, *cell: str) -> str:
        return "quick" if cell[1] in ("auto", LOOP) and cell[0] == "A" else "full"

    def measure(self, *cell: str) -> float:
        case, contender, loss, device = cell
        plan = ScanRace(cases=(CASES[case],), device=device)
        enter = ours([contender])[contender] if contender in BACKENDS else recurrence_peers[contender]
        with threads(1):
            return memory_of(drawn(plan, CASES[case]), enter, loss)
