"""The tasks that models are trained on, one file each, and the table that knows them by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from stiefelkit.errors import OptionError, did_you_mean
from stiefelkit.registry import Registry
from stiefelkit.training.tasks.task import Task

__all__ = ["Task", "create", "tasks"]

tasks = Registry(
    "stiefelkit.tasks",
    "task",
    {
        "adding": "stiefelkit.training.tasks.adding:Adding",
        "chars": "stiefelkit.training.tasks.chars:Chars",
        "copying": "stiefelkit.training.tasks.copying:Copying",
        "digits": "stiefelkit.training.tasks.digits:Digits",
        "mnist": "stiefelkit.training.tasks.mnist:Mnist",
        "pmnist": "stiefelkit.training.tasks.mnist:PermutedMnist",
        "speech": "stiefelkit.training.tasks.speech:Speech",
        "waveform": "stiefelkit.training.tasks.waveform:Waveform",
    },
)
"""The tasks, by name: built-ins, installed plugins, registered ones."""


def create(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Returns a task by name.

    Args:
        name: a name in `tasks`.
        options: the fields of the task's dataclass; those left out keep their defaults.

    Raises:
        UnknownNameError: no task has this name.
        OptionError: the task has no such option, or its value is out of range.

    >>> create("copying", {"T": 100}).baseline["loss"] < 0.174
    True
    """
    task = tasks.get(name)
    options = dict(options or {})
    known = [field.name for field in dataclasses.fields(task)]
    for option in options:
        if option not in known:
            raise OptionError(f"Task {name!r} has no option {option!r}{did_you_mean(option, known)}")
    return task(**options)
