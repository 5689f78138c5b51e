"""`stiefelkit train TASK`, `compare TASK`, `sweep FILE` and `plot RUN...`."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.table import Column, Table

from stiefelkit.cli.options import DEFAULTS, Options, read_toml, resume_line
from stiefelkit.errors import OptionError, needs
from stiefelkit.figure import Figures
from stiefelkit.training.data import named
from stiefelkit.training.display import Screen, Terminal, say
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task, tasks

if TYPE_CHECKING:
    from stiefelkit.training.run_folder import Summary
    from stiefelkit.training.train import RunOutcome

SEARCHED, ROWS = 50, 10  # trials of a search that is not told how many, and of the table


def _train(
    cls: type[Task],
    *,
    model: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    data: Path | None = None,
    task: object = None,
    settings: Options[Settings] = None,
) -> int:
    """Train one model on the task.

    Args:
        cls: the task.
        model: name of the model; see stiefelkit list.
        out: folder of the run; runs/TASK-MODEL if left out.
        resume: continue the run in the folder where it stopped, to the same bits.
        data: folder of the data, for tasks that read files; that of STIEFELKIT_DATA if left out.
        task: the options of the task.
        settings: how to train; what is left out comes from the recipe of the task for the model.
    """
    if model is None and not (resume and out):
        raise OptionError("Training needs a model, got none; name one that stiefelkit list shows, with --model.")
    from stiefelkit.training.config import Config
    from stiefelkit.training.train import resume as go_on
    from stiefelkit.training.train import train

    path, settings, named_options = out or Path("runs") / f"{cls.name}-{model}", settings or Settings(), _given(task)
    with named(data):
        if resume:
            asked: dict[str, Any] = {**settings.given(), "task": cls.name}
            asked |= {"model": model} if model else {}
            asked |= {"task_options": named_options} if named_options else {}
            outcome = go_on(path, asked, Terminal())
        else:
            outcome = train(Config.resolve(cls(**named_options), str(model), settings), path, Terminal())
        _tell(outcome)
    return 0 if outcome.signal is None else 128 + outcome.signal


def _tell(outcome: "RunOutcome") -> None:
    if outcome.signal is not None:
        say(f"Stopped at step {outcome.step} and saved; resume with: {resume_line()}")
        return
    if outcome.already:
        say(f"Run {outcome.path} is finished at step {outcome.step}: nothing to do.")
        return
    from stiefelkit.training.run_folder import summarise

    scores = ", ".join(f"{key} {value:.4f}" for key, value in summarise(outcome.path).test.items())
    say(f"Finished at step {outcome.step}: held-out {scores}; the run is in {outcome.path}.")


def _compare(
    cls: type[Task],
    *,
    models: tuple[str, ...],
    out: Path | None = None,
    resume: bool = False,
    data: Path | None = None,
    task: object = None,
    settings: Options[Settings] = None,
    figures: Options[Figures] = None,
) -> int:
    """Train several models on the task, one after the other, and compare them.

    Args:
        cls: the task.
        models: names of the models, separated by commas; see stiefelkit list.
        out: folder with one run for each model; runs/TASK if left out.
        resume: keep the runs that are finished, continue the others, start those that are missing.
        data: folder of the data, for tasks that read files; that of STIEFELKIT_DATA if left out.
        task: the options of the task.
        settings: how to train; what is left out comes from the recipe of the task for each model.
        figures: how they are written.
    """
    from stiefelkit.training.train import compare

    path, problem = out or Path("runs") / cls.name, cls(**_given(task))
    with named(data):
        found = compare(problem, models, path, settings or Settings(), Terminal(), figures or Figures(), resume)
        summaries, drawn, signal = found
        if signal is not None:
            say(f"Stopped and saved; resume with: {resume_line()}")
            return 128 + signal
        _print(problem, summaries, drawn)
        return 0


def _print(task: Task, summaries: "list[Summary]", drawn: list[Path]) -> None:
    table = Table("model", title=f"{task.name}, held-out set")
    by_accuracy = task.headline == "accuracy"
    heads = ["accuracy"] if by_accuracy else [task.loss_label, "/ baseline"]
    for title in (*heads, "parameters", "ms per step (CPU)", "orthogonality error / limit"):
        table.add_column(title, justify="right")
    for summary in summaries:
        score, baseline, error = summary.test[task.headline], task.known_baseline, summary.orthogonality
        scores = [f"{score:.1%}" if by_accuracy else f"{score:.5f}"]
        if not by_accuracy:
            scores.append(f"{score / baseline['loss']:.3f}" if baseline else "-")
        ratio = "-" if error is None else f"{error:.3g}"
        table.add_row(summary.model, *scores, f"{summary.parameters:,}", f"{summary.ms_per_step:.1f}", ratio)
    console = Screen()
    console.print(table)
    for figure in drawn:
        console.print(f"Figure: {figure}", soft_wrap=True)


def _given(options: object) -> dict[str, Any]:
    """Returns the options of a task that were named."""
    return {name: value for name, value in (vars(options) if options else {}).items() if value is not None}


def _options_of(task: type[Task]) -> type:
    """Returns a dataclass with the options of a task, None where they are not named: a run resumes with its own."""
    hints = typing.get_type_hints(task)
    fields: list[tuple[str, Any, Any]] = []
    for option in dataclasses.fields(task):  # pyright: ignore[reportArgumentType]
        words = None if option.default is None else str(option.default)
        shown = Parameter(show_default=lambda _, words=words: words)
        fields.append((option.name, Annotated[hints[option.name] | None, shown], None))
    return dataclasses.make_dataclass(
        task.__name__, fields, namespace={"__doc__": task.__doc__, "__module__": task.__module__}
    )


train = App(name="train", help="Train one model on a task.", default_parameter=DEFAULTS)
compare = App(name="compare", help="Train several models on a task and compare them.", default_parameter=DEFAULTS)


def add_tasks(named: Collection[str] = ()) -> None:
    """Adds the commands of the tasks that are named, or of all."""
    if found := [name for name in named if name in tasks.names()]:
        for name in found:
            _add(name, tasks.find(name))
    else:
        tasks.map(_add)


def _add(task: str, cls: type[Task]) -> None:
    """Adds a command to those that train; its options are those of the task, and what all have."""
    if task in train:
        return
    given = Options[_options_of(cls)]
    for app, command in ((train, _train), (compare, _compare)):
        _, *own = inspect.signature(command).parameters.values()
        parameters = [p.replace(annotation=given) if p.name == "task" else p for p in own]

        def run(command: Callable[..., int] = command, **options: object) -> int:
            return command(cls, **options)

        vars(run)["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__doc__ = command.__doc__
        epilogue = f"What is left out comes from the recipe of the model: `stiefelkit list {task}` shows all recipes."
        one = App(name=task, help=(cls.__doc__ or "").partition("\n")[0], help_epilogue=epilogue)
        one.default_parameter = DEFAULTS
        one.default(run)
        app.command(one)


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


def plot(*runs: Path, out: Path | None = None, data: Path | None = None, figures: Options[Figures] = None) -> int:
    """Draw the curves of runs.

    They are learning curves and drift; of words also the accuracy after so many steps.

    Args:
        runs: run folders, or folders of comparisons.
        out: folder for the figures; the run's own folder for a single run, else plots.
        data: folder of the data, for baselines; that of STIEFELKIT_DATA if left out.
        figures: how they are written.
    """
    from stiefelkit.training import plot as plots

    figures, folder = figures or Figures(), out or (runs[0] if len(runs) == 1 else Path("plots"))
    with named(data):
        for figure in plots.plot(plots.find_runs(runs), folder, figures):
            say(f"Figure: {figure}")
    return 0
