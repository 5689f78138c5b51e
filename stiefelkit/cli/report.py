"""`stiefelkit report`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from stiefelkit.cli.bar import Bar
from stiefelkit.cli.lists import words_of
from stiefelkit.cli.open_options import whole
from stiefelkit.cli.words import with_plain_help

__all__ = ["report"]


@with_plain_help
def report(
    *,
    full: Annotated[bool, Parameter(negative="--quick")] = False,
    members: str = "",
    sections: str = "",
    peers: bool = True,
    dtype: str = "float32",
    device: str = "cpu",
    threads: Annotated[int, Parameter(converter=whole)] = 1,
    seed: Annotated[int, Parameter(converter=whole)] = 0,
    out: Path = Path("report.html"),
    json: Path | None = None,
) -> int:
    """Measures and writes; the words of its help stand in the table of commands.

    Args:
        full: take the time that the figures deserve, most of an hour on two cores; --quick takes a few minutes.
        members: parametrizations, separated by commas; all if left out.
        sections: out of drift, time, growth, norms and scan, separated by commas; all if left out.
        peers: measure other implementations too.
        dtype: float32, float64, complex64 or complex128; maps that are complex only are measured as such.
        device: cpu or cuda.
        threads: CPU threads.
        seed: fixes what is drawn.
        out: the page, overwritten.
        json: file for the figures, overwritten after each section; its "finished" says whether all are there.
    """
    from stiefelkit.measuring.races.rows import check_place
    from stiefelkit.measuring.report.findings import gather
    from stiefelkit.measuring.report.page import page
    from stiefelkit.measuring.report.plan import ReportPlan
    from stiefelkit.training.files import write_atomically, write_json

    plan = ReportPlan(
        full=full,
        members=words_of(members),
        sections=words_of(sections),
        peers=peers,
        dtype=dtype,
        device=device,
        threads=threads,
        seed=seed,
    )
    for place in (out, json):
        if place is not None:
            check_place(place)
    console = Console(highlight=False)
    found = None
    with Bar(console) as bar:
        for found in gather(plan, bar.show):
            bar.hide()
            section, seconds = list(found.seconds.items())[-1]
            console.print(f"{section}: {seconds:.0f} s")
            if json is not None:
                write_json(json, found.json())
    assert found is not None
    write_atomically(out, page(found).encode())
    console.print(f"Page: {out}", soft_wrap=True)
    if json is not None:
        console.print(f"Data: {json}", soft_wrap=True)
    return 0
