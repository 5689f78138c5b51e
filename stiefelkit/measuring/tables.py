"""Tables of what was measured, for a terminal and for a page, each of which chooses the digits of its numbers."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stiefelkit.measuring.drift.plan import UNCONSTRAINED
from stiefelkit.measuring.drift.run import DriftCurve, near_orthogonal
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.races.contenders import APART, GROUPED
from stiefelkit.measuring.races.field import Race, Row
from stiefelkit.measuring.races.growth import PRODUCT
from stiefelkit.measuring.races.plan import AXES
from stiefelkit.measuring.races.recurrences import LOOP

STEPS = (0, 1, 100, 10_000, 100_000, 1_000_000)
"""Steps up to which drift is shown."""
MEMORY = {"last state": "memory_last_state", "sequence": "memory_sequence"}
Columns = list[tuple[str, Callable[[Row], str | float | None]]]
"""Headings, and what stands below each: a number, None where there is none, or words."""


class Line(NamedTuple):
    """A row of a table: what it is about, the figures, "ours", "peer" or "unit", and whether a group begins here."""

    head: str
    cells: list[Any]
    kind: str = "ours"
    opens: bool = False


@dataclass(frozen=True)
class Table:
    """A table with its headings, the first above the heads of the rows.

    Args:
        note: below it, or behind the title of one that is folded.
        folded: whether a reader of a page has to unfold it.
        exponents: whether a terminal shows large numbers by powers of ten.
    """

    title: str
    columns: list[str]
    rows: list[Line]
    note: str = ""
    folded: bool = True
    exponents: bool = False


def three_digits(value: float | str | None) -> str:
    """Returns three digits or all of the integer part, and never an exponent; a dash for what there is not."""
    if value is None or isinstance(value, str):
        return value or "-"
    decimals = next((d for d, bound in ((0, 99.5), (1, 9.95), (2, 0.995)) if abs(value) >= bound), 3)
    return f"{value:,.{decimals}f}"


def of_race(race: Race, dtype: str, shares: bool = False) -> list[Table]:
    """Returns the tables of a race of any kind that has rows.

    Contenders of the plan's dtype need not name it; with `shares` a column has the time of "exact" over that of "fast".
    """
    row = race.rows[0]
    if "launches" in row.figures:
        note = "operators that a device launches, and those that wait for it; on a CPU by the code path of a device"
        counts: Columns = [(name, lambda row, name=name: str(row[name])) for name in ("launches", "reads")]
        return [_table(f"{race.operation}, {race.subject}, {dtype}", race.rows, counts, note)]
    place = f"{row['dtype']}, {row['device']}"
    if "against" in row.figures:
        return [_of_growth(race, dtype)]
    if "errors_over_limit" in row.figures:
        note = "||W^H W - I||_F in rounding limits; the columns: what the coordinates are multiplied by"
        errors: Columns = [(f"x {factor:g}", lambda row, i=i: row.errors[i]) for i, factor in enumerate(row["factors"])]
        return [_table(f"error over the limit, {race.subject}, {place}", race.rows, errors, note, exponents=True)]
    if "case" in row.figures:
        return _of_scan(race, place)
    columns: Columns = [
        ("ms", lambda row: 1e3 * row["seconds"]),
        ("g", lambda row: row["gemm_units"]),
        ("error", lambda row: row["error_over_limit"]),
    ]
    note = f"g = {three_digits(1e6 * race.unit)} µs; error in rounding limits"
    if any(row["ratio_to_best_peer"] is not None for row in race.rows):
        columns.insert(2, ("ratio", lambda row: row["ratio_to_best_peer"]))
        note += "; ratio to the best peer"
    seconds = {row.contender: row["seconds"] for row in race.rows}

    def over(row: Row, name: str) -> float | None:
        """Returns the time of a contender over that of another, if it races."""
        return seconds[row.contender] / seconds[name] if name != row.contender and name in seconds else None

    if shares:
        columns.append(("exact/fast", lambda row: over(row, row.contender.replace("(exact", "(fast"))))
    if any(name.endswith((APART, GROUPED)) for name in seconds):
        columns.append(("/ batch", lambda row: over(row, re.sub(f"({APART}|{GROUPED})$", "", row.contender))))
    note = _with_remarks(note, [row.family or "" for row in race.rows])
    return [_table(f"{race.operation}, {race.subject}, {place}", race.rows, columns, note)]


def of_drift(curves: Sequence[DriftCurve], about: str, note: str = "") -> Table:
    """Returns the table of curves of one dtype and as many steps, with words about their gradients."""
    last = curves[0].steps[-1]
    shown = [step for step in STEPS if step < last] + [last]
    rows = []
    for curve in curves:
        worst = [curve.worst_until(step) for step in shown]
        kind = "peer" if curve.method in peer_optimizers.names() else "ours"
        rows.append(Line(curve.method, [f"{curve.n} x {curve.p}", *worst], kind))
    title = f"largest error up to a step / limit, {curves[0].dtype}, {about}"
    note = _with_remarks(note, [curve.method for curve in curves])
    return Table(title, ["method", "size", *(f"to {step}" for step in shown)], rows, note, exponents=True)


def _with_remarks(note: str, names: Sequence[str]) -> str:
    """Returns a note and, for what is no frame on purpose, the reason."""
    why = {**dict.fromkeys(near_orthogonal(), "near-orthogonal by design"), UNCONSTRAINED: "a plain weight"}
    return "; ".join(filter(None, [note, *(f"{name}: {words}" for name, words in why.items() if name in names)]))


def _table(title: str, rows: Sequence[Row], columns: Columns, note: str, head: str = "contender", **more: Any) -> Table:
    """Returns a table in which a group is a family, or else ours and peers."""
    lines, group = [], None
    for row in rows:
        kind = "unit" if row.contender == PRODUCT else "peer" if row.is_peer else "ours"
        mine = row.family or row.is_peer
        lines.append(Line(row.contender, [show(row) for _, show in columns], kind, group not in (None, mine)))
        group = mine
    return Table(title, [head, *(heading for heading, _ in columns)], lines, note, **more)


def _of_growth(race: Race, dtype: str) -> Table:
    def exponent(row: Row) -> str | None:
        spread = "" if row["spread"] is None else f" +- {row['spread']:.2f}"
        return None if row["exponent"] is None else f"{row['exponent']:.2f}{spread}"

    columns: Columns = [
        ("exponent", exponent),
        ("range", lambda row: None if row["first"] is None else f"{row['first']:g} to {row['last']:g}"),
        ("overhead", lambda row: None if row["overhead_until"] is None else f"to {row['overhead_until']:g}"),
        ("expected", lambda row: f"{row['expected']:g}"),
        ("faster", lambda row: None if row["exponent"] is None else "yes" if row["faster"] else "no"),
    ]
    points = sorted({point for row in race.rows for point in row["points"]})
    title = f"{race.operation} against {race.subject}, {points[0]} to {points[-1]}, {race.rows[0]['device']}"
    note = f"{AXES[race.subject]}; the exponent fitted over the range"
    table = _table(title, race.rows, columns, note, folded=race.subject != "n")
    for i, row in enumerate(race.rows):
        name = row.contender + (f" ({row['precision']})" if row["precision"] not in (None, "exact") else "")
        table.rows[i] = table.rows[i]._replace(head=name + (f", {row['dtype']}" if row["dtype"] != dtype else ""))
    return table


def _of_scan(race: Race, place: str) -> list[Table]:
    row, limit = race.rows[0], f"LIMIT = {three_digits(1e3 * race.unit)} ms"
    title = f"{race.subject}, {row['activation']}, {place}"
    times: Columns = [("ms", lambda row: 1e3 * row["seconds"]), ("/ LIMIT", lambda row: row["limit_units"])]
    if race.operation == "training_step":
        step, alone = race.rows
        share = f"{1 - alone['seconds'] / step['seconds']:.1%}"
        times.append(("outside the scan", lambda row: share if row is step else None))
        title = f"training step of {step.contender}, {race.subject}, {row['device']}"
        return [_table(title, race.rows, times, limit, "what")]
    times = [("n", lambda row: str(row["n"])), *times, ("ours x", lambda row: row["time_over_ours"])]
    tables = [_table(title, race.rows, times, f"{limit}; ours x: time over that of our scan")]
    if any(row[name] is not None for row in race.rows for name in MEMORY.values()):
        loop = next((row for row in race.rows if row.contender == LOOP), None)

        def over_loop(row: Row, name: str) -> float | None:
            return row[name] / loop[name] if row[name] is not None and loop and loop[name] else None

        sizes: Columns = []
        for heading, name in MEMORY.items():
            sizes.append((heading, lambda row, name=name: row[name] and row[name] / 1e6))
            sizes.append((f"/ {LOOP}", lambda row, name=name: over_loop(row, name)))
        note = f"MB above what was there before; / {LOOP}: over that of the same loss"
        rows = [row for row in race.rows if row["operation"] == "sequence"]
        tables.append(_table(f"peak memory, {title}", rows, sizes, note))
    return tables
