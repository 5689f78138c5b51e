"""One subcommand per task, with the options of that task: shared by `train` and `compare`."""

from collections.abc import Callable
from typing import Any

from cyclopts import App

from stiefelkit.cli.app import DEFAULTS
from stiefelkit.experiments.tasks import Task, tasks

__all__ = ["app_of_tasks"]


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
        app.command(command(cls), name=task, help=summary)
    return app
