"""One subcommand per task, with the options of that task: shared by `train` and `compare`."""

import functools
from collections.abc import Callable
from typing import Annotated, Any

from cyclopts import App, Parameter

from stiefelkit.cli.app import DEFAULTS
from stiefelkit.cli.open_options import open_options
from stiefelkit.cli.recipes import filled, table
from stiefelkit.cli.words import with_plain_help
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task, tasks

__all__ = ["app_of_tasks", "with_options"]


def app_of_tasks(name: str, title: str, command: Callable[[type[Task]], Callable[..., Any]]) -> App:
    """Returns an app with a subcommand for each known task.

    Args:
        name: of the app.
        title: one line for its help.
        command: from a task's class to the function of the subcommand.
    """
    app = App(name=name, help=title, default_parameter=DEFAULTS)
    for task, cls in tasks.available().items():
        summary = (cls.__doc__ or "").strip().partition("\n")[0]
        app.command(with_plain_help(command(cls)), name=task, help=summary, help_epilogue=table(cls))
    return app


def with_options(run: Callable[..., int], cls: type[Task]) -> Callable[..., int]:
    """Returns `run` with the options of a task and the settings of training in place of its `task` and `settings`."""
    settings = open_options(Settings, functools.partial(filled, cls))
    for name, options in (("task", open_options(cls)), ("settings", settings)):
        run.__annotations__[name] = Annotated[options | None, Parameter(name="*")]
    return run
