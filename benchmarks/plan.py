"""What a mode measures, and about how long that takes on this machine as busy as it is: before `make bench` begins.

STIEFELKIT_BENCH=full python -m benchmarks.plan
"""

import itertools
import sys
import time
from collections.abc import Iterable

import torch

from benchmarks import device_rows, drift, launches, memory, peers, scan, step_time
from benchmarks.suite import BUDGET, PRODUCTS, VARIABLE, Suite, mode
from stiefelkit.measuring.races.clock import product_of
from stiefelkit.training.threads import threads

SUITES: tuple[type[Suite], ...] = (
    drift.Frames,
    drift.Models,
    step_time.Parametrizations,
    step_time.Optimizers,
    scan.Scan,
    memory.Parametrizations,
    memory.Scan,
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
    """Predicted seconds of CPU time of some cells, on one core of the machine of `PRODUCTS`."""
    return sum(suite().predicted(mode(), *cell) for cell in cells)


def slowness(rounds: int = 50) -> float:
    """Seconds on the clock here and now for a second of the machine of `PRODUCTS`; more where others are at work."""
    n = 256
    with threads(1):
        product = product_of(n, n, 1, torch.float32, torch.device("cpu"))
        product()
        start = time.perf_counter()
        for _ in range(rounds):
            product()
        return (time.perf_counter() - start) / rounds * PRODUCTS / (2 * n**3)


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
    return 0


if __name__ == "__main__":
    sys.exit(main())
