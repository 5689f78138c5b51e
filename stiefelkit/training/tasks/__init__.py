"""The tasks that models are trained on, one file each, and the table that knows them by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from stiefelkit.errors import OptionError, did_you_mean, needs
from stiefelkit.registry import Registry
from stiefelkit.training.recipes import Recipe
from stiefelkit.training.tasks.task import Task

__all__ = ["Task", "create", "tasks"]

PARTS = ("name", "input_size", "output_size", "last_only", "headline", "loss_label", "recipes")
"""What a task says of itself beside its methods."""


def _check(task: object) -> None:
    """Raises OptionError unless a plugin is a task that can be trained on."""
    if not (isinstance(task, type) and issubclass(task, Task) and "__dataclass_fields__" in vars(task)):
        raise OptionError(f"A task needs to be a dataclass of its options and a subclass of Task, got {task!r}.")
    who, options = task.__name__, {option.name for option in dataclasses.fields(task)}
    needs(task.__hash__ is not None, OptionError, "A task", "@dataclass(frozen=True)", who)
    missing = [part for part in PARTS if part in options or part not in dir(task)]
    words = f"{', '.join(missing)}, each as a ClassVar"
    needs(not missing, OptionError, "A task", words, f"{who} without")
    has_size = "train_size" in {*options, *dir(task)}
    needs(has_size, OptionError, "A task", "an option train_size", f"{who} with {', '.join(sorted(options)) or 'none'}")
    recipes = vars(task).get("recipes", {})
    is_recipes = isinstance(recipes, Mapping) and all(isinstance(recipe, Recipe) for recipe in recipes.values())
    needs(is_recipes, OptionError, "A task", "recipes, a Recipe for each of some models", f"{recipes!r:.80} in {who}")


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
