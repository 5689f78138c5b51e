"""`stiefelkit train TASK`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stiefelkit.cli.open_options import built, given
from stiefelkit.cli.tasks import app_of_tasks, with_options
from stiefelkit.errors import OptionError
from stiefelkit.training.data import named
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task

__all__ = ["app"]


def _command(cls: type[Task]) -> Callable[..., int]:
    def run(
        *,
        model: str | None = None,
        out: Path | None = None,
        resume: bool = False,
        data: Path | None = None,
        task: Any = None,
        settings: Any = None,
    ) -> int:
        """Trains one model on the task.

        Args:
            model: name of the model; see stiefelkit list.
            out: folder of the run; runs/TASK-MODEL if left out.
            resume: continue the run in the folder where it stopped, to the same bits.
            data: folder of the data, for tasks that read files; that of STIEFELKIT_DATA if left out.
            task: the options of the task.
            settings: how to train; what is left out comes from the recipe of the task for the model.
        """
        with named(data):
            return _train(cls, given(task), model, built(Settings, settings), out, resume)

    return with_options(run, cls)


def _train(
    cls: type[Task], options: dict[str, Any], model: str | None, settings: Settings, out: Path | None, resuming: bool
) -> int:
    if model is None and not (resuming and out):
        raise OptionError(
            "Training needs a model, got none; name one of those that stiefelkit list shows, with --model."
        )
    from stiefelkit.training.config import Config
    from stiefelkit.training.display import Terminal
    from stiefelkit.training.summary import summarise
    from stiefelkit.training.train import resume, train

    path = out or Path("runs") / f"{cls.name}-{model}"
    display = Terminal()
    if resuming:
        asked: dict[str, Any] = settings.given() | {"task": cls.name}
        asked |= {"model": model} if model else {}
        asked |= {"task_options": options} if options else {}
        outcome = resume(path, asked, display)
    else:
        outcome = train(Config.resolve(cls(**options), model or "", settings), path, display)
    if outcome.signal is not None:
        again = f"stiefelkit train {cls.name} --out {path} --resume"
        print(f"Stopped at step {outcome.step} and saved; resume with: {again}")
        return 128 + outcome.signal
    if outcome.already:
        print(f"Run {path} is finished at step {outcome.step}: nothing to do.")
        return 0
    scores = ", ".join(f"{key} {value:.4f}" for key, value in summarise(path).test.items())
    print(f"Finished at step {outcome.step}: held-out {scores}; the run is in {path}.")
    return 0


app = app_of_tasks("train", "Train one model on a task.", _command)
