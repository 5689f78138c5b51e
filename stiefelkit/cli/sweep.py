"""`stiefelkit sweep FILE`."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Column, Table

from stiefelkit.cli.options import Options, read_toml, resume_line
from stiefelkit.training.data import named as data_in
from stiefelkit.training.display import Screen, Terminal, say
from stiefelkit.training.sweep import SweepPlan, checked, run_sweep, runs_of

if TYPE_CHECKING:
    from stiefelkit.training.sweep import Cell


def sweep(file: Path, /, *, plan: Options[SweepPlan] = None, data: Path | None = None) -> int:
    """Train over lists of settings and seeds, several runs at a time.

    The file holds options of stiefelkit train, task and model among them, and a table `[vary]` with a list for each
    option that varies, seed = [1, 2, 3]. Each combination is a run in a folder of its own; one that fails is named at
    the end.

    The table has a row for each combination of all but the seed, with mean and standard deviation over the seeds;
    sweep.json holds the same.

    Args:
        file: TOML: task and model, options of stiefelkit train, and a table [vary] of lists.
        plan: how.
        data: folder of the data; that of STIEFELKIT_DATA if left out.
    """
    plan = plan or SweepPlan()
    runs = runs_of(read_toml("A sweep", file))
    out = plan.out or Path("runs") / file.stem
    with data_in(data):
        if plan.commands:
            checked(runs)
            for run in runs:
                say(run.command(out, data))
            return 0
        cells, signal = run_sweep(runs, out, Terminal(), jobs=plan.jobs, resuming=plan.resume)
    _print(cells)
    if signal is not None:
        words = "sweep", str(file), "--out", str(out), "--jobs", str(plan.jobs)
        say(f"Stopped and saved; resume with: {resume_line(*words, data=data)}")
        return 128 + signal
    return 1 if any(cell.failed for cell in cells) else 0


def _print(cells: "list[Cell]") -> None:
    table = Table(Column(overflow="fold"), title="mean and standard deviation over the seeds, last evaluation")
    to_choose_by = list(dict.fromkeys(name for cell in cells for name in cell.validation))
    names = list(dict.fromkeys(name for cell in cells for name in cell.scores))
    titles = *(f"valid {name}" for name in to_choose_by), *(f"test {name}" for name in names)
    for title in ("runs", *titles, "ms per step (CPU)", "orthogonality error / limit"):
        table.add_column(title, justify="right")
    for cell in cells:
        scores = [_spread(*cell.validation[name]) if name in cell.validation else "-" for name in to_choose_by]
        scores += [_spread(*cell.scores[name]) if name in cell.scores else "-" for name in names]
        done = f"{len(cell.runs)}" + (f" ({len(cell.failed)} failed)" if cell.failed else "")
        ratio = "-" if cell.orthogonality is None else f"{cell.orthogonality:.3g}"
        time = "-" if cell.ms_per_step is None else f"{cell.ms_per_step:.1f}"
        table.add_row(cell.name, done, *scores, time, ratio)
    console = Screen()
    console.print(table)
    for name, sentence in ((name, text) for cell in cells for name, text in cell.failed.items()):
        console.print(f"{name}: {sentence}", soft_wrap=True, highlight=False)


def _spread(mean: float, deviation: float | None) -> str:
    return f"{mean:.5f}" if deviation is None else f"{mean:.5f} +- {deviation:.5f}"
