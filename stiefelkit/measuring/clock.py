"""The measuring core: versions interleaved in one process, medians, a matrix product as the unit, and peak memory.

It knows nothing of what it measures: a version is a function without arguments.
"""

import functools
import gc
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

Run = Callable[[], Any]
Clock = Callable[[Run, int], float]  # calls a function so many times, and returns the seconds that all of it took

WARM_UPS = 3
SMALLEST_SAMPLE = 1e-3  # seconds: what is faster is called several times in a row, as often as this takes
CPU_CACHE = 1 << 26  # bytes that are written to clear the last cache of a CPU


@dataclass(frozen=True)
class Timing:
    """The samples of one version, seconds per call in the order of measurement, and those of its kernels alone."""

    samples: tuple[float, ...]
    kernels: float | None = None

    @property
    def median(self) -> float:
        """Seconds per call."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Seconds between the quartiles; 0 for a single sample."""
        lower, upper = np.quantile(self.samples, (0.25, 0.75))
        return float(upper - lower)

    @property
    def figures(self) -> dict[str, float]:
        """The entries of the timing in a file of results."""
        figures = {"seconds": self.median, "spread": self.spread, "samples": len(self.samples)}
        return figures if self.kernels is None else {**figures, "kernel_seconds": self.kernels}


def cpu_seconds(run: Run, calls: int, before: Run = lambda: None) -> float:
    """Returns CPU time of this process, all of its threads: what others do to the wall clock does not count."""
    before()
    start = time.process_time()
    for _ in range(calls):
        run()
    return time.process_time() - start


def cuda_seconds(run: Run, calls: int, before: Run = lambda: None, *, device: torch.device | str = "cuda") -> float:
    """Returns time between two CUDA events around the calls, on the current stream of the device.

    What runs `before` is not waited for: the host is ahead while the device is at it.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device, cold: bool = False) -> Clock:
    """Returns the clock for a device; a cold one writes over its last cache before every call, which is not timed."""
    is_cuda = device.type == "cuda"
    clock = functools.partial(cuda_seconds, device=device) if is_cuda else cpu_seconds
    if not cold:
        return clock
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size if is_cuda else CPU_CACHE
    buffer = torch.empty(size, dtype=torch.int8, device=device)
    return lambda run, calls: sum(clock(run, 1, buffer.zero_) for _ in range(calls))


def with_kernels(timings: Mapping[str, Timing], runs: Mapping[str, Run], device: torch.device) -> dict[str, Timing]:
    """Returns timings on a GPU with the time that its kernels take, which is all of it where the host keeps ahead."""
    if device.type != "cuda":
        return dict(timings)
    found = {}
    for name, timing in timings.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            runs[name]()
            torch.cuda.synchronize(device)
        kernels = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
        found[name] = replace(timing, kernels=kernels or None)
    return found


def replayed(run: Run, device: torch.device) -> Run:
    """Returns the replay of a graph of all that a function launches on a GPU, captured after `WARM_UPS` runs."""
    with torch.cuda.device(device):
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return graph.replay


def race(
    versions: Mapping[str, Run],
    clock: Clock = cpu_seconds,
    *,
    repeats: int = 200,
    seconds: float = 1.0,
    watch: Callable[[int, int], None] = lambda done, rounds: None,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[str, Timing]:
    """Times versions side by side.

    After the warm-up every round takes one sample of each version, in an order that changes from round to round, so
    that a slow minute of the machine hits all alike and nobody has the same neighbour always. A version for which
    `repeats` samples would take longer than `seconds` gets fewer, one at least, spread evenly from the first round on.
    The garbage collector is off while the clock runs.

    `watch` is called before each round with the number of rounds done and of all; once `is_over` says so, no more
    samples are taken, and what has none has the fastest run of its warm-up as one. What did not run is left out.
    """
    samples: dict[str, list[float]] = {name: [] for name in versions}
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        fastest = _warmed_up(versions, clock, seconds, is_over)
        planned: dict[str, tuple[int, int]] = {}  # calls in a sample, and samples
        for name, call in fastest.items():
            calls = math.ceil(SMALLEST_SAMPLE / call)
            planned[name] = calls, min(max(int(seconds / (call * calls)), 1), repeats)
        rounds = max((count for _, count in planned.values()), default=0)
        order, source = list(planned), random.Random(0)
        for done in range(rounds):
            watch(done, rounds)
            gc.collect(0)
            source.shuffle(order)
            for name in order:
                calls, count = planned[name]
                is_due = -(-(done + 1) * count // rounds) > -(-done * count // rounds)
                if is_due and not is_over():
                    samples[name].append(clock(versions[name], calls) / calls)
            if is_over():
                break
    finally:
        if was_on:
            gc.enable()
    return {name: Timing(tuple(samples[name] or [call])) for name, call in fastest.items()}


def _warmed_up(
    versions: Mapping[str, Run], clock: Clock, seconds: float, is_over: Callable[[], bool]
) -> dict[str, float]:
    """Runs everything a few times, and returns the seconds of the fastest call of each that ran."""
    spent = dict.fromkeys(versions, 0.0)
    fastest = dict.fromkeys(versions, math.inf)
    for _ in range(WARM_UPS):
        for name, run in versions.items():
            if spent[name] < seconds and not is_over():
                took = clock(run, 1)
                spent[name] += took
                fastest[name] = max(min(fastest[name], took), 1e-7)
    return {name: call for name, call in fastest.items() if call < math.inf}


def product_of(n: int, p: int, batch: int, dtype: torch.dtype, device: torch.device) -> Run:
    """Returns the unit g: one product of an n x p with a p x p matrix, or a batch of such products in one call."""
    lead = () if batch == 1 else (batch,)
    source = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*lead, rows, p, generator=source).to(device, dtype) for rows in (n, p))
    return lambda: a @ b


def peak_bytes(run: Run, device: torch.device) -> int:
    """Returns the bytes by which what torch has allocated grows at most while a function runs once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler announces itself on standard error
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    results: Any = profile.profiler and profile.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    grown = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(grown, initial=0))
