"""Predicted seconds of a measurement, its time left, and the deadline of its quick form."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from stiefelkit.errors import RunError
from stiefelkit.measuring.races.clock import clock_of, predicted, product_of
from stiefelkit.measuring.races.plan import GrowthPlan, ParametrizationRace, ScanRace, TimedPlan
from stiefelkit.training.memory import threads

QUICK = 50.0
"""Seconds from the start of a command to the end of what its quick form measures."""
NO_TIME = "the quick form had no time left for it."
"""The reason for what a quick form leaves out."""

OPERATORS, PRODUCTS = 500, 15
"""What a map or an optimizer costs, about: operators of a few numbers, and products of an n x p with a p x p matrix."""
STEP_OPERATORS, LIMITS = 30, 3
"""What a recurrence costs, about: operators a step, and times its products."""
EXTRA_CALLS = 2
"""Calls by which a contender is prepared, tried and looked at, about."""
MEMORY_SECONDS = 6.0
"""Seconds of a process that measures memory, about."""


class Deadline:
    """The end of a measurement, in so many seconds from now: what has not begun by then is left out by name."""

    def __init__(self, seconds: float = math.inf, now: Callable[[], float] = time.monotonic):
        self._now, self._end = now, now() + seconds

    @property
    def left(self) -> float:
        """Seconds until the end; 0 after it."""
        return max(self._end - self._now(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether the end has come."""
        return self.left <= 0

    def check(self) -> None:
        """Raises RunError if the end has come."""
        if self.is_over:
            raise RunError(NO_TIME)

    def part(self, share: float) -> "Deadline":
        """Returns the deadline of a part that gets this share, above 0, of the time left."""
        return Deadline(self.left * share, self._now)

    def seconds_each(self, seconds: float, count: int, share: float) -> float:
        """Returns the seconds for the samples of each of so many contenders, at most those given, in a share of it."""
        # As much again for the warm-up, and for others at work.
        return min(seconds, max(self.left * share / (4 * count), 1e-6))


def deadline_of(plan: Any) -> Deadline:
    """Returns the deadline of a plan that begins now."""
    return Deadline(QUICK if plan.quick else math.inf)


class Course:
    """The parts of a measurement with their planned seconds, and how many seconds are left by the pace so far."""

    def __init__(self, planned: Sequence[float], now: Callable[[], float] = time.monotonic):
        self.planned, self._now, self._start, self._done = list(planned), now, now(), 0

    @property
    def total(self) -> float:
        """Predicted seconds of all parts."""
        return sum(self.planned)

    def finished(self) -> None:
        """Goes on to the next part."""
        self._done += 1

    def left(self, fraction: float = 0.0) -> float:
        """Returns the seconds left, once a fraction of the present part is done."""
        ahead = sum(self.planned[self._done :]) - fraction * sum(self.planned[self._done : self._done + 1])
        done, spent = self.total - ahead, self._now() - self._start
        # a pace from little of the work would say little
        return ahead * spent / done if done > 0.05 * self.total else max(self.total - spent, ahead)


def in_words(seconds: float) -> str:
    """Returns a duration in words, to as many digits as a prediction deserves.

    >>> in_words(0.4), in_words(38.2), in_words(200), in_words(9000)
    ('a second', '40 seconds', '3 minutes', '2.5 hours')
    """
    if seconds < 1.5:
        return "a second"
    if seconds < 90:
        return f"{seconds:.0f} seconds" if seconds < 10 else f"{5 * round(seconds / 5)} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.2g} hours"


class Speed(NamedTuple):
    """Seconds, on the clock of a race, of an operator on few numbers and of an operation of a matrix product.

    Attributes:
        busy: seconds on the wall for one on that clock: more than one where others are at work as well.
    """

    operator: float
    flop: float
    busy: float

    def call(self, operators: float, flops: float) -> float:
        """Returns the seconds of a call of so many of them."""
        return operators * self.operator + flops * self.flop


