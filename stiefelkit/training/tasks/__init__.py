"""The tasks that models are trained on, one file each, and the table that knows them by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from stiefelkit.errors import OptionError, did_you_mean
from stiefelkit.registry import Registry
from stiefelkit.training.recipes import Recipe
from stiefelkit.training.tasks.task import Task

__all__ = ["Task", "create", "tasks"]

PARTS = ("name", "input_size", "output_size", "last_only", "headline", "loss_label", "recipes")
"""What a task says of itself beside its methods."""


def _check(task: Any) -> None:
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise OptionError(f"A task needs to be a subclass of stiefelkit.training.tasks.Task, got {task!r}.")
    who = task.__name__
    if "__dataclass_params__" not in vars(task) or not task.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise OptionError(f"A task needs to be a dataclass of its options, @dataclass(frozen=True), got {who}.")
    missing = [part for part in PARTS if not hasattr(task, part)]
    if missing:
        raise OptionError(f"A task needs {', '.join(missing)}, got {who} without; write each as a ClassVar.")
    options = [option.name for option in dataclasses.fields(task)]  # type: ignore[arg-type]
    inside = [part for part in PARTS if part in options]
    if inside:
        raise OptionError(f"A task needs {', '.join(inside)} as a ClassVar, got an option of {who}.")
    if "train_size" not in options and not hasattr(task, "train_size"):
        raise OptionError(f"A task needs an option train_size, got {who} with {', '.join(options) or 'no option'}.")
    recipes: Any = task.recipes
    if not (isinstance(recipes, Mapping) and all(isinstance(recipe, Recipe) for recipe in recipes.values())):
        raise OptionError(f"A task needs recipes, a Recipe for each of some models, got {recipes!r:.80} in {who}.")


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
        "table": "stiefelkit.training.tasks.table:Table",
        "waveform": "stiefelkit.training.tasks.waveform:Waveform",
    },
    _check,
)
"""The tasks, by name: built-ins, installed plugins, registered ones."""


def create(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Returns a task by name.

    Args:
        name: a name in `tasks`.
        options: the fields of the task's dataclass; those left out keep their defaults.

    Raises:
        UnknownNameError: no task has this name.
        OptionError: the task has no such option, or its value is out of range; or it is none, or lacks a part.

    >>> create("copying", {"T": 100}).baseline["loss"] < 0.174
    True
    """
    task = tasks.find(name)
    if task.name != name:
        raise OptionError(f"Task {name!r} needs the name that it is registered under, got name = {task.name!r}.")
    options = dict(options or {})
    known = [field.name for field in dataclasses.fields(task)]
    for option in options:
        if option not in known:
            raise OptionError(f"Task {name!r} has no option {option!r}{did_you_mean(option, known)}")
    return task(**options)
