"""What all races have in common: the running of one heat, and its result."""

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from stiefelkit.errors import StiefelkitError
from stiefelkit.measuring.races.clock import Run, Timing, clock_of, product_of, race, replayed
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.measuring.races.rows import FrameRow
from stiefelkit.measuring.races.rules import FramePlan, Rules
from stiefelkit.metrics import rounding_limit

__all__ = ["Course", "FrameHeat", "Watch", "by_reason", "frame_heat", "product"]

UNIT = "the unit"

T = TypeVar("T")
Watch = Callable[[str, int, int], None]
"""Called now and then with words, and how many rounds of how many are done."""


@dataclass(frozen=True)
class FrameHeat:
    """One operation at one size.

    Attributes:
        problem: the size.
        operation: what was timed.
        unit: seconds of one product, the g of the table.
        rows: the figures, family by family, parametrizations before peers, and the fastest first.
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
        problem: the size, in words.
        racing_peers: names of the peers, which may fail as they like.
        watch: called now and then.
        left_out: contender to the reason why it could not take part.
    """

    problem: str
    racing_peers: Container[str]
    watch: Watch
    left_out: dict[str, str] = field(default_factory=dict)

    def attempt(self, what: str, names: Iterable[str], act: Callable[[str], T]) -> dict[str, T]:
        """Name to what `act` returns, for those that do not fail; the others go to `left_out` with their reason.

        A parametrization says by an error of ours what it cannot do. Peers are not ours, and fail as they like.
        """
        results = {}
        for name in names:
            self.watch(f"{self.problem}: {what} {name}", 0, 1)
            try:
                results[name] = act(name)
            except StiefelkitError as error:
                self.left_out[name] = str(error)
            except (RuntimeError, TypeError, ValueError, AttributeError) as error:
                if name not in self.racing_peers and "alloc" not in str(error):
                    raise
                self.left_out[name] = str(error).partition("\n")[0]
        return results

    def timed(
        self, rules: Rules, unit: Run, runs: Mapping[str, Run], operation: str
    ) -> tuple[float, dict[str, Timing]]:
        """Seconds of the unit, and the timing of each contender; for replays, of those that can be captured."""
        device = torch.device(rules.device)
        if rules.replay:
            unit = replayed(unit, device)
            runs = self._captured(runs, device)
        timings = race(
            {UNIT: unit, **runs},
            clock_of(device, rules.cold),
            repeats=rules.repeats,
            seconds=rules.seconds,
            watch=lambda done, rounds: self.watch(f"{self.problem}, {operation}", done, rounds),
        )
        return timings[UNIT].median, {name: timings[name] for name in runs}

    def _captured(self, runs: Mapping[str, Run], device: torch.device) -> dict[str, Run]:
        graphs = {}
        for name, run in runs.items():
            self.watch(f"{self.problem}: capturing {name}", 0, 1)
            try:
                graphs[name] = replayed(run, device)
            except (RuntimeError, StiefelkitError) as error:
                self.left_out[name] = f"it cannot be captured: {str(error).partition(chr(10))[0]}"
        return graphs


def by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason to the contenders that were left out for it."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return names


def product(problem: FrameProblem) -> Run:
    """The unit of a race of frames: one product of that size."""
    return product_of(problem.n, problem.p, problem.batch, problem.dtype, problem.device)


def frame_heat(
    plan: FramePlan,
    problem: FrameProblem,
    operation: str,
    course: Course,
    timed: tuple[float, Mapping[str, Timing]],
    errors: Mapping[str, float],
    families: Mapping[str, str],
    yardsticks: Callable[[str], Container[str]],
) -> FrameHeat:
    """The figures of a race of frames in the order of its table.

    Of each contender there is the timing, behind the seconds of one product, in `timed`; its error ||W^H W - I||_F; and
    its family. It is compared with those of its `yardsticks` that are peers.
    """
    unit, timings = timed
    seconds = {name: timing.median for name, timing in timings.items()}
    order = sorted(seconds, key=lambda name: (families[name], name in course.racing_peers, seconds[name]))
    sound_peers = [name for name in order if name in course.racing_peers and math.isfinite(errors[name])]
    rows = []
    for name in order:
        yardstick = min((seconds[peer] for peer in sound_peers if peer in yardsticks(name)), default=None)
        over_limit = errors[name] / rounding_limit(problem.p, problem.dtype)
        row = FrameRow(
            operation=operation,
            contender=name,
            n=problem.n,
            p=problem.p,
            batch=problem.batch,
            dtype=plan.dtype,
            device=plan.device,
            seconds=seconds[name],
            gemm_units=seconds[name] / unit,
            ratio_to_best_peer=None if yardstick is None else yardstick / seconds[name],
            error_over_limit=over_limit if math.isfinite(over_limit) else None,
            spread=timings[name].spread,
            samples=len(timings[name].samples),
        )
        rows.append(row)
    return FrameHeat(problem, operation, unit, rows, [families[name] for name in order], course.left_out)
