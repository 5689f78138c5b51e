"""The race of the optimizers that move a frame itself, beside geoopt's."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from stiefelkit.errors import DtypeError, OptionError
from stiefelkit.measuring.drift.plan import DTYPES
from stiefelkit.measuring.moved_frames import MovedFrame, check_method, own_optimizers, peer_optimizers, start
from stiefelkit.measuring.races.clock import clock_of
from stiefelkit.measuring.races.course import WHO, Conditions, Course, FrameHeat, Watch, frame_row, product
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.metrics import orthogonality_error
from stiefelkit.optim.frame_optimizer import PRECISIONS
from stiefelkit.training.checks import known_words, step_length
from stiefelkit.training.threads import threads

__all__ = ["GRADIENTS", "OptimizerRace", "heats"]

GRADIENTS = 16
"""Gradients that a contender gets in turns: with a single one it would soon be where there is no step left to make."""
LONGEST = 20.0
"""Seconds: what takes longer for one step is left out."""


@dataclass(frozen=True)
class OptimizerRace(Conditions):
    """What to race.

    Args:
        optimizers: names of those that move frames, ours and peers; all of ours if empty. Peers that are named race,
            and no others.
        precisions: of ours; exact and fast if empty.
        step_length: of the first step, lr ||B||_2.
    """

    optimizers: tuple[str, ...] = ()
    precisions: tuple[str, ...] = PRECISIONS
    step_length: float = 0.1

    dtypes: ClassVar[Mapping[str, torch.dtype]] = DTYPES

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        super().__post_init__()
        step_length(WHO, self.step_length)
        known_words(WHO, "optimizer of frames", self.optimizers, [*own_optimizers(), *peer_optimizers.names()])
        known_words(WHO, "precision", self.precisions, PRECISIONS)
        if self._own() and not self.contenders():
            raise OptionError(f"{WHO} needs an optimizer in precision exact or fast, got none.")

    def contenders(self) -> dict[str, str]:
        """Name in the table to method, for ours in each precision that they have."""
        found = {}
        for name in self._own():
            for precision in self.precisions or PRECISIONS:
                try:
                    check_method(f"{name}:{precision}")
                except OptionError:
                    continue
                found[f"{name} ({precision})"] = f"{name}:{precision}"
        return found

    def _own(self) -> list[str]:
        return [name for name in own_optimizers() if name in self.optimizers or not self.optimizers]

    def rivals(self) -> dict[str, str]:
        """The same for peers: those that are named, else all or none."""
        known = peer_optimizers.names()
        named = [name for name in self.optimizers if name in known]
        return {name: name for name in named or (peer_optimizers.available() if self.peers else ())}


def heats(plan: OptimizerRace, watch: Watch = lambda what, done, rounds: None) -> Iterator[FrameHeat]:
    """Races size by size, and yields each heat when it is over.

    Every contender moves a frame of its own from the same start, by the same gradients in turns, and its learning rate
    gives the first step the same length.

    Args:
        plan: what to race.
        watch: called now and then with words, and how many rounds of how many are done.
    """
    for n, p in plan.sizes:
        with threads(plan.threads):
            yield _heat(plan, plan.problem(n, p), watch)


def _heat(plan: OptimizerRace, problem: FrameProblem, watch: Watch) -> FrameHeat:
    rivals = plan.rivals()
    methods = {**plan.contenders(), **rivals}
    course = Course(plan, str(problem), rivals, watch)
    frame = problem.exact_frame()
    gradients = [problem.gradient() for _ in range(GRADIENTS)]
    left_out: dict[str, str] = {}

    def entered(name: str) -> MovedFrame:
        if problem.dtype.is_complex and name in rivals and not peer_optimizers.get(name).complex:
            raise DtypeError(f"it needs a real dtype, got {plan.dtype}.")
        return start(methods[name], frame, gradients[0], plan.step_length, problem.dtype)

    entries = course.each("preparing", methods, entered, left_out)
    # peers may write into gradients, ours do not
    runs = {name: _cycle(entry, gradients, name in rivals) for name, entry in entries.items()}
    clock = clock_of(problem.device)

    def tried(name: str) -> None:
        took = clock(runs[name], 1)
        if took > LONGEST:
            raise OptionError(f"a step takes {took:.0f} s, more than {LONGEST:.0f}.")

    able = course.each("trying", runs, tried, left_out)
    unit, seconds = course.timed(product(problem), {name: runs[name] for name in able}, "step")
    errors = {name: float(orthogonality_error(entries[name].frame).max()) for name in seconds}
    yardstick = [
        seconds[name]
        for name in seconds
        if name in rivals and peer_optimizers.get(name).yardstick and math.isfinite(errors[name])
    ]
    order = sorted(seconds, key=lambda name: (name in rivals, seconds[name]))
    rows = [frame_row(plan, problem, "step", name, unit, seconds[name], errors[name], yardstick) for name in order]
    families = ["peer" if name in rivals else "ours" for name in order]
    return FrameHeat(problem, "step", unit, rows, families, left_out)


def _cycle(moved: MovedFrame, gradients: list[torch.Tensor], are_copied: bool) -> Callable[[], Any]:
    turns = itertools.cycle([g.clone() for g in gradients] if are_copied else gradients)
    return lambda: moved.step(next(turns))
