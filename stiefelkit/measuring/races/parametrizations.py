"""The race of the parametrizations, beside their peers."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stiefelkit.measuring.races.contenders import OPERATIONS
from stiefelkit.measuring.races.course import Course, FrameHeat, Watch, frame_heat, product
from stiefelkit.measuring.races.frame_plans import ParametrizationRace
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.metrics import orthogonality_error
from stiefelkit.training.memory import threads

__all__ = ["heats"]


def heats(plan: ParametrizationRace, watch: Watch = lambda what, done, rounds: None) -> Iterator[FrameHeat]:
    """Races size by size and operation by operation, and yields each heat when it is over."""
    # "step" moves the coordinates, so it comes last
    operations = [operation for operation in OPERATIONS if operation in plan.operations]
    for n, p in plan.sizes:
        with threads(plan.threads):
            field = _Field(plan, plan.problem(n, p, plan.options), watch)
            for operation in operations:
                yield field.race(operation)


class _Field:
    """The contenders of one size, made ready once for all operations."""

    def __init__(self, plan: ParametrizationRace, problem: FrameProblem, watch: Watch):
        self.plan, self.problem = plan, problem
        self.racing_peers = plan.racing_peers()
        self.contenders = contenders = {**plan.contenders(), **self.racing_peers}
        self.course = Course(str(problem), self.racing_peers, watch)
        self.gradient = problem.gradient()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.seed)
            self.entries = self.course.attempt("preparing", contenders, lambda name: contenders[name].enter(problem))

    def race(self, operation: str) -> FrameHeat:
        """Times one operation."""
        course = dataclasses.replace(self.course, left_out=dict(self.course.left_out))
        able = [name for name in self.entries if operation in self.contenders[name].operations]
        runs = {name: OPERATIONS[operation](self.entries[name], self.gradient) for name in able}
        errors = course.attempt("trying", runs, lambda name: self._tried(name, runs[name]))
        timed = course.timed(self.plan, product(self.problem), {name: runs[name] for name in errors}, operation)
        families = {name: contender.family for name, contender in self.contenders.items()}

        def family_of(name: str) -> list[str]:
            return [other for other in families if families[other] == families[name]]

        return frame_heat(self.plan, self.problem, operation, course, timed, errors, families, family_of)

    @torch.no_grad()
    def _tried(self, name: str, run: Callable[[], Any]) -> float:
        """Runs once; returns the error of the frame after it."""
        with torch.enable_grad():
            run()
        return float(orthogonality_error(self.entries[name].weight()).max())
