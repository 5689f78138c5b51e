"""The pages of a report and of a `Record`: one file of HTML each, with all of its style and drawings inside."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from stiefelkit.errors import StiefelkitError, printable
from stiefelkit.measuring.drift.plan import UNCONSTRAINED
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.races.contenders import dtype_of
from stiefelkit.measuring.races.field import Race, Row, by_reason
from stiefelkit.measuring.races.growth import PRODUCT
from stiefelkit.measuring.races.plan import AXES
from stiefelkit.measuring.races.recurrences import LOOP
from stiefelkit.measuring.report.charts import Chart, charts, figure_of
from stiefelkit.measuring.report.findings import Findings
from stiefelkit.measuring.report.record import Record
from stiefelkit.weights.attach import available

__all__ = ["environment", "page", "record_page", "tiles"]

STEPS = (1, 10, 100, 1000, 10_000, 100_000)
UNITS = {"s": (1e3, "ms"), "bytes": (1e-6, "MB"), "limits": (1.0, "/ limit"), "law": (1.0, "law")}
"""Unit of a record to the factor and the heading that it is shown with."""
Columns = dict[str, Callable[[Row], Any]]
"""Heading to what stands below it: a number, None where there is none, or words."""


class Line(NamedTuple):
    """A row of a table: what it is about, the figures, "ours", "peer" or "unit", and whether a group begins here."""

    head: str
    cells: list[Any]
    kind: str = "ours"
    opens: bool = False


@dataclass(frozen=True)
class Table:
    """A table with its headings, the first above the heads of the rows; a reader has to unfold it if it is folded."""

    caption: str
    columns: list[str]
    rows: list[Line]
    note: str = ""
    folded: bool = True


@dataclass(frozen=True)
class Section:
    """A part of a page; the words around it stand in the template of a report."""

    id: str
    tables: list[Table]
    left_out: Mapping[str, list[str]]
    charts: list[Chart] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


class Tile(NamedTuple):
    """One figure of a section to begin with, in large letters, what it is, and what to compare it with."""

    section: str
    figure: str
    words: str
    beside: str = ""


@cache
def environment() -> Environment:
    """Returns what the templates of pages are read by."""
    made = Environment(
        loader=PackageLoader("stiefelkit.measuring", "report"),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["figure"] = figure_of
    return made


def page(findings: Findings) -> str:
    """Returns the page of what has been measured so far."""
    drawn, lists, near = charts(findings), tables(findings), near_orthogonal()
    sections = [
        Section(
            name,
            lists[name],
            by_reason(findings.left_out.get(name, {})),
            drawn.get(name, []),
            [] if name == "ratios" else findings.plan.commands(name),
        )
        for name in ("drift", "time", "ratios", "growth", "norms", "scan")
        if (lists[name] if name == "ratios" else getattr(findings, name))
    ]
    more = {"near": near, "took": _minutes(findings.seconds.values()), "tiles": tiles(findings)}
    return _page("report.html", findings.machine, sections, findings=findings, **more)


def record_page(record: Record) -> str:
    """Returns the page of a record: every table of every part, and what was left out."""
    sections, words = [], {}
    for part in record.parts:
        by_table: dict[str, list[dict[str, Any]]] = {}
        for row in (row for row in record.rows if row["part"] == part.part):
            by_table.setdefault(row["table"], []).append(row)
        text = f"{part.seconds:.0f} of {part.limit:.0f} seconds." + (f" It failed: {part.error}" if part.error else "")
        name = part.part[0].upper() + part.part[1:]
        words[part.part] = (name, name, text, "")
        lists = [_of_record(caption, rows) for caption, rows in by_table.items()]
        sections.append(Section(part.part, lists, by_reason(record.left_out.get(part.part, {}))))
    took = f"{_minutes(part.seconds for part in record.parts)} by {record.command}"
    return _page(
        "page.html",
        record.machine,
        sections,
        kind="figures of a device",
        subject="Laws, drift and time",
        lead=f"Measured on {record.date[:10]} in {took}{'' if record.finished else '; it did not come to its end'}.",
        words=words,
        tiles=[],
        broken="; ".join(record.broken),
    )


def _page(template: str, machine: Mapping[str, str], sections: list[Section], **more: Any) -> str:
    style = files("stiefelkit.measuring.report").joinpath("page.css").read_text(encoding="utf-8")
    on = machine.get("GPU") or machine["CPU"]
    return environment().get_template(template).render(style=style, machine=machine, on=on, sections=sections, **more)


def _minutes(seconds: Iterable[float]) -> str:
    minutes = max(1, round(sum(seconds) / 60))
    return "1 minute" if minutes == 1 else f"{minutes} minutes"


def _of_record(caption: str, rows: list[dict[str, Any]]) -> Table:
    if rows[0]["unit"] == "law":
        lines = [Line(row["contender"], ["holds" if row["holds"] else row["words"] or "broken"]) for row in rows]
        broken = sum(row["holds"] is False for row in rows)
        return Table(caption, ["", "law"], lines, f"{len(rows) - broken} of {len(rows)} hold", folded=not broken)
    headings = list(dict.fromkeys(name for row in rows for name in row["beside"]))
    factor, unit = UNITS.get(rows[0]["unit"], (1.0, rows[0]["unit"]))
    lines = []
    for row in rows:
        cells = [None if row["median"] is None else factor * row["median"], factor * row["spread"], str(row["samples"])]
        lines.append(Line(row["contender"], cells + [row["beside"].get(name) for name in headings]))
    return Table(caption, ["contender", unit, "spread", "samples", *headings], lines, folded=False)


def tables(findings: Findings) -> dict[str, list[Table]]:
    """Returns section to its tables."""
    of_time: Columns = {
        "ms": lambda row: 1e3 * row["seconds"],
        "g": lambda row: row["gemm_units"],
        "ratio": lambda row: row["ratio_to_best_peer"],
        "error": lambda row: row["error_over_limit"],
    }
    dtype = findings.plan.dtype
    of_norms = _raced(dtype, findings.norms, lambda race: f"Error in rounding limits, {_size(race)}", _of_norms)
    return {
        "drift": _drift(findings),
        "time": _raced(dtype, findings.time, _size, lambda race: of_time, "g, one product"),
        "ratios": _ratios(findings),
        "growth": _growth(findings),
        "norms": of_norms,
        "scan": _raced(dtype, findings.scan, lambda race: f"Case {race.subject}", _of_scan, "LIMIT"),
    }


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
    dtype: str,
    races: Iterable[Race],
    caption: Callable[[Race], str],
    columns: Callable[[Race], Columns],
    unit: str = "",
    **more: Any,
) -> list[Table]:
    """Returns a table for each caption; the unit, where there is one, comes first, and a line opens each family."""
    drawn: dict[str, Table] = {}
    for race in (race for race in races if race.rows):
        shown, family = columns(race), None
        rows = drawn.setdefault(caption(race), Table(caption(race), ["contender", *shown], [], **more)).rows
        if unit:
            cells = {"ms": 1e3 * race.unit, "g": "1", "/ LIMIT": "1"}
            rows.append(Line(unit, [cells.get(name) for name in shown], "unit", opens=True))
        for row in race.rows:
            is_own = row["dtype"] == dtype or "case" in row.figures  # the scan's is that of its input
            head = row.contender if is_own else f"{row.contender}, {row['dtype']}"
            kind = "unit" if row.contender == PRODUCT else "peer" if row.is_peer else "ours"
            rows.append(Line(head, [cell(row) for cell in shown.values()], kind, row.family not in ("", family)))
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
        worst = [curve.worst_until(step) for step in shown]
        kind = "peer" if curve.method in peers else "ours"
        rows.append(Line(curve.method, [f"{curve.n} × {curve.p}", curve.dtype, *worst], kind))
    return [Table("Largest error up to a step, in rounding limits", columns, rows)]


def _ratios(findings: Findings) -> list[Table]:
    rows = [row for race in findings.time for row in race.rows if row["ratio_to_best_peer"] is not None]
    sizes = sorted({race.subject.n for race in findings.time if race.rows})
    cells: dict[str, dict[int, float]] = {}
    for row in (row for row in rows if not row.is_peer):
        cells.setdefault(row.contender, {})[row["n"]] = row["ratio_to_best_peer"]
    best = {row.family: row.contender for row in rows if row.is_peer and row["ratio_to_best_peer"] == 1.0}
    lines = [Line(name, [*map(ratios.get, sizes), best.get(name.partition(" (")[0])]) for name, ratios in cells.items()]
    caption = "Times as fast as the best peer, which is named for the largest n"
    columns = ["map", *(f"n = {n}" for n in sizes), "best peer"]
    return [Table(caption, columns, lines, folded=False)] if lines else []


def _growth(findings: Findings) -> list[Table]:
    def exponent(row: Row) -> str | None:
        spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
        return None if row["exponent"] is None else f"{row['exponent']:.2f}{spread}"

    columns: Columns = {
        "exponent": exponent,
        "expected": lambda row: f"{row['expected']:g}" + (" (faster)" if row["faster"] else ""),
        "fitted over": lambda row: None if row["first"] is None else f"{row['first']:g} to {row['last']:g}",
        "overhead": lambda row: None if row["overhead_until"] is None else f"to {row['overhead_until']:g}",
    }
    drawn = []
    for axis, words in AXES.items():
        drawn += _raced(
            findings.plan.dtype,
            [race for race in findings.growth if race.subject == axis],
            lambda race: f"Exponents of {race.operation} against {race.subject}",
            lambda race: columns,
            note=words.replace(" x ", " × "),
            folded=axis != "n",
        )
    return drawn


def tiles(findings: Findings) -> list[Tile]:
    """Returns the figures that sum up a report; those of sections that it has."""
    peers, near, shown = peer_optimizers.names(), near_orthogonal(), []
    ours = [curve for curve in findings.drift if curve.method not in (*peers, UNCONSTRAINED, *near)]
    if ours:
        beside = _worst({curve.method: curve.worst for curve in findings.drift if curve.method in peers})
        largest = figure_of(max(_with_nan(curve.worst) for curve in ours))
        shown.append(Tile("drift", largest, f"rounding limits at most in {ours[0].steps[-1]:,} steps", beside))
    times = [row for race in findings.time for row in race.rows if not row.is_peer and row["ratio_to_best_peer"]]
    times = [row for row in times if not row.is_fast]
    if times:
        n = max(row["n"] for row in times)
        ratios = sorted((row["ratio_to_best_peer"], row.member) for row in times if row["n"] == n)
        (low, least), (high, most) = ratios[0], ratios[-1]
        beside = f"n = {n}: {least} least, {most} most"
        shown.append(Tile("ratios", _range(low, high), "as fast as the best peer", beside))
    rows = [row for race in findings.norms for row in race.rows]
    exact = [row for row in rows if not row.is_peer and not row.is_fast and row.family not in near]
    if exact:
        largest = figure_of(max(_with_nan(row["errors_over_limit"][-1]) for row in exact))
        words = f"rounding limits at coordinates × {figure_of(exact[0]['factors'][-1])}"
        beside = _worst({row.contender: row["errors_over_limit"][-1] for row in rows if row.is_peer})
        shown.append(Tile("norms", largest, words, beside))
    scans = [row for race in findings.scan for row in race.rows]
    loops = [row["time_over_ours"] for row in scans if row.contender == LOOP and row["time_over_ours"] is not None]
    if loops:
        best = figure_of(min(row["limit_units"] for row in scans if not row.is_peer))
        figure = _range(min(loops), max(loops))
        shown.append(Tile("scan", figure, "as fast as a loop with autograd", f"{best} times the LIMIT at best"))
    return shown


def _range(low: float, high: float) -> str:
    return " to ".join(dict.fromkeys([figure_of(low), figure_of(high)])) + " ×"


def near_orthogonal() -> list[str]:
    """Returns the maps whose weights are not frames, and not meant to be, by their traits."""
    names = []
    for name, cls in available().items():
        with contextlib.suppress(StiefelkitError):
            names += [] if cls((4, 4), dtype=dtype_of(cls, torch.float32)).traits.exact else [name]
    return names


def _worst(errors: Mapping[str, float | None]) -> str:
    """Returns the name of the largest error, and the error; nothing without any."""
    name = max(errors, key=lambda name: _with_nan(errors[name]), default=None)
    return "" if name is None else f"{name}: {figure_of(errors[name])}"


def _with_nan(value: float | None) -> float:
    """Returns the value, and infinity where it is not finite, so that this is the largest."""
    return math.inf if value is None or math.isnan(value) else value
