"""The race of the parametrizations, beside their peers."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from stiefelkit.attach import available
from stiefelkit.errors import OptionError, UnknownNameError, did_you_mean
from stiefelkit.measuring.races.contenders import OPERATIONS, Contender, Entry, members, options_of
from stiefelkit.measuring.races.course import WHO, Conditions, Course, FrameHeat, Watch, frame_row, product
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.measuring.races.peers import missing_packages, peers
from stiefelkit.metrics import orthogonality_error
from stiefelkit.training.checks import known_words
from stiefelkit.training.threads import threads

__all__ = ["ParametrizationRace", "heats", "missing_peers"]


@dataclass(frozen=True)
class ParametrizationRace(Conditions):
    """What to race; peers are those of the members that race, with all members all of them.

    Args:
        members: names of parametrizations; all of them if empty.
        precisions: of the members; each that they have if empty.
        operations: out of forward, forward_backward and step.
        options: of the members that have them.
    """

    members: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    operations: tuple[str, ...] = ("forward_backward", "step")
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        super().__post_init__()
        known = available()
        for name in self.members:
            if name not in known:
                raise UnknownNameError(f"No parametrization is named {name!r}{did_you_mean(name, known)}")
        known_words(
            WHO, "precision", self.precisions, {"exact", "fast"}.union(*(cls.precisions for cls in known.values()))
        )
        known_words(WHO, "operation", self.operations, OPERATIONS)
        if not self.operations:
            raise OptionError(f"{WHO} needs one operation or more, got none.")
        own = {option for name in self.members or known for option in options_of(known[name])}
        known_words(WHO, "option", self.options, own)
        if not self.contenders():
            raise OptionError(f"{WHO} needs a member with precision {' or '.join(self.precisions)}, got none of those.")

    def contenders(self) -> dict[str, Contender]:
        """Name to member, in each precision asked for."""
        return members(self.members or available(), self.precisions, self.options)

    def rivals(self) -> dict[str, Contender]:
        """Name to peer, none unless asked for."""
        found = self.asked_peers()
        missing = {name for names in missing_packages(found).values() for name in names}
        return {name: peer for name, peer in found.items() if name not in missing}

    def asked_peers(self) -> dict[str, Contender]:
        """The same with those whose package is not installed."""
        found = peers.available() if self.peers else {}
        return {name: peer for name, peer in found.items() if not self.members or peer.family in self.members}


def missing_peers(plan: ParametrizationRace) -> dict[str, list[str]]:
    """Package to the peers that are left out of the race for want of it."""
    return missing_packages(plan.asked_peers())


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
        self.rivals = plan.rivals()
        self.contenders = {**plan.contenders(), **self.rivals}
        self.course = Course(plan, str(problem), self.rivals, watch)
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
        unit, seconds = self.course.timed(product(self.problem), {name: runs[name] for name in errors}, operation)
        order = sorted(seconds, key=lambda name: (self._family(name), name in self.rivals, seconds[name]))
        families = [self._family(name) for name in order]
        rows = []
        for name, family in zip(order, families, strict=True):
            alike = [peer for peer in order if peer in self.rivals and self._family(peer) == family]
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
