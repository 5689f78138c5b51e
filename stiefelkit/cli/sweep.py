"""`stiefelkit sweep FILE`."""

from operator import itemgetter
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

    A list, `seed = [1, 2, 3]`, and a range, `lr = {low = 1e-4, high = 1e-2, log = true}`, say how an option varies.
    Lists alone are a grid; with a range optuna searches, and stops bad runs. Each trial is a run in a folder of its
    own. The same command resumes, and shares the work with others of its kind that are running.

    Args:
        file: TOML: task and model, options of stiefelkit train, and a table [vary] of lists and ranges.
        trials: finished trials of the whole study; all combinations of lists if left out, 50 with a range.
        storage: URL of a database, which several machines may share; sqlite:///OUT/sweep.db if left out.
        out: folder with one run for each trial; runs/NAME of the file if left out.
        data: folder of the data; that of STIEFELKIT_DATA if left out.
    """
    try:
        from stiefelkit.training.sweep import DONE, SUBJECT, Sweep, load_study, run_trials
    except ImportError as error:
        raise OptionError(f'stiefelkit sweep needs optuna, got {error}; pip install "stiefelkit[sweep]".') from error
    needs(trials is None or trials > 0, OptionError, SUBJECT, "--trials >= 1", trials)
    out = out or Path("runs") / file.stem
    with named(data):
        plan = Sweep(read_toml(SUBJECT, file))
        study = load_study(plan, file.stem, out, storage or f"sqlite:///{out / 'sweep.db'}")
        signal = run_trials(plan, study, out, trials or (None if plan.grid else SEARCHED))
    done = [trial for trial in study.get_trials(states=DONE) if "run" in trial.user_attrs]
    whole = [(trial.value, trial.user_attrs) for trial in done if trial.state.name == "COMPLETE"]
    whole.sort(key=itemgetter(0), reverse=plan.headline == "accuracy")
    titles = (f"{plan.headline} to choose by", f"test {plan.headline}")
    title = f"best of {len(whole)} trials, {len(done) - len(whole)} pruned"
    table = Table(Column("run", overflow="fold"), *titles, title=title)
    for value, facts in whole[:ROWS]:
        table.add_row(facts["run"], f"{value:.5f}", f"{facts['test']:.5f}")
    Screen().print(table)
    if signal is None:
        return 0
    say("Stopped and saved; the same command continues it.")
    return 128 + signal
