"""One subcommand per task, with the options of that task: shared by `train` and `compare`."""

import functools
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from stiefelkit.cli.app import DEFAULTS
from stiefelkit.cli.open_options import open_options
from stiefelkit.cli.recipes import filled, table
from stiefelkit.cli.words import with_plain_help
from stiefelkit.training.board import Board
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task, tasks

__all__ = ["app_of_tasks", "resume_line", "with_options"]


def app_of_tasks(name: str, title: str, command: Callable[[type[Task]], Callable[..., Any]]) -> App:
    """Returns an app with a subcommand for each known task.

    Args:
        name: of the app.
        title: one line for its help.
        command: from a task's class to the function of the subcommand.
    """
    app = App(name=name, help=title, default_parameter=DEFAULTS)

    def add(task: str, cls: type[Task]) -> None:
        summary = (cls.__doc__ or "").strip().partition("\n")[0]
        app.command(with_plain_help(command(cls)), name=task, help=summary, help_epilogue=table(cls))

    tasks.map(add)
    return app


def with_options(run: Callable[..., int], cls: type[Task]) -> Callable[..., int]:
    """Returns `run` with the options of a task and the settings of training in place of its `task` and `settings`."""
    settings = open_options(Settings, functools.partial(filled, cls))
    for name, options in (("task", open_options(cls)), ("settings", settings)):
        run.__annotations__[name] = Annotated[options | None, Parameter(name="*")]
    return run


def resume_line(*words: str, data: Path | None, board: Board | None = None, ranks: int = 1) -> str:
    """Returns the line that goes on with what was stopped.

    Args:
        words: of the command, without those below.
        data: folder of the data, if it was named.
        board: where the curves can be watched, of commands that say so.
        ranks: processes that share the work.

    >>> resume_line("train", "chars", "--out", "my runs", data=Path("text"))
    "stiefelkit train chars --out 'my runs' --data text --resume"
    """
    here = os.environ.get("LOCAL_WORLD_SIZE", str(ranks))
    start = ["stiefelkit"] if ranks == 1 else ["torchrun", "--nproc-per-node", here, "-m", "stiefelkit"]
    more = [] if data is None else ["--data", str(data)]
    more += ["--tensorboard"] if board is not None and board.tensorboard else []
    return shlex.join([*start, *words, *more, "--resume"])
