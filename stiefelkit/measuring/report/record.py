"""Figures of one device as a file: rows that say what they are, on what, and how far they scatter."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError
from stiefelkit.training.files import parse_json, write_json

__all__ = ["KIND", "Figure", "PartOutcome", "Record", "read_record"]

KIND = "stiefelkit figures of a device, 1"
"""What a file says of itself, to be told from others."""
WHO = "A page of figures"


@dataclass(frozen=True)
class Figure:
    """One row.

    Args:
        part: what it belongs to.
        table: its table in the part.
        contender: its name in the table.
        unit: s, limits, bytes, or "law" for one that holds or not.
        median: of the samples; None where a law broke, or a value was not finite.
        spread: between the quartiles.
        samples: how many.
        beside: further numbers of the row, by the headings of their columns.
        holds: whether a law holds; None for what is no law.
        words: what was found, where a law broke.
    """

    part: str
    table: str
    contender: str
    unit: str
    median: float | None
    spread: float = 0.0
    samples: int = 1
    beside: dict[str, float | None] = field(default_factory=dict)
    holds: bool | None = None
    words: str = ""


@dataclass
class PartOutcome:
    """How a part went: the seconds it took, those that it had, and what ended it before its time, if anything."""

    part: str
    seconds: float
    limit: float
    error: str = ""


@dataclass
class Record:
    """All that was measured on a device.

    Attributes:
        machine: words to facts about it and what runs on it.
        date: ISO 8601.
        command: that made it.
        rows: a `Figure` as a dict, with "machine", the facts that rows of several files are told apart by, and
            "clocks", what the device said of itself when the row was measured.
        left_out: part to what was left out, and the reason.
        parts: how each went.
        finished: whether all are there.
    """

    machine: dict[str, str]
    date: str
    command: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    parts: list[PartOutcome] = field(default_factory=list)
    finished: bool = False
    kind: str = KIND

    def add(self, figure: Figure, clocks: dict[str, float]) -> None:
        """Appends a row."""
        named = ("GPU", "CPU", "driver", "CUDA", "torch", "triton", "stiefelkit")
        facts = {name: self.machine[name] for name in named if name in self.machine}
        self.rows.append(dataclasses.asdict(figure) | {"machine": facts, "clocks": clocks})

    @property
    def broken(self) -> list[str]:
        """The laws that do not hold, and the parts that failed."""
        laws = [f"{row['part']}: {row['table']}, {row['contender']}" for row in self.rows if row["holds"] is False]
        return laws + [f"{part.part}: {part.error}" for part in self.parts if part.error]

    def write(self, path: Path) -> None:
        """Replaces a file as a whole."""
        write_json(path, dataclasses.asdict(self))


def read_record(path: Path) -> Record:
    """Reads what `Record.write` has written.

    Raises:
        RunError: there is no such file, or it is another.
    """
    try:
        content: Any = parse_json(path.read_bytes())
    except OSError as error:
        raise RunError(f"{WHO} needs a file that can be read, got {path}: {error.strerror}.") from error
    except ValueError as error:
        raise RunError(f"{WHO} needs a file that benchmarks.gpu wrote, got {path}: {error}.") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise RunError(f"{WHO} needs a file that benchmarks.gpu wrote, got {path}, which says nothing of that kind.")
    try:
        figures = {entry.name for entry in dataclasses.fields(Figure)}
        for row in content["rows"]:
            Figure(**{name: row[name] for name in figures})
        record = Record(**content)
        record.parts = [PartOutcome(**part) for part in content["parts"]]
        return record
    except (KeyError, TypeError) as error:
        raise RunError(
            f"{WHO} needs a whole file of benchmarks.gpu, got {path}, which lacks something: {error}."
        ) from error
