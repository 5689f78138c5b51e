"""`stiefelkit train TASK`, alone or under torchrun."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from stiefelkit.cli.tasks import app_of_task, app_of_tasks, resume_line, with_options
from stiefelkit.errors import OptionError
from stiefelkit.training.board import Board
from stiefelkit.training.data import named
from stiefelkit.training.ranks import joined
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task

if TYPE_CHECKING:
    from stiefelkit.training.train import RunOutcome

__all__ = ["app"]


def _command(cls: type[Task]) -> Callable[..., int]:
    def run(
        *,
        model: str | None = None,
        out: Path | None = None,
        resume: bool = False,
        data: Path | None = None,
        task: dict[str, Any],
        settings: Settings,
        board: Board,
    ) -> int:
        """Trains one model on the task.

        Args:
            model: name of the model; see stiefelkit list.
            out: folder of the run; runs/TASK-MODEL if left out.
            resume: continue the run in the folder where it stopped, to the same bits.
            data: folder of the data, for tasks that read files; that of STIEFELKIT_DATA if left out.
            task: the options of the task.
            settings: how to train; what is left out comes from the recipe of the task for the model.
            board: where its curves can be watched.
        """
        if model is None and not (resume and out):
            raise OptionError(
                "Training needs a model, got none; name one of those that stiefelkit list shows, with --model."
            )
        from stiefelkit.training.config import Config
        from stiefelkit.training.display import Silent, Terminal
        from stiefelkit.training.train import resume as go_on
        from stiefelkit.training.train import train

        path = out or Path("runs") / f"{cls.name}-{model}"
        with named(data), joined() as ranks:
            display = Terminal() if ranks.is_first else Silent()
            if resume:
                asked: dict[str, Any] = {**settings.given(), "task": cls.name}
                asked |= {"model": model} if model else {}
                asked |= {"task_options": task} if task else {}
                outcome = go_on(path, asked, display, board=board, ranks=ranks)
            else:
                config = ranks.each(lambda: Config.resolve(cls(**task), model or "", settings))
                outcome = train(config, path, display, board=board, ranks=ranks)
            if ranks.is_first:
                line = resume_line("train", cls.name, "--out", str(path), data=data, board=board, ranks=ranks.size)
                _tell(outcome, line)
        return 0 if outcome.signal is None else 128 + outcome.signal

    return with_options(run, cls)


def _tell(outcome: "RunOutcome", line: str) -> None:
    from stiefelkit.training.display import say

    if outcome.signal is not None:
        say(f"Stopped at step {outcome.step} and saved; resume with: {line}")
        return
    if outcome.already:
        say(f"Run {outcome.path} is finished at step {outcome.step}: nothing to do.")
        return
    from stiefelkit.training.summary import summarise

    scores = ", ".join(f"{key} {value:.4f}" for key, value in summarise(outcome.path).test.items())
    say(f"Finished at step {outcome.step}: held-out {scores}; the run is in {outcome.path}.")


app = app_of_tasks("train", "Train one model on a task.", _command)


def __getattr__(task: str) -> App:
    return app_of_task(task, _command)
