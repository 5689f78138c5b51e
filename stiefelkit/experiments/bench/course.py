"""What all races have in common: their conditions, the running of one heat, and its result."""

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from stiefelkit.errors import StiefelkitError
from stiefelkit.experiments.bench.measure import clock_of, product_of, race
from stiefelkit.experiments.bench.problem import Problem
from stiefelkit.experiments.bench.rows import Row
from stiefelkit.experiments.checks import (
    at_least,
    finite_positive,
    known_words,
    tall_sizes,
    usable_device,
    usable_seed,
    usable_threads,
)
from stiefelkit.experiments.drift.plan import DTYPES as WIDE_DTYPES
from stiefelkit.metrics import rounding_limit

__all__ = ["DTYPES", "WHO", "Conditions", "Course", "Heat", "Watch"]

WHO = "The race"
DTYPES = {**WIDE_DTYPES, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNIT = "one product"

T = TypeVar("T")
Watch = Callable[[str, int, int], None]
"""Called now and then with words, and how many rounds of how many are done."""


@dataclass(frozen=True)
class Conditions:
    """Where and how long a race is run.

    Args:
        sizes: (n, p) of the frames.
        peers: whether other implementations race too.
        batch: number of frames.
        dtype: of the frames.
        device: cpu or cuda.
        repeats: samples of each contender at most.
        seconds: time for the samples of each contender, about.
        threads: CPU threads.
        seed: fixes the draws.
    """

    sizes: tuple[tuple[int, int], ...] = ((64, 64), (256, 256), (512, 512))
    peers: bool = False
    batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    repeats: int = 200
    seconds: float = 1.0
    threads: int = 1
    seed: int = 0

    dtypes: ClassVar[Mapping[str, torch.dtype]] = DTYPES
    """Those that can be raced."""

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        for name in ("batch", "repeats"):
            at_least(WHO, name, getattr(self, name), 1)
        usable_seed(WHO, self.seed)
        usable_threads(WHO, self.threads)
        finite_positive(WHO, "seconds", self.seconds)
        tall_sizes(WHO, self.sizes)
        known_words(WHO, "dtype", [self.dtype], self.dtypes)
        usable_device(WHO, self.device)

    def problem(self, n: int, p: int, options: dict[str, Any] | None = None) -> Problem:
        """The problem of one size."""
        return Problem(n, p, self.batch, DTYPES[self.dtype], torch.device(self.device), dict(options or {}), self.seed)


@dataclass(frozen=True)
class Heat:
    """One operation at one size.

    Attributes:
        problem: the size.
        operation: what was timed.
        unit: seconds of one product, the g of the table.
        rows: the figures, family by family, members before peers, and the fastest first.
        families: of the rows, one each.
        left_out: contender to the reason why it could not take part.
    """

    problem: Problem
    operation: str
    unit: float
    rows: list[Row]
    families: list[str]
    left_out: dict[str, str]


@dataclass
class Course:
    """One size of a race.

    Args:
        conditions: of the race.
        problem: the size.
        rivals: names of the peers, which may fail as they like.
        watch: called now and then.
    """

    conditions: Conditions
    problem: Problem
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

    def timed(self, runs: dict[str, Callable[[], Any]], operation: str) -> tuple[float, dict[str, float]]:
        """Seconds of one product, and of each contender."""
        problem = self.problem
        unit = product_of(problem.n, problem.p, problem.batch, problem.dtype, problem.device)
        timings = race(
            {UNIT: unit, **runs},
            clock_of(problem.device),
            repeats=self.conditions.repeats,
            seconds=self.conditions.seconds,
            watch=lambda done, rounds: self.watch(f"{problem}, {operation}", done, rounds),
        )
        return timings[UNIT].median, {name: timings[name].median for name in runs}

    def row(self, operation: str, name: str, unit: float, seconds: float, error: float, yardstick: list[float]) -> Row:
        """The figures of one contender.

        Args:
            operation: what was timed.
            name: the contender.
            unit: seconds of one product.
            seconds: its own.
            error: ||W^H W - I||_F.
            yardstick: seconds of the peers that it is compared with.
        """
        problem = self.problem
        over_limit = error / rounding_limit(problem.p, problem.dtype)
        return Row(
            operation=operation,
            contender=name,
            n=problem.n,
            p=problem.p,
            batch=problem.batch,
            dtype=self.conditions.dtype,
            device=self.conditions.device,
            seconds=seconds,
            gemm_units=seconds / unit,
            ratio_to_best_peer=min(yardstick) / seconds if yardstick else None,
            error_over_limit=over_limit if math.isfinite(over_limit) else None,
        )
