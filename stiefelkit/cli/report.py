"""`stiefelkit report`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stiefelkit.cli.options import options
from stiefelkit.errors import OptionError, RunError
from stiefelkit.measuring.report.plan import ReportPlan
from stiefelkit.training.display import Bar, Screen

__all__ = ["report"]


@options(plan=ReportPlan)
def report(
    *,
    plan: ReportPlan,
    out: Path = Path("report.html"),
    json: Path | None = None,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
) -> int:
    """Measures and writes; the words of its help stand in the table of commands.

    Args:
        plan: what to measure.
        out: the page, overwritten.
        json: file for the figures, overwritten after each section; its "finished" says whether all are there.
        from_: draw the page of a file that `python -m benchmarks.gpu` has written, and measure nothing.
    """
    from stiefelkit.measuring.races.field import check_place
    from stiefelkit.measuring.report.findings import gather
    from stiefelkit.measuring.report.page import page
    from stiefelkit.training.files import write_atomically, write_json

    for place in (out, json):
        if place is not None:
            check_place(place)
    console = Screen()
    if from_ is not None:
        from jinja2 import TemplateError

        from stiefelkit.measuring.report.page import record_page
        from stiefelkit.measuring.report.record import WHO, read_record

        if json is not None:
            raise OptionError("A page from a file measures nothing; leave --json out.")
        record = read_record(from_)
        try:
            drawn = record_page(record)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
            raise RunError(f"{WHO} needs a file as benchmarks.gpu wrote it, got {from_}: {error!r:.200}.") from error
        write_atomically(out, drawn.encode())
        console.print(f"Page: {out}", soft_wrap=True)
        return 0
    findings = None
    with Bar(console) as bar:
        for findings in gather(plan, bar.show):
            bar.hide()
            section, seconds = list(findings.seconds.items())[-1]
            console.print(f"{section}: {seconds:.0f} s")
            if json is not None:
                write_json(json, findings.json())
    assert findings is not None
    write_atomically(out, page(findings).encode())
    console.print(f"Page: {out}", soft_wrap=True)
    if json is not None:
        console.print(f"Data: {json}", soft_wrap=True)
    return 0
