"""The pages of a report and of a `Record`: one file of HTML each, with all of its style and drawings inside."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from stiefelkit.errors import printable
from stiefelkit.measuring.drift.plan import UNCONSTRAINED
from stiefelkit.measuring.drift.run import DriftCurve, near_orthogonal
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.races.field import by_reason
from stiefelkit.measuring.races.recurrences import LOOP
from stiefelkit.measuring.races.schedule import in_words
from stiefelkit.measuring.report.charts import Chart, charts, figure_of
from stiefelkit.measuring.report.findings import RACES, Findings
from stiefelkit.measuring.report.record import Record
from stiefelkit.measuring.tables import Line, Table, of_drift, of_race

UNITS = {"s": (1e3, "ms"), "bytes": (1e-6, "MB"), "limits": (1.0, "/ limit"), "law": (1.0, "law")}
"""Unit of a record to the factor and the heading that it is shown with."""


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
        if (lists[name] if name == "ratios" else getattr(findings, name) or findings.left_out.get(name))
    ]
    more = {"near": near, "took": in_words(sum(findings.seconds.values())), "tiles": tiles(findings)}
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
    took = f"{in_words(sum(part.seconds for part in record.parts))} by {record.command}"
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
    curves: dict[str, list[DriftCurve]] = {}
    for curve in findings.drift:
        curves.setdefault(curve.dtype, []).append(curve)
    raced = {
        name: [table for race in getattr(findings, name) if race.rows for table in of_race(race, findings.plan.dtype)]
        for name in RACES
    }
    drift = [of_drift(each, "rotation gradients") for each in curves.values()]
    return {**raced, "drift": drift, "ratios": _ratios(findings)}


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


def _worst(errors: Mapping[str, float | None]) -> str:
    """Returns the name of the largest error, and the error; nothing without any."""
    name = max(errors, key=lambda name: _with_nan(errors[name]), default=None)
    return "" if name is None else f"{name}: {figure_of(errors[name])}"


def _with_nan(value: float | None) -> float:
    """Returns the value, and infinity where it is not finite, so that this is the largest."""
    return math.inf if value is None or math.isnan(value) else value
