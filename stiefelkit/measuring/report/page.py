"""The page of a report: one file of HTML, with all of its style and drawings inside."""

from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined

from stiefelkit.errors import printable
from stiefelkit.measuring.races.course import by_reason
from stiefelkit.measuring.report.charts import charts
from stiefelkit.measuring.report.findings import Findings
from stiefelkit.measuring.report.tables import tables
from stiefelkit.measuring.report.words import near_orthogonal, sentences, tiles

__all__ = ["environment", "page"]


def page(findings: Findings) -> str:
    """Returns the page of what has been measured so far."""
    folder = files("stiefelkit.measuring.report")
    plan = findings.plan
    template = environment().from_string((folder / "page.html").read_text(encoding="utf-8"))
    return template.render(
        findings=findings,
        plan=plan,
        processor=findings.machine.get("GPU") or findings.machine["CPU"],
        style=(folder / "page.css").read_text(encoding="utf-8"),
        charts=charts(findings),
        tables=tables(findings),
        tiles=tiles(findings),
        said=sentences(findings),
        left_out={section: by_reason(reasons) for section, reasons in findings.left_out.items() if reasons},
        near=near_orthogonal(),
        minutes=max(1, round(sum(findings.seconds.values()) / 60)),
        commands={section: plan.commands(section) for section in plan.sections},
    )


@cache
def environment() -> Environment:
    """What templates of pages are read by."""
    loader = PackageLoader("stiefelkit.measuring", "report")
    return Environment(
        loader=loader,
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # drawings are Markup
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
