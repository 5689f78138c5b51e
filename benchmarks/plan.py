"""What a mode measures, and about how long that takes on this machine as busy as it is: before `make bench` begins.

STIEFELKIT_BENCH=full python -m benchmarks.plan
"""

import itertools
import sys
import time
from collections.abc import Iterable

import torch

from benchmarks import convolutions, device_rows, drift, launches, memory, peers, scan, step_time
from benchmarks.suite import BUDGET, VARIABLE, Suite, mode
from stiefelkit.training.memory import threads

SUITES: tuple[type[Suite], ...] = (
    drift.Frames,
    drift.Models,
    drift.Rotations,
    step_time.Parametrizations,
    step_time.Optimizers,
    scan.Scan,
    memory.Parametrizations,
    memory.Scan,
    convolutions.Times,
    convolutions.Memory,
    convolutions.Isometry,
    launches.Parametrizations,
    launches.Optimizers,
    peers.Parametrizations,
    peers.Optimizers,
    peers.Scan,
    device_rows.Times,
    device_rows.Drift,
    device_rows.Memory,
)
"""All tables."""


def due(suite: type[Suite]) -> list[tuple[str, ...]]:
    """The cells of a table that the mode and the machine allow to measure."""
    return [cell for cell in itertools.product(*suite.axes) if suite().reason_against(*cell) is None]


def seconds(suite: type[Suite], cells: Iterable[tuple[str, ...]]) -> float:
    """Predicted seconds of CPU time of some cells, before this machine and its load are asked."""
    return sum(suite().predicted(mode(), *cell) for cell in cells)


JOB = 0.04
"""Seconds of CPU time of `slowness`'s job on the machine that seconds are predicted for."""


def slowness(rounds: int = 20) -> float:
    """Seconds on the clock here and now for a predicted second; more than one where others are at work as well."""
    with threads(1), torch.no_grad():
        w, large = torch.eye(64), torch.eye(256)
        start = time.perf_counter()
        for _ in range(rounds):
            for _ in range(1000):
                w = w @ w + 0
            for _ in range(50):
                large = large @ large
        return (time.perf_counter() - start) / (rounds * JOB)


def main() -> int:
    """The command; returns its exit status."""
    factor, total, count = slowness(), 0.0, 0
    print(f"{VARIABLE}={mode()}\n{'table':30} {'cells':>5} {'minutes':>7}")
    for suite in SUITES:
        cells = due(suite)
        name = f"{suite.__module__.partition('.')[2]}.{suite.__name__}"
        minutes = seconds(suite, cells) * factor / 60
        print(f"{name:30} {len(cells):5} {minutes:7.1f}")
        total, count = total + minutes, count + len(cells)
    print(f"{'all, about':30} {count:5} {total:7.1f}")
    if mode() != "full":
        print(f"What is predicted to take more than {BUDGET:.0f} s of CPU time is left to the mode full.")
    print("In under a minute, without these tables: make bench-quick.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
