"""The page of a `Record`: the machine, every table of every part, and what was left out."""

from importlib.resources import files
from typing import Any

from stiefelkit.measuring.races.course import by_reason
from stiefelkit.measuring.report.page import environment
from stiefelkit.measuring.report.record import Record
from stiefelkit.measuring.report.tables import Table, TableRow, figure_of

__all__ = ["record_page"]

SCALES = {"s": (1e3, "ms"), "bytes": (1e-6, "MB"), "limits": (1.0, "/ limit"), "law": (1.0, "law")}
"""Unit to the factor and the heading that it is shown with."""


def record_page(record: Record) -> str:
    """Returns the page of what has been measured so far."""
    folder = files("stiefelkit.measuring.report")
    template = environment().from_string((folder / "record.html").read_text(encoding="utf-8"))
    return template.render(
        record=record,
        processor=record.machine.get("GPU") or record.machine["CPU"],
        style=(folder / "page.css").read_text(encoding="utf-8"),
        tables={part.part: _tables(record, part.part) for part in record.parts},
        left_out={part: by_reason(reasons) for part, reasons in record.left_out.items() if reasons},
        minutes=max(1, round(sum(part.seconds for part in record.parts) / 60)),
    )


def _tables(record: Record, part: str) -> list[Table]:
    by_table: dict[str, list[dict[str, Any]]] = {}
    for row in record.rows:
        if row["part"] == part:
            by_table.setdefault(row["table"], []).append(row)
    return [_table(caption, rows) for caption, rows in by_table.items()]


def _table(caption: str, rows: list[dict[str, Any]]) -> Table:
    headings = list(dict.fromkeys(name for row in rows for name in row["beside"]))
    if rows[0]["unit"] == "law":
        lines = [TableRow(row["contender"], ["holds" if row["holds"] else row["words"] or "broken"]) for row in rows]
        broken = sum(row["holds"] is False for row in rows)
        note = f"{len(rows) - broken} of {len(rows)} hold"
        return Table(caption, ["", "law"], lines, note, folded=not broken)
    factor, unit = SCALES.get(rows[0]["unit"], (1.0, rows[0]["unit"]))
    lines = []
    for row in rows:
        shown = None if row["median"] is None else factor * row["median"]
        cells = [figure_of(shown), figure_of(factor * row["spread"]), str(row["samples"])]
        lines.append(TableRow(row["contender"], cells + [figure_of(row["beside"].get(name)) for name in headings]))
    return Table(caption, ["contender", unit, "spread", "samples", *headings], lines, folded=False)
