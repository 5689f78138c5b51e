"""The page of a report: one file of HTML, with all of its style and drawings inside."""

from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from stiefelkit.measuring.report.charts import charts
from stiefelkit.measuring.report.findings import Findings
from stiefelkit.measuring.report.tables import tables
from stiefelkit.measuring.report.words import near_orthogonal, sentences, tiles

__all__ = ["page"]


def page(found: Findings) -> str:
    """Returns the page of what has been measured so far.

    Args:
        found: the figures.
    """
    here = files("stiefelkit.measuring.report")
    plan = found.plan
    template = _environment().from_string((here / "page.html").read_text(encoding="utf-8"))
    by_reason: dict[str, dict[str, list[str]]] = {}
    for section, reasons in found.left_out.items():
        for name, reason in reasons.items():
            by_reason.setdefault(section, {}).setdefault(reason, []).append(name)
    return template.render(
        found=found,
        plan=plan,
        processor=found.machine.get("GPU") or found.machine["CPU"],
        style=(here / "page.css").read_text(encoding="utf-8"),
        charts=charts(found),
        tables=tables(found),
        tiles=tiles(found),
        said=sentences(found),
        left_out=by_reason,
        near=near_orthogonal(),
        minutes=max(1, round(sum(found.seconds.values()) / 60)),
        commands={section: plan.commands(section) for section in plan.sections},
    )


@cache
def _environment() -> Environment:
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
