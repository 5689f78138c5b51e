"""What `python -m benchmarks.gpu` has measured, as tables of asv.

`STIEFELKIT_FIGURES=runs/gpu/gpu.json asv run ...` takes them in.
"""

import functools
import os
from pathlib import Path
from typing import ClassVar

from benchmarks.suite import Suite
from stiefelkit.measuring.report.record import read_record

VARIABLE = "STIEFELKIT_FIGURES"
"""The file of figures; the tables are empty without."""


@functools.cache
def _medians(unit: str) -> dict[str, float]:
    """Row to its median, of the rows in a unit."""
    path = os.environ.get(VARIABLE)
    rows = read_record(Path(path)).rows if path else []
    return {
        f"{row['part']}: {row['table']}: {row['contender']}": row["median"]
        for row in rows
        if row["unit"] == unit and row["median"] is not None
    }


class _Rows(Suite):
    unit = "s"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = (("none",), ("recorded",))
    param_names = ("row", "device")

    def level(self, *cell: str) -> str:
        return "quick"

    def reason_against(self, *cell: str) -> str | None:
        return None if cell[0] in _medians(self.unit) else f"{VARIABLE} names no file with it"

    def measure(self, *cell: str) -> float:
        return _medians(self.unit)[cell[0]]


def _axes(unit: str) -> tuple[tuple[str, ...], ...]:
    return tuple(_medians(unit)) or ("none",), ("recorded",)


class Times(_Rows):
    """Medians of times."""

    axes = _axes("s")

    def track_seconds(self, *cell: str) -> float:
        return self.figure


class Drift(_Rows):
    """Largest errors over the limit."""

    unit = "limits"
    axes = _axes("limits")

    def track_limits(self, *cell: str) -> float:
        return self.figure


class Memory(_Rows):
    """Most bytes at once."""

    unit = "bytes"
    axes = _axes("bytes")

    def track_bytes(self, *cell: str) -> float:
        return self.figure
