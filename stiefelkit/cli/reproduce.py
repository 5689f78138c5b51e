"""`stiefelkit reproduce NAME` and `stiefelkit reproduce --list`."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from stiefelkit.cli.options import Options
from stiefelkit.errors import OptionError, RunError, needs
from stiefelkit.figure import Figures
from stiefelkit.files import reachable, refuse_links, writable
from stiefelkit.training import papers
from stiefelkit.training.data import named
from stiefelkit.training.display import Screen, say
from stiefelkit.training.recipes import Settings


def reproduce(
    name: str | None = None,
    /,
    *,
    epochs: int | None = None,
    seed: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    list: Annotated[bool, Parameter(negative=())] = False,
    report: Annotated[bool, Parameter(negative=())] = False,
    page: Path | None = None,
    readme: Path | None = None,
    add: Path | None = None,
    data: Path | None = None,
    out: Path = Path("runs/papers"),
    figures: Options[Figures] = None,
) -> int:
    """Run an experiment of a paper again.

    Each row of a table in a paper has a name, which --list shows with its figure. Give the command again to resume a
    run, to the same bits, or with more --epochs to continue it; it ends with its figure beside the paper's. The best
    epoch is chosen on the held-out set, as in the papers, and on validation examples, without bias; both are shown.

    Args:
        name: of the experiment, as --list shows it.
        epochs: of the training data, in all; a run of fewer may go on later. As many as in the paper if left out.
        seed: fixes the initial weights and the training data; that of the paper if left out.
        threads: CPU threads, 1 if left out; another number may change the last bits.
        device: cpu, cuda, cuda:1, ...
        list: show the experiments, with the figures of the papers and of the runs in --out.
        report: write one page about all runs below --out, with plots in report/ there, and what words.md there says.
        page: that page; report/report.md in --out if left out.
        readme: a file whose line <!-- runs --> gets the number of rows that have run.
        add: a tar of runs, as `make papers-gpu` writes it; they go to --out.
        data: folder of the data; that of STIEFELKIT_DATA if left out.
        out: folder of the runs; that of an experiment lies in it under its name.
        figures: how they are written.
    """
    settings = Settings(seed=seed, threads=threads, device=device)
    asked = [*settings.given(), *(["epochs"] if epochs is not None else [])]
    modes = [word for word in (name, list and "--list", report and "--report", add and "--add") if word]
    words = "the name of an experiment, --list, --report or --add"
    needs(len(modes) == 1, OptionError, "Reproducing", words, " and ".join(modes) or "none; --list has all names")
    needs(report or not (page or readme), OptionError, "--page or --readme", "--report, which writes it", "no --report")
    needs(bool(name) or not asked, OptionError, modes[0], "no other options, since it runs nothing", ", ".join(asked))
    with named(data):
        if list:
            _list(papers.rows(), out)
            return 0
        if report:
            from stiefelkit.training.reproduce import FIGURES, PAGE, write_page

            page = page or out / FIGURES / PAGE
            with writable("A report", page):
                refuse_links(page.parent if out in page.parents else out, out)
            for path in write_page(out, page, figures or Figures(), readme):
                say(f"Figure: {path}")
            say(f"Page: {page}")
            return 0
        if add:
            from stiefelkit.training.reproduce import add as added

            for path in added(add, out):
                say(f"Run: {path}")
            return 0
        return _run(str(name), out, epochs, settings)


def _run(name: str, out: Path, epochs: int | None, settings: Settings) -> int:
    from stiefelkit.training.display import Terminal
    from stiefelkit.training.reproduce import reproduce as run

    row, path = papers.find(name), out / name
    with reachable("Reproducing", path):
        refuse_links(path, out)
    outcome = run(row, path, epochs, settings, Terminal())
    if outcome.signal is not None:
        say(f"Stopped at step {outcome.step} and saved; the same command continues it.")
        return 128 + outcome.signal
    _list([row], out)
    say(f"The run is in {path}." + f" Note: {row.note}." * bool(row.note))
    return 0


def _list(rows: Sequence[papers.Row], out: Path) -> None:
    """Prints a table for each table or figure of a paper, with one line an experiment."""
    console = Screen()
    for paper, known in itertools.groupby(sorted(rows, key=lambda row: row.paper), lambda row: row.paper):
        table = Table(title=paper, title_justify="left")
        for title in ("name", "units", "paper", "best", "chosen", "last", "epochs"):
            table.add_column(title, justify="left" if title == "name" else "right", no_wrap=title == "name")
        for row in known:
            scores, epochs = _found(row, out / row.name)
            table.add_row(row.name, str(row.settings.hidden_size), row.printed, *scores, f"{epochs}{row.epochs:g}")
        console.print(table)
    console.print("Held-out scores. Best: of all epochs, as papers report it. Chosen: at the epoch best on validation.")


def _found(row: papers.Row, path: Path) -> tuple[tuple[str, str, str], str]:
    """Returns the scores of a run in words, and its epochs so far; nothing without a run that has been evaluated."""
    from stiefelkit.training.reproduce import finding

    try:
        run = finding(path, row) if path.is_dir() else None
    except RunError:
        run = None
    if run is None:
        return ("", "", ""), ""
    chosen = row.said(run.best_validation.test) if run.best_validation else "-"
    return (row.said(run.best_test.test), chosen, row.said(run.last.test)), f"{run.epochs:.3g} of "
