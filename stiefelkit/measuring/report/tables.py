"""The tables of a report."""

import math
from dataclasses import dataclass, field

from stiefelkit.measuring.growth.measure import PRODUCT, GrowthRow
from stiefelkit.measuring.growth.plan import AXES
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.measuring.races.recurrences import LOOP
from stiefelkit.measuring.report.charts import member_of
from stiefelkit.measuring.report.findings import Findings

__all__ = ["Table", "TableRow", "figure_of", "tables"]

DASH = "-"
STEPS = (1, 10, 100, 1000, 10_000, 100_000)


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


def figure_of(value: float | None) -> str:
    """Three digits; large ones as powers of ten.

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


def _size(problem: FrameProblem) -> str:
    return str(problem).replace(" x ", " × ")


def tables(findings: Findings) -> dict[str, list[Table]]:
    """Section to its tables."""
    drawn = {
        "drift": _drift(findings),
        "time": _time(findings),
        "ratios": _ratios(findings),
        "growth": _growth(findings),
        "norms": _norms(findings),
        "scan": _scan(findings),
    }
    return {section: [table for table in of_section if table.rows] for section, of_section in drawn.items()}


def _drift(findings: Findings) -> list[Table]:
    if not findings.drift:
        return []
    last = findings.drift[0].steps[-1]
    shown = [step for step in STEPS if step < last] + [last]
    columns = ["method", "size", "dtype", *(f"to {step:,}" for step in shown)]
    rows, peers = [], peer_optimizers.names()
    for curve, dtype in zip(findings.drift, findings.drift_dtypes, strict=True):
        worst = [figure_of(curve.worst_until(step)) for step in shown]
        kind = "peer" if curve.method in peers else "ours"
        rows.append(TableRow(curve.method, [f"{curve.n} × {curve.p}", dtype, *worst], kind))
    return [Table("Largest error up to a step, in rounding limits", columns, rows)]


def _time(findings: Findings) -> list[Table]:
    drawn: dict[str, Table] = {}
    for heat in findings.time:
        if not heat.rows:
            continue
        columns = ["contender", "ms", "g", "ratio", "error"]
        rows = drawn.setdefault(_size(heat.problem), Table(_size(heat.problem), columns)).rows
        dtype = heat.rows[0].dtype
        suffix = f", {dtype}" if dtype != findings.plan.dtype else ""
        rows.append(TableRow(f"g, one product{suffix}", [figure_of(1e3 * heat.unit), "1", DASH, DASH], "unit", True))
        for number, (row, family) in enumerate(zip(heat.rows, heat.families, strict=True)):
            cells = [1e3 * row.seconds, row.gemm_units, row.ratio_to_best_peer, row.error_over_limit]
            kind = "ours" if member_of(row.contender) == family else "peer"
            opens = number == 0 or heat.families[number - 1] != family
            rows.append(TableRow(row.contender + suffix, [figure_of(cell) for cell in cells], kind, opens))
    return list(drawn.values())


def _ratios(findings: Findings) -> list[Table]:
    heats = [heat for heat in findings.time if heat.rows]
    sizes = sorted({heat.problem.n for heat in heats})
    cells: dict[str, dict[int, float]] = {}
    best: dict[str, str] = {}
    for heat in heats:
        for row, family in zip(heat.rows, heat.families, strict=True):
            if row.ratio_to_best_peer is None:
                continue
            if member_of(row.contender) == family:
                cells.setdefault(row.contender, {})[row.n] = row.ratio_to_best_peer
            elif row.ratio_to_best_peer == 1.0:
                best[family] = row.contender
    only_exact = all("(exact" in name for name in cells)
    rows = [
        TableRow(
            member_of(name) if only_exact else name,
            [*(figure_of(ratios.get(n)) for n in sizes), best.get(member_of(name), DASH)],
        )
        for name, ratios in cells.items()
    ]
    caption = "Times as fast as the best peer, which is named for the largest n"
    columns = ["map", *(f"n = {n}" for n in sizes), "best peer"]
    return [Table(caption, columns, rows, folded=False)]


def _growth(findings: Findings) -> list[Table]:
    drawn = []
    for axis, words in AXES.items():
        by_what = {
            heat.what: {row.contender: row for row in heat.rows} for heat in findings.growth if heat.against == axis
        }
        names = list(dict.fromkeys(name for rows in by_what.values() for name in rows))
        rows = []
        for name in names:
            time, memory = (by_what.get(what, {}).get(name) for what in ("time", "memory"))
            cells = [*_fitted(time, "time"), *_fitted(memory, "memory")]
            kind = "unit" if name == PRODUCT else "ours"
            rows.append(TableRow(_grown(name, [time, memory], findings.plan.dtype), cells, kind))
        columns = ["map", "time", "expected", "fitted over", "overhead", "memory", "expected", "fitted over"]
        drawn.append(
            Table(f"Exponents against {axis}", columns, rows, note=words.replace(" x ", " × "), folded=axis != "n")
        )
    return drawn


def _grown(name: str, pair: list[GrowthRow | None], dtype: str) -> str:
    other = next((row.dtype for row in pair if row is not None and row.dtype != dtype), None)
    return f"{name}, {other}" if other else name


def _fitted(row: GrowthRow | None, what: str) -> list[str]:
    if row is None or row.exponent is None:
        return [DASH] * (4 if what == "time" else 3)
    exponent = f"{row.exponent:.2f}" + ("" if row.spread is None else f" ± {row.spread:.2f}")
    cells = [exponent, f"{row.expected:g}" + (" (faster)" if row.faster else ""), f"{row.first:g} to {row.last:g}"]
    return cells + ([DASH if row.overhead_until is None else f"to {row.overhead_until:g}"] if what == "time" else [])


def _norms(findings: Findings) -> list[Table]:
    drawn: dict[str, Table] = {}
    for heat in findings.norms:
        if not heat.rows:
            continue
        columns = ["contender", *(f"× {factor:,.0f}" for factor in heat.rows[0].factors)]
        caption = f"Error in rounding limits, {_size(heat.problem)}"
        rows = drawn.setdefault(caption, Table(caption, columns)).rows
        suffix = f", {heat.rows[0].dtype}" if heat.rows[0].dtype != findings.plan.dtype else ""
        for number, (row, is_peer) in enumerate(zip(heat.rows, heat.is_peer, strict=True)):
            cells = ["not finite" if error is None else figure_of(error) for error in row.errors_over_limit]
            opens = number == 0 or heat.rows[number - 1].family != row.family
            rows.append(TableRow(row.contender + suffix, cells, "peer" if is_peer else "ours", opens))
    return list(drawn.values())


def _scan(findings: Findings) -> list[Table]:
    drawn = []
    for heat in findings.scan:
        loop = next((row for row in heat.rows if row.contender == LOOP), None)
        rows = [TableRow("LIMIT", ["", figure_of(1e3 * heat.unit), "1", DASH, DASH, DASH], "unit")]
        for row, is_peer in zip(heat.rows, heat.is_peer, strict=True):
            memory = [row.memory_last_state, row.memory_sequence]
            cells = [str(row.n), *map(figure_of, (1e3 * row.seconds, row.limit_units, row.time_over_ours))]
            cells += [figure_of(None if size is None else size / 1e6) for size in memory]
            rows.append(TableRow(row.contender, cells, "peer" if is_peer else "ours"))
        columns = ["contender", "n", "ms", "/ LIMIT", "ours ×", "MB, last state", "MB, sequence"]
        if loop is None or loop.memory_sequence is None:
            columns = columns[:5]
            rows = [TableRow(row.head, row.cells[:4], row.kind) for row in rows]
        drawn.append(Table(f"Case {heat.case}", columns, rows))
    return drawn
