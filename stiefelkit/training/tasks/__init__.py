"""The tasks that models are trained on, one file each, and the table that knows them by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from stiefelkit.checks import known_words
from stiefelkit.errors import OptionError, needs
from stiefelkit.registry import Registry
from stiefelkit.training.tasks.task import Task

__all__ = ["Task", "create", "tasks"]

PARTS = ("name", "input_size", "output_size", "last_only", "headline", "loss_label", "recipes", "train_size")
"""Attributes that a task has beside its methods."""


def _check(task: object) -> None:
    """Raises OptionError unless a plugin is a task that can be trained on."""
    is_task = isinstance(task, type) and issubclass(task, Task) and "__dataclass_fields__" in vars(task)
    needs(is_task, OptionError, "A task", "to be a dataclass of its options and a subclass of Task", task)
    missing = [part for part in PARTS if part not in {*dir(task), *getattr(task, "__dataclass_fields__", ())}]
    needs(not missing, OptionError, "A task", f"{', '.join(missing)}, each as a ClassVar or an option", task)


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
        "words": "stiefelkit.training.tasks.words:Words",
    },
    _check,
)
"""The tasks, by name: built-ins, installed plugins, registered ones."""


def create(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Returns a task by name.

    Args:
        name: a name in `tasks`.
        options: the fields of the task's dataclass; those left out keep their defaults.

    >>> create("copying", {"T": 100}).baseline["loss"] < 0.174
    True
    """
    task = tasks.find(name)
    needs(task.name == name, OptionError, f"Task {name!r}", "the name that it is registered under", task.name)
    options = dict(options or {})
    known_words(f"Task {name!r}", "option", options, [field.name for field in dataclasses.fields(task)])
    return task(**options)
