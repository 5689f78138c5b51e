"""What all races have in common: their conditions, the running of one heat, and its result."""

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from stiefelkit.errors import StiefelkitError
from stiefelkit.measuring.drift.plan import DTYPES as WIDE_DTYPES
from stiefelkit.measuring.races.clock import Run, clock_of, product_of, race
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.measuring.races.rows import FrameRow
from stiefelkit.metrics import rounding_limit
from stiefelkit.training.checks import (
    at_least,
    finite_positive,
    known_words,
    tall_sizes,
    usable_device,
    usable_seed,
    usable_threads,
)

__all__ = ["DTYPES", "WHO", "Conditions", "Course", "FrameHeat", "Rules", "Watch", "frame_row", "product"]

WHO = "The race"
DTYPES = {**WIDE_DTYPES, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNIT = "the unit"

T = TypeVar("T")
Watch = Callable[[str, int, int], None]
"""Called now and then with words, and how many rounds of how many are done."""


@dataclass(frozen=True)
class Rules:
    """Where and how long a race is run, whatever takes part.

    Args:
        peers: whether other implementations race too.
        device: cpu or cuda.
        repeats: samples of each contender at most.
        seconds: time for the samples of each contender, about.
        threads: CPU threads.
        seed: fixes the draws.
    """

    peers: bool = False
    device: str = "cpu"
    repeats: int = 200
    seconds: float = 1.0
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the ranges."""
        at_least(WHO, "repeats", self.repeats, 1)
        usable_seed(WHO, self.seed)
        usable_threads(WHO, self.threads)
        finite_positive(WHO, "seconds", self.seconds)
        usable_device(WHO, self.device)


@dataclass(frozen=True)
class Conditions(Rules):
    """The conditions of a race of frames.

    Args:
        sizes: (n, p) of the frames.
        batch: number of frames.
        dtype: of the frames.
    """

    sizes: tuple[tuple[int, int], ...] = ((64, 64), (256, 256), (512, 512))
    batch: int = 1
    dtype: str = "float32"

    dtypes: ClassVar[Mapping[str, torch.dtype]] = DTYPES
    """Those that can be raced."""

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        super().__post_init__()
        at_least(WHO, "batch", self.batch, 1)
        tall_sizes(WHO, self.sizes)
        known_words(WHO, "dtype", [self.dtype], self.dtypes)

    def problem(self, n: int, p: int, options: dict[str, Any] | None = None) -> FrameProblem:
        """The problem of one size."""
        return FrameProblem(
            n, p, self.batch, DTYPES[self.dtype], torch.device(self.device), dict(options or {}), self.seed
        )


@dataclass(frozen=True)
class FrameHeat:
    """One operation at one size.

    Attributes:
        problem: the size.
        operation: what was timed.
        unit: seconds of one product, the g of the table.
        rows: the figures, family by family, members before peers, and the fastest first.
        families: of the rows, one each.
        left_out: contender to the reason why it could not take part.
    """

    problem: FrameProblem
    operation: str
    unit: float
    rows: list[FrameRow]
    families: list[str]
    left_out: dict[str, str]


@dataclass
class Course:
    """One size of a race.

    Args:
        rules: of the race.
        problem: the size, in words.
        rivals: names of the peers, which may fail as they like.
        watch: called now and then.
    """

    rules: Rules
    problem: str
    rivals: Container[str]
    watch: Watch

    def each(self, what: str, names: Iterable[str], act: Callable[[str], T], left_out: dict[str, str]) -> dict[str, T]:
        """Name to what `act` returns, for those that do not fail; the others go to `left_out` with their reason.

        A member says by an error of ours what it cannot do. Peers are not ours, and fail as they like.
        """
        found = {}
        for name in names:
            self.watch(f"{self.problem}: {what} {name}", 0, 1)
            try:
                found[name] = act(name)
            except StiefelkitError as error:
                left_out[name] = str(error)
            except (RuntimeError, TypeError, ValueError, AttributeError) as error:
                if name not in self.rivals and "alloc" not in str(error):
                    raise
                left_out[name] = str(error).partition("\n")[0]
        return found

    def timed(self, unit: Run, runs: Mapping[str, Run], operation: str) -> tuple[float, dict[str, float]]:
        """Seconds of the unit, and of each contender."""
        timings = race(
            {UNIT: unit, **runs},
            clock_of(torch.device(self.rules.device)),
            repeats=self.rules.repeats,
            seconds=self.rules.seconds,
            watch=lambda done, rounds: self.watch(f"{self.problem}, {operation}", done, rounds),
        )
        return timings[UNIT].median, {name: timings[name].median for name in runs}


def product(problem: FrameProblem) -> Run:
    """The unit of a race of frames: one product of that size."""
    return product_of(problem.n, problem.p, problem.batch, problem.dtype, problem.device)


def frame_row(
    conditions: Conditions,
    problem: FrameProblem,
    operation: str,
    name: str,
    unit: float,
    seconds: float,
    error: float,
    yardstick: list[float],
) -> FrameRow:
    """The figures of one contender in a race of frames.

    Args:
        conditions: of the race.
        problem: the size.
        operation: what was timed.
        name: the contender.
        unit: seconds of one product.
        seconds: its own.
        error: ||W^H W - I||_F.
        yardstick: seconds of the peers that it is compared with.
    """
    over_limit = error / rounding_limit(problem.p, problem.dtype)
    return FrameRow(
        operation=operation,
        contender=name,
        n=problem.n,
        p=problem.p,
        batch=problem.batch,
        dtype=conditions.dtype,
        device=conditions.device,
        seconds=seconds,
        gemm_units=seconds / unit,
        ratio_to_best_peer=min(yardstick) / seconds if yardstick else None,
        error_over_limit=over_limit if math.isfinite(over_limit) else None,
    )
