"""Figures of a GPU that `python -m benchmarks.gpu` has written, as tables of asv under the name of their machine.

    python -m benchmarks.recorded FILE NAME

needs the environment of `make bench`, and no GPU.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from benchmarks.suite import Suite
from stiefelkit.measuring.report import read_record

VARIABLE = "STIEFELKIT_FIGURES"
"""The file of figures; the tables are empty without."""


def _figures(name: str) -> dict[str, float]:
    """Returns the figures of a name, by part, table and contender."""
    path = os.environ.get(VARIABLE)
    return {
        f"{part.name}: {race.operation}, {race.subject}: {row.name}": row.figures[name]
        for part in (read_record(Path(path)).parts if path else ())
        for race in part.races
        for row in race.rows
        if race.operation != "law" and row.figures.get(name) is not None
    }


class _Recorded(Suite):
    figures: ClassVar[dict[str, float]] = {}
    axes = (("none",),)
    param_names = ("row",)

    def __init_subclass__(cls, track: str = "") -> None:
        cls.axes = (tuple(cls.figures) or ("none",),)
        super().__init_subclass__(track)

    def level(self, *cell: str) -> str:
        return "quick"

    def reason_against(self, *cell: str) -> str | None:
        return None if cell[0] in self.figures else f"{VARIABLE} names no file with it"

    def measure(self, *cell: str) -> float:
        return self.figures[cell[0]]


class Times(_Recorded, track="seconds"):
    """Medians of times: of a map forward and backward, of a step, of recurrences."""

    unit = "s"
    figures = _figures("seconds")


class Drift(_Recorded, track="limits"):
    """The largest error of a run over the rounding limit."""

    unit = "limits"
    figures = _figures("worst")


class Errors(_Recorded, track="limits"):
    """Errors of frames over the rounding limit, after a forward or all steps of a race."""

    unit = "limits"
    figures = _figures("error_over_limit")


class Memory(_Recorded, track="bytes"):
    """The most bytes at once."""

    unit = "bytes"
    figures = _figures("bytes")


def main() -> None:
    """Tells asv what the machine is, enters its figures at the commit that is checked out, and builds the pages."""
    path, name = sys.argv[1:]
    facts = read_record(Path(path)).machine
    place = Path(__file__).resolve().parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=place, check=True, capture_output=True, text=True).stdout
    gpu, memory = facts.get("GPU", ""), facts.get("GPU memory", "")
    machine = ["--os", facts["system"], "--arch", gpu, "--cpu", facts["CPU"], "--ram", memory]
    for words in (
        ["machine", "--yes", "--machine", name, *machine],
        ["run", "--machine", name, "--python=same", "--set-commit-hash", head.strip(), "--bench", "^recorded"],
        ["publish"],
    ):
        line = [sys.executable, "-m", "asv", *words, "--config", "asv.conf.json"]
        subprocess.run(line, cwd=place, check=True, env={**os.environ, VARIABLE: str(Path(path).resolve())})


if __name__ == "__main__":
    main()
