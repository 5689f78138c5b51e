"""The common part of all races: contenders are tried and timed, and give rows."""

import contextlib
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from stiefelkit.errors import OptionError, RunError, StiefelkitError
from stiefelkit.measuring.races.clock import Run, Timing, clock_of, race, replayed
from stiefelkit.measuring.races.plan import Rules
from stiefelkit.measuring.races.schedule import NO_TIME, Deadline
from stiefelkit.training.files import refuse_special, writable

UNIT = "the unit"

T = TypeVar("T")
Watch = Callable[[str, int, int], None]
"""Called now and then with words, and how many rounds of how many are done."""


def quiet(what: str, done: int, rounds: int) -> None:
    """Watches without a word."""


@dataclass(frozen=True)
class Row:
    """The figures of one contender; `row["seconds"]` is one of its figures.

    Attributes:
        figures: as a file has them, "contender" among them; docs/benchmark-files.md lists those of each race.
        family: the map that it computes; contenders of one family are compared.
        is_peer: whether it is another implementation.
    """

    figures: dict[str, Any]
    family: str = ""
    is_peer: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.figures[name]

    @property
    def contender(self) -> str:
        """The peer's name, or "name (precision)", with the options that it was given."""
        return self["contender"]

    @property
    def member(self) -> str:
        """Its name alone, without precision and options."""
        return self.contender.partition(" (")[0]

    @property
    def errors(self) -> list[float]:
        """Errors over the limit for all factors, NaN where one is not finite."""
        return [math.nan if error is None else error for error in self["errors_over_limit"]]

    @property
    def is_fast(self) -> bool:
        """True of ours in precision fast."""
        return "(fast" in self.contender


@dataclass(frozen=True)
class Race:
    """One table of a race.

    Attributes:
        subject: the size, the case or the axis that was raced.
        operation: what was done, and timed or counted.
        left_out: contender to the reason why it could not take part.
        unit: seconds of the unit, where times have one.
    """

    subject: Any
    operation: str
    rows: list[Row]
    left_out: dict[str, str]
    unit: float = math.nan


@dataclass
class Field:
    """The contenders of one size.

    Args:
        subject: the size, in words.
        peers: names of the peers, which may fail as they like.
        deadline: the end, after which contenders are left out.
        share: the part of the time until then that samples are to take.
    """

    subject: str
    peers: Container[str]
    watch: Watch
    left_out: dict[str, str] = field(default_factory=dict)
    deadline: Deadline = field(default_factory=Deadline)
    share: float = 1.0

    def attempt(self, what: str, names: Iterable[str], act: Callable[[str], T]) -> dict[str, T]:
        """Returns name to what `act` returns, for those that do not fail; the others go to `left_out`.

        What is ours says by an error of ours what it cannot do.
        """
        results = {}
        for name in names:
            self.watch(f"{self.subject}: {what} {name}", 0, 1)
            try:
                self.deadline.check()
                results[name] = act(name)
            except StiefelkitError as error:
                self.left_out[name] = str(error)
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
        self, rules: Rules, unit: Run, runs: Mapping[str, Run], operation: str
    ) -> tuple[float, dict[str, Timing]]:
        """Times the unit and each contender; for replays, those that can be captured.

        The unit of a race without timings is NaN.
        """
        device = torch.device(rules.device)
        if rules.replay:
            unit = replayed(unit, device)
            runs = self.attempt("capturing", runs, lambda name: _captured(runs[name], device))
        timings = race(
            {UNIT: unit, **runs},
            clock_of(device, rules.cold),
            repeats=rules.repeats,
            seconds=self.deadline.seconds_each(rules.seconds, len(runs) + 1, self.share),
            watch=lambda done, rounds: self.watch(f"{self.subject}, {operation}", done, rounds),
            is_over=lambda: self.deadline.is_over,
        )
        timed = [name for name in runs if UNIT in timings and name in timings]
        self.left_out.update({name: NO_TIME for name in runs if name not in timed})
        return timings[UNIT].median if timed else math.nan, {name: timings[name] for name in timed}


def _captured(run: Run, device: torch.device) -> Run:
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
    """Returns reason to the contenders that were left out for it."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return names


def finite(value: float) -> float | None:
    """Returns the value, or None where it is not finite, which a file has no number for."""
    return value if math.isfinite(value) else None


def scatter(timing: Timing) -> dict[str, Any]:
    """Returns the figures that say how far the samples of a time scatter."""
    return {"spread": timing.spread, "samples": len(timing.samples)}


def check_place(path: Path) -> None:
    """Raises RunError unless a file can be written there."""
    if not path.parent.is_dir():
        raise RunError(f"The race needs an existing folder for its rows, got {path}.")
    with writable("The race", path):
        refuse_special(path)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise RunError(f"The race needs a file that can be written, got {path}.")
