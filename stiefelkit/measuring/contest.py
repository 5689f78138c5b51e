"""The common part of all measurements: implementations are tried and timed until a deadline, and give rows."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from stiefelkit.errors import OptionError, RunError, StiefelkitError, needs
from stiefelkit.files import refuse_special, writable
from stiefelkit.measuring.clock import Run, Timing, clock_of, race, replayed, with_kernels
from stiefelkit.measuring.plans import SUBJECT, Machine, TimingConfig

UNIT = "the unit"
QUICK = 45.0  # seconds that a quick form measures
NO_TIME = "the quick form had no time left for it."  # the reason for what a quick form leaves out

T = TypeVar("T")
ProgressCallback = Callable[[str, int, int], None]  # called now and then with words, and rounds done of how many


def quiet(what: str, done: int, rounds: int) -> None:
    """Shows no progress."""


class Schedule:
    """The end of a measurement, in so many seconds from now: what has not begun by then is left out by name."""

    def __init__(self, seconds: float = math.inf, now: Callable[[], float] = time.monotonic):
        self._now, self._end = now, now() + seconds

    @classmethod
    def of(cls, plan: Machine) -> "Schedule":
        """Returns the schedule of a plan that begins now."""
        return cls(QUICK if plan.quick else math.inf)

    @property
    def left(self) -> float:
        """Seconds until the end; 0 after it."""
        return max(self._end - self._now(), 0.0)

    @property
    def is_over(self) -> bool:
        """True if the end has come."""
        return self.left <= 0

    def check(self) -> None:
        """Raises RunError if the end has come."""
        if self.is_over:
            raise RunError(NO_TIME)

    def shared(self, parts: Sequence[T]) -> Iterator[tuple[T, "Schedule"]]:
        """Gives each part, when it is its turn, with the schedule of its share of the time that is left then."""
        for done, part in enumerate(parts):
            yield part, Schedule(self.left / (len(parts) - done), self._now)


@dataclass(frozen=True)
class Row:
    """The figures of one implementation as a file has them (docs/benchmark-files.md), its name as "contender"."""

    figures: dict[str, Any]
    family: str = ""
    is_peer: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.figures[name]

    @property
    def name(self) -> str:
        """The peer's name, or "name (precision)", with the options that it was given."""
        return self["contender"]


@dataclass(frozen=True)
class DriftCurve:
    """Orthogonality of one n x p weight along a run: the largest error since the step before, NaN once it is lost."""

    method: str
    n: int
    p: int
    limit: float
    steps: list[int] = field(repr=False)
    errors: list[float] = field(repr=False)
    dtype: str = "float32"

    @classmethod
    def of(cls, figures: Mapping[str, object]) -> "DriftCurve":
        """Returns the curve of what a file has of one."""
        curve = cls(**{entry.name: figures[entry.name] for entry in dataclasses.fields(cls)})  # pyright: ignore
        curve.errors[:] = [math.nan if error is None else error for error in curve.errors]
        return curve

    @property
    def figures(self) -> Mapping[str, object]:
        """The entries of the curve in a file of results."""
        return dataclasses.asdict(self) | {"worst": self.worst}

    @property
    def ratios(self) -> list[float]:
        """The errors in multiples of the limit."""
        return [error / self.limit for error in self.errors]

    @property
    def worst(self) -> float:
        """The largest ratio of the run; NaN if an error was."""
        return self.worst_until(self.steps[-1])

    def worst_until(self, step: int) -> float:
        """Returns the largest ratio up to a step."""
        ratios = [ratio for at, ratio in zip(self.steps, self.ratios, strict=True) if at <= step]
        return math.nan if any(map(math.isnan, ratios)) else max(ratios)


@dataclass(frozen=True)
class Race:
    """One table of a measurement: of which size or case, what was done, and who was left out for what reason."""

    subject: str
    operation: str
    rows: list[Row]
    left_out: dict[str, str] = field(default_factory=dict)
    unit: float | None = None

    @property
    def curves(self) -> list[DriftCurve]:
        """The curves of a race of drift."""
        return [DriftCurve.of(row.figures) for row in self.rows]


@dataclass
class Contest:
    """The implementations of one size, of which peers may fail as they like."""

    subject: str
    peers: Container[str] = ()
    watch: ProgressCallback = quiet
    left_out: dict[str, str] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)

    def attempt(self, what: str, names: Iterable[str], act: Callable[[str], T]) -> dict[str, T]:
        """Returns name to what `act` returns; those that fail, ours by an error of ours, are left out."""
        results = {}
        for name in names:
            self.watch(f"{self.subject}: {what} {name}", 0, 1)
            try:
                self.schedule.check()
                results[name] = act(name)
            except StiefelkitError as error:
                self.left_out[name] = str(error)
            except ModuleNotFoundError as error:
                self.left_out[name] = f"{error.name} is not installed."
            except (RuntimeError, TypeError, ValueError, AttributeError) as error:
                is_too_large = "alloc" in str(error)
                if name not in self.peers and not is_too_large:
                    raise
                words = str(error).partition("\n")[0]
                self.left_out[name] = "it does not fit into memory." if is_too_large else words
        return results

    def tried(self, runs: Mapping[str, Run]) -> dict[str, Run]:
        """Runs each once, and returns those that do not fail."""
        able = self.attempt("trying", runs, lambda name: runs[name]())
        return {name: runs[name] for name in able}

    def timed(
        self, config: TimingConfig, unit: Run, runs: Mapping[str, Run], operation: str
    ) -> tuple[float, dict[str, Timing]]:
        """Times the unit, NaN where nothing is timed, and each implementation that can do what is asked for."""
        device = torch.device(config.device)
        if config.replay:
            unit = replayed(unit, device)
            runs = self.attempt("capturing", runs, lambda name: captured(runs[name], device))
        timings = race(
            {UNIT: unit, **runs},
            clock_of(device, config.cold),
            repeats=config.repeats,
            # As much again for the warm-up, and for others at work.
            seconds=min(config.seconds, max(self.schedule.left / (4 * (len(runs) + 1)), 1e-6)),
            watch=lambda done, rounds: self.watch(f"{self.subject}, {operation}", done, rounds),
            is_over=lambda: self.schedule.is_over,
        )
        timed = [name for name in runs if UNIT in timings and name in timings]
        self.left_out.update({name: NO_TIME for name in runs if name not in timed})
        found = {name: timings[name] for name in timed}
        found = found if config.replay else with_kernels(found, runs, device)
        return timings[UNIT].median if timed else math.nan, found


def captured(run: Run, device: torch.device) -> Run:
    """Returns the replay of a graph of a run; OptionError says why there is none."""
    try:
        return replayed(run, device)
    except (RuntimeError, StiefelkitError) as error:
        raise OptionError(f"it cannot be captured: {str(error).partition(chr(10))[0]}") from error


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which torch draws from a seed; the caller's random numbers go on as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns reason to the names that were left out for it."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return names


def finite(value: float) -> float | None:
    """Returns the value, or None where it is not finite, which a file has no number for."""
    return value if math.isfinite(value) else None


def check_place(path: Path) -> None:
    """Raises RunError unless a file can be written there."""
    is_open = path.parent.is_dir() and not path.is_dir() and os.access(path.parent, os.W_OK)
    needs(is_open, RunError, SUBJECT, "a file in an existing folder", str(path))
    with writable(SUBJECT, path):
        refuse_special(path)
