"""The pages of a report and of a `Record`: one file of HTML each, with all of its style and drawings inside."""

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from stiefelkit.errors import printable
from stiefelkit.measuring.drift.plan import UNCONSTRAINED
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.races.field import by_reason
from stiefelkit.measuring.races.recurrences import LOOP
from stiefelkit.measuring.report.charts import Chart, charts
from stiefelkit.measuring.report.findings import Findings
from stiefelkit.measuring.report.record import Record
from stiefelkit.measuring.report.tables import Table, TableRow, figure_of, member_of, tables

__all__ = ["environment", "page", "record_page", "tiles"]

HEADINGS = {
    "drift": ("Drift", "Drift against steps"),
    "time": ("Time", "Time against n"),
    "ratios": ("Peers", "Beside other implementations"),
    "growth": ("Growth", "Growth"),
    "norms": ("Norms", "Error against the norm of the coordinates"),
    "scan": ("Scan", "The scan"),
}
"""Section to its name in the list of sections, and its heading."""
TEXTS = {
    "drift": "Optimizer steps under a gradient that turns the weight steadily. A point is the largest error since the "
    "point before; dashed lines are other implementations, the grey one is a weight that nothing holds.",
    "time": "The frame from its coordinates and the gradient of the coordinates, n × n. The thick line is g, one "
    "product of n × n matrices, measured in the same turns: the limit of a map that multiplies matrices.",
    "ratios": "Time of the fastest other implementation of the same map over ours: right of the dotted line ours is "
    "faster. Small figures are n.",
    "growth": "Exponents k of c xᵏ, by least squares between logarithms, with their standard errors. Where the next "
    "point costs less than half of what the exponent says, it is overhead, and not fitted.",
    "norms": "Coordinates as an initial draw has them, multiplied by up to the largest factor. Long training, a large "
    "learning rate or a loaded checkpoint take them there.",
    "scan": "hₜ = act(xₜUᵀ + hₜ₋₁Wᵀ) over a whole sequence, forward and backward. LIMIT, the line at 1, is the time of "
    "the matrix products that no scan can do without. Grey bars are other implementations, of as many units.",
}
NOTES = {
    "time": "g: time in matrix products. ratio: time of the fastest peer of the same map over this time. error: in "
    "rounding limits.",
    "ratios": "From the same race as the times.",
    "growth": "Expected: against n, the cost exponent that the map declares, and 2 for memory, as the frame itself; "
    "else 1. Memory is the most that torch holds at once beyond what was there before.",
    "scan": "ours ×: time over that of our scan with the backend that “auto” picks.",
}
UNITS = {"s": (1e3, "ms"), "bytes": (1e-6, "MB"), "limits": (1.0, "/ limit"), "law": (1.0, "law")}
"""Unit of a record to the factor and the heading that it is shown with."""