def speed(plan: Any) -> Speed:
    """Measures the place of a plan, in a tenth of a second or so."""
    device, n = torch.device(plan.device), 256
    with threads(plan.threads), torch.no_grad():
        clock, few = clock_of(device), torch.ones(8, device=device)
        product = product_of(n, n, 1, getattr(torch, plan.dtype), device)
        clock(product, 2)
        start = time.perf_counter()
        small, large = clock(lambda: few + few, 20_000), clock(product, 50)
        took = time.perf_counter() - start
    return Speed(small / 20_000, large / (50 * 2 * n**3), max(took / (small + large), 1.0))


def planned(plan: Any, here: Speed | None = None) -> list[float]:
    """Predicts the seconds of each race of any plan, in their order, on this machine as busy as it is."""
    here = here or speed(plan)
    if isinstance(plan, ScanRace):
        seconds = _of_scans(plan, here)
    elif isinstance(plan, GrowthPlan):
        seconds = [part for axis in plan.against for part in _of_axis(plan, here, axis)]
    else:
        seconds = [part for n, p in plan.sizes for part in _of_frames(plan, here, n, p)]
    return [here.busy * each for each in seconds]


def _frame(here: Speed, n: int, p: int, batch: int, apart: bool = False) -> float:
    return here.call(OPERATORS * (batch if apart else 1), PRODUCTS * 2.0 * n * p * p * batch)


def _of_frames(plan: Any, here: Speed, n: int, p: int) -> list[float]:
    call = _frame(here, n, p, plan.batch, getattr(plan, "apart", False))
    count = len(plan.contenders()) + len(plan.racing_peers())
    if not isinstance(plan, TimedPlan):
        return [count * len(plan.factors) * EXTRA_CALLS * call]
    each = EXTRA_CALLS * call
    each += 2 * call if plan.launches else predicted(call, repeats=plan.repeats, seconds=plan.seconds)
    if isinstance(plan, ParametrizationRace):
        return [count * each] * len(plan.operations)
    return [count * (1 + plan.apart) * each]


def _of_axis(plan: GrowthPlan, here: Speed, axis: str) -> list[float]:
    from stiefelkit.contract.table import option_names
    from stiefelkit.weights.attach import available

    names = plan.parametrizations or tuple(available())
    if axis == "reflections":
        names = [name for name in names if axis in option_names(available()[name])]
    total = 0.0
    for x in plan.points(axis):
        n, frames, steps, batch = plan.sizes_at(axis, x)
        if axis == "reflections":
            call = here.call(STEP_OPERATORS * steps, LIMITS * 4.0 * steps * n * x)
        else:
            recurrence = here.call(STEP_OPERATORS * steps, LIMITS * 6.0 * steps * batch * n * n)
            call = _frame(here, n, n, frames) + recurrence
        timed = predicted(call, repeats=plan.repeats, seconds=plan.seconds) if "time" in plan.what else 0.0
        total += len(names) * (timed + EXTRA_CALLS * call * len(plan.what))
    return [total, *[0.0] * (len(plan.what) - 1)]


def _of_scans(plan: ScanRace, here: Speed) -> list[float]:
    from stiefelkit.measuring.races.recurrences import recurrence_peers

    peers = len(plan.named_peers or (recurrence_peers.available() if plan.peers else ()))
    count = 1 + max(len(plan.backends), 1) + peers
    timed = partial(predicted, repeats=plan.repeats, seconds=plan.seconds)
    seconds = []
    for case in plan.cases:
        call = here.call(STEP_OPERATORS * case.T, LIMITS * case.flops)
        memory = 2 * (MEMORY_SECONDS + call) if plan.memory else 0.0
        seconds.append(count * (timed(call) + EXTRA_CALLS * call + memory))
    return seconds + ([seconds[0] / count * 2] if plan.training_step else [])
