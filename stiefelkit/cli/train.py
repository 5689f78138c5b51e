"""`stiefelkit train TASK`, alone or under torchrun, and `stiefelkit compare TASK`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App
from rich.table import Table

from stiefelkit.cli.tasks import app_of_tasks, resume_line, subcommand, with_options
from stiefelkit.errors import OptionError
from stiefelkit.training.data import named
from stiefelkit.training.display import Screen, Silent, Terminal, say
from stiefelkit.training.figure import Figures
from stiefelkit.training.ranks import joined
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task, tasks

if TYPE_CHECKING:
    from stiefelkit.training.run_folder import Summary
    from stiefelkit.training.train import RunOutcome

__all__: list[str] = []


def _train(cls: type[Task]) -> Callable[..., int]:
    def run(
        *,
        model: str | None = None,
        out: Path | None = None,
        resume: bool = False,
        data: Path | None = None,
        task: dict[str, Any],
        settings: Settings,
        tensorboard: bool = False,
    ) -> int:
        """Trains one model on the task.

        Args:
            model: name of the model; see stiefelkit list.
            out: folder of the run; runs/TASK-MODEL if left out.
            resume: continue the run in the folder where it stopped, to the same bits.
            data: folder of the data, for tasks that read files; that of STIEFELKIT_DATA if left out.
            task: the options of the task.
            settings: how to train; what is left out comes from the recipe of the task for the model.
            tensorboard: write the log for TensorBoard too, into tensorboard/ in the folder of the run.
        """
        if model is None and not (resume and out):
            raise OptionError(
                "Training needs a model, got none; name one of those that stiefelkit list shows, with --model."
            )
        from stiefelkit.training.config import Config
        from stiefelkit.training.train import resume as go_on
        from stiefelkit.training.train import train

        path = out or Path("runs") / f"{cls.name}-{model}"
        with named(data), joined() as ranks:
            display = Terminal() if ranks.is_first else Silent()
            if resume:
                asked: dict[str, Any] = {**settings.given(), "task": cls.name}
                asked |= {"model": model} if model else {}
                asked |= {"task_options": task} if task else {}
                outcome = go_on(path, asked, display, tensorboard=tensorboard, ranks=ranks)
            else:
                with ranks.together():
                    config = Config.resolve(cls(**task), model or "", settings)
                outcome = train(config, path, display, tensorboard=tensorboard, ranks=ranks)
            if ranks.is_first:
                words = ("train", cls.name, "--out", str(path))
                line = resume_line(*words, data=data, tensorboard=tensorboard, ranks=ranks.size)
                _tell(outcome, line)
        return 0 if outcome.signal is None else 128 + outcome.signal

    return with_options(run, cls)


def _tell(outcome: "RunOutcome", line: str) -> None:
    if outcome.signal is not None:
        say(f"Stopped at step {outcome.step} and saved; resume with: {line}")
        return
    if outcome.already:
        say(f"Run {outcome.path} is finished at step {outcome.step}: nothing to do.")
        return
    from stiefelkit.training.run_folder import summarise

    scores = ", ".join(f"{key} {value:.4f}" for key, value in summarise(outcome.path).test.items())
    say(f"Finished at step {outcome.step}: held-out {scores}; the run is in {outcome.path}.")


def _compare(cls: type[Task]) -> Callable[..., int]:
    def run(
        *,
        models: str,
        out: Path | None = None,
        resume: bool = False,
        data: Path | None = None,
        task: dict[str, Any],
        settings: Settings,
        tensorboard: bool = False,
        figures: Figures,
    ) -> int:
        """Trains several models on the task, one after the other, and compares them.

        Args:
            models: names of the models, separated by commas; see stiefelkit list.
            out: folder with one run for each model; runs/TASK if left out.
            resume: keep the runs that are finished, continue the others, start those that are missing.
            data: folder of the data, for tasks that read files; that of STIEFELKIT_DATA if left out.
            task: the options of the task.
            settings: how to train; what is left out comes from the recipe of the task for each model.
            tensorboard: write the log for TensorBoard too, into tensorboard/ in the folder of each run.
            figures: how they are written.
        """
        from stiefelkit.training.sweep import compare

        names = [name.strip() for name in models.split(",") if name.strip()]
        path = out or Path("runs") / cls.name
        problem = cls(**task)
        with named(data):
            summaries, drawn, signal = compare(
                problem, names, path, settings, Terminal(), figures, task, resuming=resume, tensorboard=tensorboard
            )
            if signal is not None:
                words = ("compare", cls.name, "--models", ",".join(names), "--out", str(path))
                say(f"Stopped and saved; resume with: {resume_line(*words, data=data, tensorboard=tensorboard)}")
                return 128 + signal
            _print(problem, summaries, drawn)
            return 0

    return with_options(run, cls)


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
        ratio = "-" if error is None else f"{error:.2f}" if error < 100 else f"{error:.2g}"
        table.add_row(summary.model, *scores, f"{summary.parameters:,}", f"{summary.ms_per_step:.1f}", ratio)
    console = Screen()
    console.print(table)
    for figure in drawn:
        console.print(f"Figure: {figure}", soft_wrap=True, highlight=False)


COMMANDS = {"train": _train, "compare": _compare}


def __getattr__(name: str) -> App:
    command, _, task = name.partition("_")
    if command not in COMMANDS or task not in ("", *tasks.names()):
        raise AttributeError(name)
    function = COMMANDS[command]
    return subcommand(tasks.get(task), function) if task else app_of_tasks(command, function)