@dataclass(frozen=True)
class Section:
    """A part of a page, under its heading."""

    id: str
    name: str
    heading: str
    text: str
    tables: list[Table]
    charts: list[Chart] = field(default_factory=list)
    note: str = ""
    commands: list[str] = field(default_factory=list)
    left_out: Mapping[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Tile:
    """One figure of a section to begin with, in large letters, what it is, and what to compare it with."""

    section: str
    figure: str
    words: str
    beside: str = ""


@cache
def environment() -> Environment:
    """Returns what the template of pages is read by."""
    return Environment(
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(findings: Findings) -> str:
    """Returns the page of what has been measured so far."""
    plan, near = findings.plan, near_orthogonal()
    nearly = f" By intention {', '.join(near)} is only near orthogonal." if near else ""
    drawn, lists = charts(findings), tables(findings)
    sections = []
    for name, (short, heading) in HEADINGS.items():
        measured = "time" if name == "ratios" else name
        if getattr(findings, measured) and (name != "ratios" or lists[name]):
            text = TEXTS[name] + nearly * (name in ("drift", "norms"))
            alone = [] if name == "ratios" else plan.commands(name)
            left_out = by_reason(findings.left_out.get(name, {}))
            of_section = (lists[name], drawn.get(name, []), NOTES.get(name, ""), alone, left_out)
            sections.append(Section(name, short, heading, text, *of_section))
    threads = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
    return _page(
        findings.machine,
        f"{'full' if plan.full else 'quick'} report",
        "Orthogonality and speed",
        f"Measured on {findings.date[:10]} in {_minutes(findings.seconds.values())}, {plan.dtype} on {plan.device}, "
        f"{threads}.",
        sections,
        tiles(findings),
    )


def record_page(record: Record) -> str:
    """Returns the page of a record: every table of every part, and what was left out."""
    sections = []
    for part in record.parts:
        by_table: dict[str, list[dict[str, Any]]] = {}
        for row in record.rows:
            if row["part"] == part.part:
                by_table.setdefault(row["table"], []).append(row)
        text = f"{part.seconds:.0f} of {part.limit:.0f} seconds." + (f" It failed: {part.error}" if part.error else "")
        name = part.part[0].upper() + part.part[1:]
        left_out = by_reason(record.left_out.get(part.part, {}))
        lists = [_of_record(caption, rows) for caption, rows in by_table.items()]
        sections.append(Section(part.part, name, name, text, lists, left_out=left_out))
    return _page(
        record.machine,
        "figures of a device",
        "Laws, drift and time",
        f"Measured on {record.date[:10]} in {_minutes(part.seconds for part in record.parts)} by {record.command}"
        f"{'' if record.finished else '; it did not come to its end'}.",
        sections,
        broken="; ".join(record.broken),
    )


def _page(
    machine: Mapping[str, str],
    kind: str,
    subject: str,
    lead: str,
    sections: list[Section],
    tiles: list[Tile] | None = None,
    broken: str = "",
) -> str:
    folder = files("stiefelkit.measuring.report")
    template = environment().from_string((folder / "page.html").read_text(encoding="utf-8"))
    return template.render(
        style=(folder / "page.css").read_text(encoding="utf-8"),
        machine=machine,
        kind=kind,
        heading=f"{subject} on {machine.get('GPU') or machine['CPU']}",
        lead=lead,
        sections=sections,
        tiles=tiles or [],
        broken=broken,
    )


def _minutes(seconds: Iterable[float]) -> str:
    minutes = max(1, round(sum(seconds) / 60))
    return "1 minute" if minutes == 1 else f"{minutes} minutes"


def _of_record(caption: str, rows: list[dict[str, Any]]) -> Table:
    headings = list(dict.fromkeys(name for row in rows for name in row["beside"]))
    if rows[0]["unit"] == "law":
        lines = [TableRow(row["contender"], ["holds" if row["holds"] else row["words"] or "broken"]) for row in rows]
        broken = sum(row["holds"] is False for row in rows)
        return Table(caption, ["", "law"], lines, f"{len(rows) - broken} of {len(rows)} hold", folded=not broken)
    factor, unit = UNITS.get(rows[0]["unit"], (1.0, rows[0]["unit"]))
    lines = []
    for row in rows:
        shown = None if row["median"] is None else factor * row["median"]
        cells = [figure_of(shown), figure_of(factor * row["spread"]), str(row["samples"])]
        lines.append(TableRow(row["contender"], cells + [figure_of(row["beside"].get(name)) for name in headings]))
    return Table(caption, ["contender", unit, "spread", "samples", *headings], lines, folded=False)


def tiles(findings: Findings) -> list[Tile]:
    """Returns the figures that sum up a report; those of sections that it has."""
    peers, near, shown = peer_optimizers.names(), near_orthogonal(), []
    exempt = (UNCONSTRAINED, *near)
    ours = [curve for curve in findings.drift if curve.method not in peers and curve.method not in exempt]
    if ours:
        beside = _worst({curve.method: curve.worst for curve in findings.drift if curve.method in peers})
        largest = figure_of(max(_with_nan(curve.worst) for curve in ours))
        shown.append(Tile("drift", largest, f"rounding limits at most in {ours[0].steps[-1]:,} steps", beside))
    times = [row for race in findings.time for row in race.rows if not row.is_peer and row["ratio_to_best_peer"]]
    times = [row for row in times if "(fast" not in row.contender]
    if times:
        n = max(row["n"] for row in times)
        ratios = sorted((row["ratio_to_best_peer"], member_of(row.contender)) for row in times if row["n"] == n)
        (low, least), (high, most) = ratios[0], ratios[-1]
        shown.append(
            Tile("ratios", _range(low, high), "as fast as the best peer", f"n = {n}: {least} least, {most} most")
        )
    rows = [row for race in findings.norms for row in race.rows]
    exact = [row for row in rows if not row.is_peer and "(fast" not in row.contender and row.family not in near]
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
    import torch

    from stiefelkit.errors import StiefelkitError
    from stiefelkit.weights.attach import available

    names = []
    for name, cls in available().items():
        dtype = torch.float32 if cls.supports((4, 4), torch.float32) is None else torch.complex64
        with contextlib.suppress(StiefelkitError):
            names += [] if cls((4, 4), dtype=dtype).traits.exact else [name]
    return names


def _worst(errors: Mapping[str, float | None]) -> str:
    """Returns the name of the largest error, and the error; nothing without any."""
    name = max(errors, key=lambda name: _with_nan(errors[name]), default=None)
    return "" if name is None else f"{name}: {figure_of(errors[name])}"


def _with_nan(value: float | None) -> float:
    """Returns the value, and infinity where it is not finite, so that this is the largest."""
    return math.inf if value is None or math.isnan(value) else value
