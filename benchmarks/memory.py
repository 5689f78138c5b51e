"""Peak memory, in bytes over what was there before."""

import torch

import stiefelkit as sk
from benchmarks.scan import forward_backward
from benchmarks.suite import PLACES, START, Suite, seconds_of, size_of
from stiefelkit.measuring.races.clock import peak_bytes
from stiefelkit.measuring.races.contenders import OPERATIONS, our_contenders
from stiefelkit.measuring.races.plan import ParametrizationRace, ScanRace
from stiefelkit.measuring.races.recurrences import LOOP
from stiefelkit.measuring.races.scan import LOSSES, resident_bytes
from stiefelkit.measuring.races.scan_cases import CASES
from stiefelkit.scan import BACKENDS
from stiefelkit.training.memory import threads

SIZES = {"1024x1024": "quick", "2048x32": "quick", "2048x2048": "full"}
STEPS = 784
"""The fewest of the cases whose memory is looked at."""
DRAWN = {"householder": 1.5e-8, "margin": 2e-9}
"""Seconds over n p^2 for the coordinates of a drawn frame, where that is much."""


class Parametrizations(Suite):
    """Allocations of the forward and backward of a parametrization."""

    unit = "bytes"
    axes = (tuple(our_contenders(sk.available(), (), {})), tuple(SIZES), tuple(PLACES))
    param_names = ("contender", "size", "device")

    def level(self, *cell: str) -> str:
        return SIZES[cell[1]]

    def predicted(self, named: str, *cell: str) -> float:
        name, (n, p) = cell[0].partition(" ")[0], size_of(cell[1])
        return START + 2 * seconds_of(name, n, p) + DRAWN.get(name, 0.0) * n * p * p

    def measure(self, *cell: str) -> float:
        contender, size, device = cell
        n, p = size_of(size)
        name, precision = contender.removesuffix(")").split(" (")
        plan = ParametrizationRace(parametrizations=(name,), precisions=(precision,), sizes=((n, p),), device=device)
        problem = plan.problem(n, p)
        with threads(1):
            entry = plan.contenders()[contender].enter(problem)
            run = OPERATIONS["forward_backward"](entry, problem.gradient())
            run()
            return peak_bytes(run, torch.device(device))

    def track_peak(self, *cell: str) -> float:
        return self.figure


class Scan(Suite):
    """Growth of a fresh process that runs a long case once, by the scan and by the loop that a user writes."""

    unit = "bytes"
    axes = (
        tuple(name for name, case in CASES.items() if case.T >= STEPS),
        (*BACKENDS, LOOP, "rotation_rnn"),
        LOSSES,
        tuple(PLACES),
    )
    param_names = ("case", "contender", "loss", "device")

    def level(self, *cell: str) -> str:
        return "quick" if cell[1] in ("auto", LOOP) and cell[0] == "A" else "full"

    def predicted(self, named: str, *cell: str) -> float:
        # a process of its own imports all again
        return 3.5 + 2 * forward_backward(cell[0], "ours" if cell[1] in BACKENDS else cell[1])

    def measure(self, *cell: str) -> float:
        case, contender, loss, device = cell
        drawn = ScanRace(cases=(CASES[case],), device=device).drawn(CASES[case])
        return resident_bytes(drawn, contender, loss, contender not in BACKENDS)

    def track_peak(self, *cell: str) -> float:
        return self.figure
