"""`stiefelkit sweep FILE`."""

from pathlib import Path

from rich.table import Column, Table

from stiefelkit.cli.options import read_toml
from stiefelkit.errors import OptionError, needs
from stiefelkit.training.data import named
from stiefelkit.training.display import Screen, say

SEARCHED, ROWS = 50, 10
"""Trials of a search that is not told how many, and of the table."""


def sweep(
    file: Path,
    /,
    *,
    trials: int | None = None,
    storage: str | None = None,
    out: Path | None = None,
    data: Path | None = None,
) -> int:
    """Train over lists and ranges of settings, in an optuna study.

    The file holds options of stiefelkit train, task and model among them, and a table `[vary]` with a list, `seed = [1,
    2, 3]`, or a range, `lr = {low = 1e-4, high = 1e-2, log = true}`, for each option that varies. Lists alone are a
    grid; with a range optuna searches, and stops bad runs.

    Each trial is a run in a folder of its own. The same command resumes, and shares the work with others of its kind
    that are running. A table shows the best trials.

    Args:
        file: TOML: task and model, options of stiefelkit train, and a table [vary] of lists and ranges.
        trials: finished trials of the whole study; all combinations of lists if left out, 50 with a range.
        storage: URL of a database, which several machines may share; sqlite:///OUT/sweep.db if left out.
        out: folder with one run for each trial; runs/NAME of the file if left out.
        data: folder of the data; that of STIEFELKIT_DATA if left out.
    """
    try:
        from stiefelkit.training.sweep import DONE, SUBJECT, Sweep, run_trials, study_of
    except ImportError as error:
        raise OptionError(f'stiefelkit sweep needs optuna, got {error}; pip install "stiefelkit[sweep]".') from error
    needs(trials is None or trials > 0, OptionError, SUBJECT, "--trials >= 1", trials)
    out = out or Path("runs") / file.stem
    with named(data):
        plan = Sweep(read_toml(SUBJECT, file))
        study = study_of(plan, file.stem, out, storage)
        signal = run_trials(plan, study, out, trials or (None if plan.grid else SEARCHED))
    done = [trial for trial in study.get_trials(states=DONE) if "run" in trial.user_attrs]
    sign = -1 if plan.headline == "accuracy" else 1
    done.sort(key=lambda trial: (trial.state.name == "PRUNED", sign * (trial.value or 0.0)))
    heads = (Column(title, justify="right") for title in (f"{plan.headline} to choose by", f"test {plan.headline}"))
    table = Table(Column("run", overflow="fold"), *heads, title=f"best of {len(done)} trials")
    for trial in done[:ROWS]:
        shown = (trial.value, trial.user_attrs["test"]) if trial.state.name == "COMPLETE" else ("pruned", "")
        table.add_row(trial.user_attrs["run"], *(f"{x:.5f}" if isinstance(x, float) else str(x) for x in shown))
    console = Screen()
    console.print(table)
    for trial in done:
        if "why" in trial.user_attrs:
            console.print(f"{trial.user_attrs['run']}: {trial.user_attrs['why']}", soft_wrap=True)
    if signal is None:
        return 0
    say("Stopped and saved; the same command continues it.")
    return 128 + signal
