"""The race of the optimizers that move a frame itself, beside geoopt's."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stiefelkit.errors import DtypeError, OptionError
from stiefelkit.measuring.moved_frames import MovedApart, MovedFrame, peer_optimizers, start, start_apart
from stiefelkit.measuring.races.clock import clock_of
from stiefelkit.measuring.races.contenders import APART
from stiefelkit.measuring.races.course import Course, FrameHeat, Watch, frame_heat, product
from stiefelkit.measuring.races.frame_plans import OptimizerRace
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.metrics import orthogonality_error
from stiefelkit.training.memory import threads

__all__ = ["GRADIENTS", "heats"]

GRADIENTS = 16
"""Gradients that a contender gets in turns: with a single one it would soon be where there is no step left to make."""
LONGEST = 20.0
"""Seconds: what takes longer for one step is left out."""


def heats(plan: OptimizerRace, watch: Watch = lambda what, done, rounds: None) -> Iterator[FrameHeat]:
    """Races size by size, and yields each heat when it is over.

    Every contender moves a frame of its own from the same start, by the same gradients in turns, and its learning rate
    gives the first step the same length.
    """
    for n, p in plan.sizes:
        with threads(plan.threads):
            yield _heat(plan, plan.problem(n, p), watch)


def _heat(plan: OptimizerRace, problem: FrameProblem, watch: Watch) -> FrameHeat:
    racing_peers = _with_apart(plan, plan.racing_peers())
    methods = {**_with_apart(plan, plan.contenders()), **racing_peers}
    course = Course(str(problem), racing_peers, watch)
    frame = problem.exact_frame()
    gradients = [problem.gradient() for _ in range(GRADIENTS)]

    def entered(name: str) -> MovedFrame | MovedApart:
        if problem.dtype.is_complex and name in racing_peers and not peer_optimizers.get(methods[name]).complex:
            raise DtypeError(f"it needs a real dtype, got {plan.dtype}.")
        begin = start_apart if name.endswith(APART) else start
        return begin(methods[name], frame, gradients[0], plan.step_length, problem.dtype)

    entries = course.attempt("preparing", methods, entered)
    # peers may write into gradients, ours do not
    runs = {name: _cycle(entry, gradients, name in racing_peers) for name, entry in entries.items()}
    clock = clock_of(problem.device)

    def tried(name: str) -> None:
        took = clock(runs[name], 1)
        if took > LONGEST:
            raise OptionError(f"a step takes {took:.0f} s, more than {LONGEST:.0f}.")

    able = course.attempt("trying", runs, tried)
    timed = course.timed(plan, product(problem), {name: runs[name] for name in able}, "step")
    errors = {name: float(orthogonality_error(entries[name].frame).max()) for name in able}
    families = {name: "peer" if name in racing_peers else "ours" for name in methods}
    yardsticks = [name for name in able if name in racing_peers and peer_optimizers.get(methods[name]).yardstick]
    return frame_heat(plan, problem, "step", course, timed, errors, families, lambda name: yardsticks)


def _with_apart(plan: OptimizerRace, methods: dict[str, str]) -> dict[str, str]:
    """Name in the table to method, and those with the frames of the batch apart."""
    return methods | ({name + APART: method for name, method in methods.items()} if plan.apart else {})


def _cycle(moved: MovedFrame | MovedApart, gradients: list[torch.Tensor], are_copied: bool) -> Callable[[], Any]:
    turns = itertools.cycle([g.clone() for g in gradients] if are_copied else gradients)
    return lambda: moved.step(next(turns))
