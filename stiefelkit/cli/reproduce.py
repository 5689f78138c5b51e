"""`stiefelkit reproduce NAME` and `stiefelkit reproduce --list`."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from stiefelkit.training.reproduce import Finding, Score


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
        report: write one page about all runs in --out, with plots.
        page: folder of that page, report.md, and its plots; report/ in --out if left out.
        data: folder of the data; that of STIEFELKIT_DATA if left out.
        out: folder of the runs; that of an experiment lies in it under its name.
        figures: how they are written.
    """
    settings = Settings(seed=seed, threads=threads, device=device)
    asked = [*settings.given(), *(["epochs"] if epochs is not None else [])]
    modes = [word for word in (name, list and "--list", report and "--report") if word]
    words = "the name of an experiment, --list or --report"
    needs(len(modes) == 1, OptionError, "Reproducing", words, " and ".join(modes) or "none; --list has all names")
    needs(page is None or report, OptionError, "--page", "--report, which writes that page", "no --report")
    needs(bool(name) or not asked, OptionError, modes[0], "no other options, since it runs nothing", ", ".join(asked))
    with named(data):
        if list:
            _list(out)
            return 0
        if report:
            from stiefelkit.training.reproduce import write_page

            if page is None:
                page = out / "report"
                with writable("A report", page):
                    refuse_links(page, out)
            written, drawn = write_page(out, page, figures or Figures())
            for path in drawn:
                say(f"Figure: {path}")
            say(f"Page: {written}")
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
    found = _finding(row, path)
    say(f"{row.name} has not been evaluated yet: give it more --epochs." if found is None else _summary(found))
    return 0


def _list(out: Path) -> None:
    """Prints a table for each table or figure of a paper, with one line an experiment."""
    console = Screen()
    for paper, rows in itertools.groupby(sorted(papers.rows(), key=lambda row: row.paper), lambda row: row.paper):
        table = Table(title=paper, title_justify="left")
        for title in ("name", "units", "paper", "here", "epochs"):
            table.add_column(title, justify="left" if title == "name" else "right", no_wrap=True)
        for row in rows:
            found = _finding(row, out / row.name)
            here, done = ("", "") if found is None else (row.said(found.best_test.test), f"{found.epochs:.3g} of ")
            table.add_row(row.name, str(row.settings.hidden_size), row.printed, here, f"{done}{row.epochs:g}")
        console.print(table)
    console.print("Here: the best epoch on the held-out set, as the papers choose it.")


def _finding(row: papers.Row, path: Path) -> "Finding | None":
    from stiefelkit.training.reproduce import finding

    try:
        return finding(path, row) if path.is_dir() else None
    except RunError:
        return None


def _summary(found: "Finding") -> str:
    """Returns what came of a run beside the figure of its paper."""
    row, task, chosen = found.row, found.row.build_task(), found.best_validation

    def said(score: "Score") -> str:
        return f"{row.said(score.test)} at epoch {score.step / row.epoch:.4g}"

    scores = {
        "best there, as papers report it": said(found.best_test),
        "best on validation, without bias": said(chosen) if chosen else "this task has no validation examples",
        "last": said(found.last),
        "the paper": f"{row.printed} ({row.paper})",
    }
    if task.known_baseline:
        scores["without any memory"] = row.said(task.known_baseline[task.headline])
    word = "accuracy" if row.by_accuracy else task.loss_label
    lines = [f"{row.name}, {found.epochs:.4g} of {row.epochs:g} epochs; {word} on the held-out set:"]
    lines += [f"  {what + ':':<36}{score}" for what, score in scores.items()]
    return "\n".join([*lines, *([f"  note: {row.note}"] if row.note else []), f"The run is in {found.folder.path}."])
