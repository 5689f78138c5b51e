"""Tables of what was measured, for a terminal and for a page."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stiefelkit.measuring.contest import DriftCurve, Race, Row
from stiefelkit.measuring.implementations import APART, GROUPED, near_orthogonal
from stiefelkit.measuring.plans import UNCONSTRAINED

STEPS = (0, 1, 100, 10_000, 100_000, 1_000_000)
"""Steps up to which drift is shown."""
MEMORY = {"last state": "memory_last_state", "sequence": "memory_sequence"}
UNITS = {
    "seconds": (1e3, "ms"),
    "kernel_seconds": (1e3, "kernels ms"),
    "bytes": (1e-6, "MB"),
    "spread": (1e3, "spread"),
}
"""Figure to the factor and the heading that it is shown with, where a race has no table of its own."""
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


def of_race(race: Race) -> list[Table]:
    """Returns the tables of a race of any kind that has rows."""
    row = race.rows[0]
    for key, tables in _OF_KEYS.items():
        if key in row.figures:
            return tables(race)
    return [_of_figures(race)]


def _of_frames(race: Race) -> list[Table]:
    columns: Columns = [
        ("ms", lambda row: 1e3 * row["seconds"]),
        ("g", lambda row: row["gemm_units"]),
        ("error", lambda row: row["error_over_limit"]),
    ]
    note = f"g = {three_digits(1e6 * (race.unit or 0))} µs; error in rounding limits"
    if any(row["ratio_to_best_peer"] is not None for row in race.rows):
        columns.insert(2, ("ratio", lambda row: row["ratio_to_best_peer"]))
        note += "; ratio to the best peer"
    seconds = {row.name: row["seconds"] for row in race.rows}

    def over(row: Row, name: str) -> float | None:
        """Returns the time of one over that of another, if it races."""
        return seconds[row.name] / seconds[name] if name != row.name and name in seconds else None

    def over_fast(row: Row) -> float | None:
        return over(row, row.name.replace("(exact", "(fast"))

    columns[1:1] = _kernels(race)
    if "bytes" in race.rows[0].figures:
        columns.append(("MB", lambda row: row["bytes"] / 1e6))
    if any(row.family == "ours" and over_fast(row) for row in race.rows):
        columns.append(("exact/fast", over_fast))
    if any(name.endswith((APART, GROUPED)) for name in seconds):
        columns.append(("/ batch", lambda row: over(row, re.sub(f"({APART}|{GROUPED})$", "", row.name))))
    note = _with_remarks(note, [row.family for row in race.rows])
    return [_table(f"{race.operation}, {race.subject}, {_place(race)}", race, columns, note)]


def _kernels(race: Race) -> Columns:
    """Returns the column of the time of kernels alone, where a GPU was timed."""
    factor, heading = UNITS["kernel_seconds"]
    is_timed = any("kernel_seconds" in row.figures for row in race.rows)
    return [(heading, lambda row: _scaled(row.figures.get("kernel_seconds"), factor))] * is_timed


def _of_curves(race: Race) -> list[Table]:
    curves = race.curves
    first, last = max(curve.steps[0] for curve in curves), max(curve.steps[-1] for curve in curves)
    shown = [step for step in STEPS if first <= step < last] + [last]
    columns: Columns = [
        (f"to {step}", lambda row, step=step: DriftCurve.of(row.figures).worst_until(step)) for step in shown
    ]
    note = _with_remarks("", [curve.method for curve in curves])
    return [_table(f"largest error up to a step / limit, {curves[0].dtype}, {race.subject}", race, columns, note)]


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


def _of_scan(race: Race) -> list[Table]:
    limit = f"LIMIT = {three_digits(1e3 * (race.unit or 0))} ms"
    title = f"{race.subject}, {race.rows[0]['activation']}, {_place(race)}"
    times: Columns = [
        ("n", lambda row: str(row["n"])),
        ("ms", lambda row: 1e3 * row["seconds"]),
        ("/ LIMIT", lambda row: row["limit_units"]),
        ("ours x", lambda row: row["time_over_ours"]),
    ]
    times[2:2] = _kernels(race)
    tables = [_table(title, race, times, f"{limit}; ours x: time over that of our scan")]
    if any(row[name] is not None for row in race.rows for name in MEMORY.values()):
        sizes: Columns = [
            (heading, lambda row, name=name: row[name] and row[name] / 1e6) for heading, name in MEMORY.items()
        ]
        whole = Race(race.subject, race.operation, [row for row in race.rows if row["operation"] == "sequence"])
        tables.append(_table(f"peak memory, {title}", whole, sizes, "MB above what was there before"))
    return tables


def _of_laws(race: Race) -> list[Table]:
    columns: Columns = [("law", lambda row: "holds" if row["holds"] else row["words"] or "broken")]
    held = sum(bool(row["holds"]) for row in race.rows)
    return [_table(race.subject, race, columns, f"{held} of {len(race.rows)} hold")]


def _of_figures(race: Race) -> Table:
    """Returns the table of a race whose rows have figures of their own."""
    names = list(dict.fromkeys(name for row in race.rows for name in row.figures if name != "contender"))
    columns: Columns = []
    for name in names:
        factor, heading = UNITS.get(name, (1.0, name))
        columns.append((heading, lambda row, name=name, factor=factor: _scaled(row.figures.get(name), factor)))
    return _table(f"{race.operation}, {race.subject}", race, columns, "")


def _scaled(value: Cell, factor: float) -> Cell:
    return value if value is None or isinstance(value, str) else factor * value


_OF_KEYS: dict[str, Callable[[Race], list[Table]]] = {
    "case": _of_scan,
    "errors": _of_curves,
    "gemm_units": _of_frames,
    "holds": _of_laws,
}
"""A figure that only one kind of race has, to the tables of that."""
