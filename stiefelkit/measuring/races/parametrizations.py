"""The race of the parametrizations, beside their peers."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stiefelkit.measuring.races.contenders import OPERATIONS, Entry
from stiefelkit.measuring.races.course import Course, FrameHeat, Watch, frame_row, product
from stiefelkit.measuring.races.frame_plans import ParametrizationRace
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.metrics import orthogonality_error
from stiefelkit.training.threads import threads

__all__ = ["heats"]


def heats(plan: ParametrizationRace, watch: Watch = lambda what, done, rounds: None) -> Iterator[FrameHeat]:
    """Races size by size and operation by operation, and yields each heat when it is over.

    Args:
        plan: what to race.
        watch: called now and then with words, and how many rounds of how many are done.
    """
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
        self.contenders = {**plan.contenders(), **self.racing_peers}
        self.course = Course(str(problem), self.racing_peers, watch)
        self.refused: dict[str, str] = {}
        self.gradient = problem.gradient()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.seed)
            self.entries = self.course.each("preparing", self.contenders, self._entered, self.refused)

    def race(self, operation: str) -> FrameHeat:
        """Times one operation."""
        left_out = dict(self.refused)
        able = [name for name in self.entries if operation in self.contenders[name].operations]
        runs = {name: OPERATIONS[operation](self.entries[name], self.gradient) for name in able}
        errors = self.course.each("trying", runs, lambda name: self._tried(name, runs[name]), left_out)
        unit, seconds = self.course.timed(
            self.plan, product(self.problem), {name: runs[name] for name in errors}, operation
        )
        order = sorted(seconds, key=lambda name: (self._family(name), name in self.racing_peers, seconds[name]))
        families = [self._family(name) for name in order]
        rows = []
        for name, family in zip(order, families, strict=True):
            alike = [peer for peer in order if peer in self.racing_peers and self._family(peer) == family]
            yardstick = [seconds[peer] for peer in alike if math.isfinite(errors[peer])]
            row = frame_row(self.plan, self.problem, operation, name, unit, seconds[name], errors[name], yardstick)
            rows.append(row)
        return FrameHeat(self.problem, operation, unit, rows, families, left_out)

    def _family(self, name: str) -> str:
        return self.contenders[name].family

    def _entered(self, name: str) -> Entry:
        return self.contenders[name].enter(self.problem)

    @torch.no_grad()
    def _tried(self, name: str, run: Callable[[], Any]) -> float:
        """Runs once; returns the error of the frame after it."""
        with torch.enable_grad():
            run()
        return float(orthogonality_error(self.entries[name].weight()).max())
