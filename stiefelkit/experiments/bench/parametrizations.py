"""The race of the parametrizations, beside their peers."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from stiefelkit.attach import available
from stiefelkit.errors import OptionError, StiefelkitError, UnknownNameError, did_you_mean
from stiefelkit.experiments.bench.contenders import OPERATIONS, Contender, Entry, members, options_of
from stiefelkit.experiments.bench.measure import clock_of, product_of, race
from stiefelkit.experiments.bench.peers import missing_packages, peers
from stiefelkit.experiments.bench.problem import Problem
from stiefelkit.experiments.bench.rows import Row
from stiefelkit.experiments.checks import at_least, at_most, finite_positive, usable_device
from stiefelkit.experiments.drift.plan import DTYPES as WIDE_DTYPES
from stiefelkit.experiments.threads import threads
from stiefelkit.metrics import orthogonality_error, rounding_limit

__all__ = ["DTYPES", "Heat", "Plan", "heats", "missing_peers"]

WHO = "The race"
DTYPES = {**WIDE_DTYPES, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNIT = "one product"

T = TypeVar("T")
Watch = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """What to race.

    Args:
        sizes: (n, p) of the frames.
        members: names of parametrizations; all of them if empty.
        precisions: of the members; each that they have if empty.
        operations: out of forward, forward_backward and step.
        peers: whether the peers of those members race too; with all members, all peers.
        batch: number of frames.
        dtype: of the frames.
        device: cpu or cuda.
        options: of the members that have them.
        repeats: samples of each contender at most.
        seconds: time for the samples of each contender, about.
        threads: CPU threads.
        seed: fixes the draws.
    """

    sizes: tuple[tuple[int, int], ...] = ((64, 64), (256, 256), (512, 512))
    members: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    operations: tuple[str, ...] = ("forward_backward", "step")
    peers: bool = False
    batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    repeats: int = 200
    seconds: float = 1.0
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        known = available()
        for name in ("batch", "repeats", "threads"):
            at_least(WHO, name, getattr(self, name), 1)
        at_least(WHO, "seed", self.seed, 0)
        at_most(WHO, "seed", self.seed, 2**63 - 1)
        at_most(WHO, "threads", self.threads, 1024)
        finite_positive(WHO, "seconds", self.seconds)
        if not self.sizes:
            raise OptionError(f"{WHO} needs one size or more, got none.")
        for n, p in self.sizes:
            if not n >= p >= 1:
                raise OptionError(f"{WHO} needs sizes n x p with n >= p >= 1, got {n} x {p}.")
        if self.dtype not in DTYPES:
            raise OptionError(f"{WHO} has no dtype {self.dtype!r}{did_you_mean(self.dtype, DTYPES)}")
        usable_device(WHO, self.device)
        for name in self.members:
            if name not in known:
                raise UnknownNameError(f"No parametrization is named {name!r}{did_you_mean(name, known)}")
        precisions = {"exact", "fast"}.union(*(cls.precisions for cls in known.values()))
        _check_words("precision", self.precisions, precisions)
        _check_words("operation", self.operations, OPERATIONS)
        if not self.operations:
            raise OptionError(f"{WHO} needs one operation or more, got none.")
        own = {option for name in self.members or known for option in options_of(known[name])}
        _check_words("option", self.options, own)
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


def _check_words(kind: str, words: Iterable[str], known: Collection[str]) -> None:
    for word in words:
        if word not in known:
            raise OptionError(f"{WHO} has no {kind} {word!r}{did_you_mean(word, known)}")


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


def missing_peers(plan: Plan) -> dict[str, list[str]]:
    """Package to the peers that are left out of the race for want of it."""
    return missing_packages(plan.asked_peers())


def heats(plan: Plan, watch: Watch = lambda what, done, rounds: None) -> Iterator[Heat]:
    """Races size by size and operation by operation, and yields each heat when it is over.

    Args:
        plan: what to race.
        watch: called now and then with words, and how many rounds of how many are done.
    """
    # "step" moves the coordinates, so it comes last
    operations = [operation for operation in OPERATIONS if operation in plan.operations]
    for n, p in plan.sizes:
        device = torch.device(plan.device)
        problem = Problem(n, p, plan.batch, DTYPES[plan.dtype], device, dict(plan.options), plan.seed)
        with threads(plan.threads):
            field = _Field(plan, problem, watch)
            for operation in operations:
                yield field.race(operation)


class _Field:
    """The contenders of one size, made ready once for all operations."""

    def __init__(self, plan: Plan, problem: Problem, watch: Watch):
        self.plan, self.problem, self.watch = plan, problem, watch
        self.rivals = plan.rivals()
        self.contenders = {**plan.contenders(), **self.rivals}
        self.refused: dict[str, str] = {}
        self.gradient = problem.gradient()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.seed)
            self.entries = self._each("preparing", self.contenders, self._entered, self.refused)

    def race(self, operation: str) -> Heat:
        """Times one operation."""
        left_out = dict(self.refused)
        able = [name for name in self.entries if operation in self.contenders[name].operations]
        runs = {name: OPERATIONS[operation](self.entries[name], self.gradient) for name in able}
        errors = self._each("trying", runs, lambda name: self._tried(name, runs[name]), left_out)
        unit, seconds = self._timed({name: runs[name] for name in errors}, operation)
        order = sorted(seconds, key=lambda name: (self._family(name), name in self.rivals, seconds[name]))
        rows = [self._row(operation, name, unit, seconds, errors) for name in order]
        return Heat(self.problem, operation, unit, rows, [self._family(name) for name in order], left_out)

    def _timed(self, runs: dict[str, Callable[[], Any]], operation: str) -> tuple[float, dict[str, float]]:
        """Seconds of one product, and of each contender."""
        problem = self.problem
        unit = product_of(problem.n, problem.p, problem.batch, problem.dtype, problem.device)
        timings = race(
            {UNIT: unit, **runs},
            clock_of(problem.device),
            repeats=self.plan.repeats,
            seconds=self.plan.seconds,
            watch=lambda done, rounds: self.watch(f"{problem}, {operation}", done, rounds),
        )
        return timings[UNIT].median, {name: timings[name].median for name in runs}

    def _row(self, operation: str, name: str, unit: float, seconds: dict[str, float], errors: dict[str, float]) -> Row:
        problem = self.problem
        peers_of_it = [
            seconds[peer]
            for peer in self.rivals
            if peer in seconds and self._family(peer) == self._family(name) and math.isfinite(errors[peer])
        ]
        over_limit = errors[name] / rounding_limit(problem.p, problem.dtype)
        return Row(
            operation=operation,
            contender=name,
            n=problem.n,
            p=problem.p,
            batch=problem.batch,
            dtype=self.plan.dtype,
            device=self.plan.device,
            seconds=seconds[name],
            gemm_units=seconds[name] / unit,
            ratio_to_best_peer=min(peers_of_it) / seconds[name] if peers_of_it else None,
            error_over_limit=over_limit if math.isfinite(over_limit) else None,
        )

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

    def _each(self, what: str, names: Iterable[str], act: Callable[[str], T], left_out: dict[str, str]) -> dict[str, T]:
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
