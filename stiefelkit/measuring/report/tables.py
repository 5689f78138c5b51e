"""The tables of a report."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.races.field import Race, Row
from stiefelkit.measuring.races.growth import PRODUCT
from stiefelkit.measuring.races.plan import AXES
from stiefelkit.measuring.report.findings import Findings

__all__ = ["Table", "TableRow", "figure_of", "member_of", "tables"]

DASH = "-"
STEPS = (1, 10, 100, 1000, 10_000, 100_000)
Columns = dict[str, Callable[[Row], Any]]
"""Heading to what stands below it: a number, None where there is none, or words."""


@dataclass(frozen=True)
class TableRow:
    """One line: what it is about, the figures, "ours", "peer" or "unit", and whether a group begins here."""

    head: str
    cells: list[str]
    kind: str = "ours"
    opens: bool = False


@dataclass(frozen=True)
class Table:
    """A table with its headings, the first above the heads of the rows; a reader has to unfold it if it is folded."""

    caption: str
    columns: list[str]
    rows: list[TableRow] = field(default_factory=list)
    note: str = ""
    folded: bool = True


def member_of(contender: str) -> str:
    """Returns the name in front of the precision and the options.

    >>> member_of("cayley (exact)")
    'cayley'
    """
    return contender.partition(" (")[0]


def figure_of(value: float | None) -> str:
    """Returns three digits; large ones as powers of ten.

    >>> figure_of(0.1234), figure_of(12345.6), figure_of(2.8e7), figure_of(None)
    ('0.123', '12,300', '2.8 × 10⁷', '-')
    """
    if value is None:
        return DASH
    if not math.isfinite(value):
        return "not finite"
    if value and not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa} × 10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    if abs(value) >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    decimals = 1 if abs(value) >= 9.95 else 2 if abs(value) >= 0.995 else 3
    return f"{value:.{decimals}f}" if abs(value) >= 0.01 else f"{value:.3g}"


def tables(findings: Findings) -> dict[str, list[Table]]:
    """Returns section to its tables."""
    drawn = {"drift": _drift(findings), "ratios": _ratios(findings), "growth": _growth(findings)}
    of_time: Columns = {
        "ms": lambda row: 1e3 * row["seconds"],
        "g": lambda row: row["gemm_units"],
        "ratio": lambda row: row["ratio_to_best_peer"],
        "error": lambda row: row["error_over_limit"],
    }
    drawn["time"] = _raced(findings, findings.time, lambda race: _size(race), lambda race: of_time, "g, one product")
    drawn["norms"] = _raced(
        findings, findings.norms, lambda race: f"Error in rounding limits, {_size(race)}", _of_norms
    )
    drawn["scan"] = _raced(findings, findings.scan, lambda race: f"Case {race.subject}", _of_scan, "LIMIT")
    return {section: [table for table in of_section if table.rows] for section, of_section in drawn.items()}


def _size(race: Race) -> str:
    return str(race.subject).replace(" x ", " × ")


def _of_norms(race: Race) -> Columns:
    def error(row: Row, i: int) -> float:
        return math.nan if row["errors_over_limit"][i] is None else row["errors_over_limit"][i]

    factors = race.rows[0]["factors"]
    return {f"× {factor:,.0f}": lambda row, i=i: error(row, i) for i, factor in enumerate(factors)}


def _of_scan(race: Race) -> Columns:
    columns: Columns = {
        "n": lambda row: str(row["n"]),
        "ms": lambda row: 1e3 * row["seconds"],
        "/ LIMIT": lambda row: row["limit_units"],
        "ours ×": lambda row: row["time_over_ours"],
    }
    if any(row["memory_sequence"] is not None for row in race.rows):
        for loss in ("last_state", "sequence"):
            columns[f"MB, {loss.replace('_', ' ')}"] = lambda row, key=f"memory_{loss}": row[key] and row[key] / 1e6
    return columns


def _raced(
    findings: Findings,
    races: Iterable[Race],
    caption: Callable[[Race], str],
    columns: Callable[[Race], Columns],
    unit: str = "",
    note: str = "",
    folded: bool = True,
) -> list[Table]:
    """Returns a table for each caption; the unit, where there is one, comes first, and a line opens each family."""
    drawn: dict[str, Table] = {}
    for race in (race for race in races if race.rows):
        shown, family = columns(race), None
        empty = Table(caption(race), ["contender", *shown], [], note, folded)
        rows = drawn.setdefault(caption(race), empty).rows
        if unit:
            cells = {"ms": figure_of(1e3 * race.unit), "g": "1", "/ LIMIT": "1"}
            rows.append(TableRow(unit, [cells.get(name, DASH) for name in shown], "unit", opens=True))
        for row in race.rows:
            of_row = [cell(row) for cell in shown.values()]
            cells = [value if isinstance(value, str) else figure_of(value) for value in of_row]
            is_own = row["dtype"] == findings.plan.dtype or "case" in row.figures  # the scan's is that of its input
            head = row.contender if is_own else f"{row.contender}, {row['dtype']}"
            kind = "unit" if row.contender == PRODUCT else "peer" if row.is_peer else "ours"
            rows.append(TableRow(head, cells, kind, row.family not in ("", family)))
            family = row.family
    return list(drawn.values())


def _drift(findings: Findings) -> list[Table]:
    if not findings.drift:
        return []
    last = findings.drift[0].steps[-1]
    shown = [step for step in STEPS if step < last] + [last]
    columns = ["method", "size", "dtype", *(f"to {step:,}" for step in shown)]
    rows, peers = [], peer_optimizers.names()
    for curve in findings.drift:
        worst = [figure_of(curve.worst_until(step)) for step in shown]
        kind = "peer" if curve.method in peers else "ours"
        rows.append(TableRow(curve.method, [f"{curve.n} × {curve.p}", curve.dtype, *worst], kind))
    return [Table("Largest error up to a step, in rounding limits", columns, rows)]


def _ratios(findings: Findings) -> list[Table]:
    rows = [row for race in findings.time for row in race.rows if row["ratio_to_best_peer"] is not None]
    sizes = sorted({race.subject.n for race in findings.time if race.rows})
    cells: dict[str, dict[int, float]] = {}
    for row in rows:
        if not row.is_peer:
            cells.setdefault(row.contender, {})[row["n"]] = row["ratio_to_best_peer"]
    best = {row.family: row.contender for row in rows if row.is_peer and row["ratio_to_best_peer"] == 1.0}
    lines = [
        TableRow(name, [*(figure_of(ratios.get(n)) for n in sizes), best.get(member_of(name), DASH)])
        for name, ratios in cells.items()
    ]
    caption = "Times as fast as the best peer, which is named for the largest n"
    return [Table(caption, ["map", *(f"n = {n}" for n in sizes), "best peer"], lines, folded=False)]


def _growth(findings: Findings) -> list[Table]:
    columns: Columns = {
        "exponent": lambda row: (
            DASH
            if row["exponent"] is None
            else f"{row['exponent']:.2f}" + ("" if row["spread"] is None else f" ± {row['spread']:.2f}")
        ),
        "expected": lambda row: f"{row['expected']:g}" + (" (faster)" if row["faster"] else ""),
        "fitted over": lambda row: DASH if row["first"] is None else f"{row['first']:g} to {row['last']:g}",
        "overhead": lambda row: DASH if row["overhead_until"] is None else f"to {row['overhead_until']:g}",
    }
    drawn = []
    for axis, words in AXES.items():
        races, note = [race for race in findings.growth if race.subject == axis], words.replace(" x ", " × ")
        drawn += _raced(
            findings,
            races,
            lambda race: f"Exponents of {race.operation} against {race.subject}",
            lambda race: columns,
            note=note,
            folded=axis != "n",
        )
    return drawn
