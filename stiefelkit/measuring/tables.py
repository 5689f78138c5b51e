"""Tables of what was measured, for a terminal and for a page."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stiefelkit.measuring.contest import DriftCurve, Race, Row
from stiefelkit.measuring.implementations import near_orthogonal
from stiefelkit.measuring.plans import UNCONSTRAINED

STEPS = (0, 1, 100, 10_000, 100_000, 1_000_000)  # steps up to which drift is shown
UNITS = {
    "seconds": ("ms", 1e3),
    "kernel_seconds": ("kernels ms", 1e3),
    "spread": ("spread", 1e3),
    "gemm_units": ("g", 1.0),
    "limit_units": ("/ LIMIT", 1.0),
    "ratio_to_best_peer": ("ratio", 1.0),
    "time_over_ours": ("ours x", 1.0),
    "error_over_limit": ("error", 1.0),
    "bytes": ("MB", 1e-6),
    "memory_sequence": ("MB", 1e-6),
    "memory_last_state": ("MB last", 1e-6),
}
"""Figure to the heading and the factor that it is shown with; another has its name above it."""
IN_TITLES = ("operation", "case", "dtype", "device", "T", "B", "m", "is_complex", "activation", "spread", "samples")
"""Figures that a table of a race has in its title, or leaves to the file."""
Cell = str | float | None
Columns = list[tuple[str, Callable[[Row], Cell]]]
"""Headings, and what stands below each: a number, None where there is none, or words."""


class Line(NamedTuple):
    """A row of a table: what it is about, the figures, "ours" or "peer", and whether a group begins here."""

    head: str
    cells: list[str]
    kind: str = "ours"
    opens: bool = False


@dataclass(frozen=True)
class Table:
    """A table with its headings, the first above the heads of the rows."""

    title: str
    columns: list[str]
    rows: list[Line]
    note: str = ""


def three_digits(value: Cell) -> str:
    """Returns three digits; large and small numbers by an exponent, words as they are, a dash for what there is not.

    >>> [three_digits(value) for value in (0.1234, 12345.6, 2.8e7, None)]
    ['0.123', '12,346', '2.8e+07', '-']
    """
    if value is None or isinstance(value, str):
        return value or "-"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2g}"
    decimals = next((d for d, bound in ((0, 99.5), (1, 9.95), (2, 0.995)) if abs(value) >= bound), 3)
    return f"{value:,.{decimals}f}"


def of_race(race: Race) -> Table:
    """Returns the table of a race of any kind that has rows."""
    for key, table in _OF_KEYS.items():
        if key in race.rows[0].figures:
            return table(race)
    return _table(f"{race.operation}, {race.subject}", race, _figures(race), "")


def _of_frames(race: Race) -> Table:
    note = f"g = {three_digits(1e6 * (race.unit or 0))} µs; error in rounding limits"
    if any(row["ratio_to_best_peer"] is not None for row in race.rows):
        note += "; ratio to the best peer"
    columns = _figures(race, (*IN_TITLES, "n", "p", "batch"))
    seconds = {row.name: row["seconds"] for row in race.rows}

    def over_fast(row: Row) -> float | None:
        """Returns the time of a precision "exact" over that of "fast", if it races."""
        fast = row.name.replace("(exact", "(fast")
        return seconds[row.name] / seconds[fast] if fast != row.name and fast in seconds else None

    if any(row.family == "ours" and over_fast(row) for row in race.rows):
        columns.append(("exact/fast", over_fast))
    note = _with_remarks(note, [row.family for row in race.rows])
    return _table(f"{race.operation}, {race.subject}, {_place(race)}", race, columns, note)


def _figures(race: Race, hidden: Collection[str] = ()) -> Columns:
    """Returns a column for each figure that a row has, but for some."""
    found = (name for row in race.rows for name, value in row.figures.items() if value is not None)
    columns: Columns = []
    for name in dict.fromkeys(name for name in found if name not in ("contender", *hidden)):
        heading, factor = UNITS.get(name, (name, 1.0))
        columns.append((heading, lambda row, name=name, factor=factor: _scaled(row.figures.get(name), factor)))
    return columns


def _scaled(value: Cell, factor: float) -> Cell:
    if value is None or isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) and factor == 1 else factor * value


def _of_curves(race: Race) -> Table:
    curves = race.curves
    first, last = max(curve.steps[0] for curve in curves), max(curve.steps[-1] for curve in curves)
    shown = [step for step in STEPS if first <= step < last] + [last]
    columns: Columns = [
        (f"to {step}", lambda row, step=step: DriftCurve.of(row.figures).worst_until(step)) for step in shown
    ]
    note = _with_remarks("", [curve.method for curve in curves])
    return _table(f"largest error up to a step / limit, {curves[0].dtype}, {race.subject}", race, columns, note)


def _with_remarks(note: str, names: Sequence[str]) -> str:
    """Returns a note and, for what is no frame on purpose, the reason."""
    why = {**dict.fromkeys(near_orthogonal(), "near-orthogonal by design"), UNCONSTRAINED: "a plain weight"}
    return "; ".join(filter(None, [note, *(f"{name}: {words}" for name, words in why.items() if name in names)]))


def _place(race: Race) -> str:
    return f"{race.rows[0]['dtype']}, {race.rows[0]['device']}"


def _table(title: str, race: Race, columns: Columns, note: str) -> Table:
    """Returns a table in which a group is a family, or else ours and peers; a row of another dtype names it."""
    lines, group, dtype = [], None, race.rows[0].figures.get("dtype")
    for row in race.rows:
        kind = "peer" if row.is_peer else "ours"
        mine, own = row.family or row.is_peer, row.figures.get("dtype")
        name = row.name + (f", {own}" if own != dtype else "")
        lines.append(Line(name, [three_digits(show(row)) for _, show in columns], kind, group not in (None, mine)))
        group = mine
    return Table(title, ["contender", *(heading for heading, _ in columns)], lines, note)


def _of_scan(race: Race) -> Table:
    note = f"LIMIT = {three_digits(1e3 * (race.unit or 0))} ms; ours x: time over that of our scan"
    title = f"{race.subject}, {race.rows[0]['activation']}, {_place(race)}"
    return _table(title, race, _figures(race, IN_TITLES), note)


def _of_laws(race: Race) -> Table:
    columns: Columns = [("law", lambda row: "holds" if row["holds"] else row["words"] or "broken")]
    held = sum(bool(row["holds"]) for row in race.rows)
    return _table(race.subject, race, columns, f"{held} of {len(race.rows)} hold")


_OF_KEYS: dict[str, Callable[[Race], Table]] = {
    "case": _of_scan,
    "errors": _of_curves,
    "gemm_units": _of_frames,
    "holds": _of_laws,
}
"""A figure that only one kind of race has, to the table of that."""
