"""What the recipes of a task fill in, for help: of the models that the command line names, or of all."""

import dataclasses
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stiefelkit.cli.app import asked
from stiefelkit.cli.lists import words_of
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task

__all__ = ["filled", "table"]


def filled(cls: type[Task], name: str) -> str:
    """Returns the value that a setting has when it is left out, or where to look if that is not the same for all.

    Args:
        cls: the task.
        name: a field of `Settings`.
    """
    models = [model for model in _named(cls) if model in cls.recipes] or list(cls.recipes)
    values = {_words(_settings(cls, model)[name]) for model in models}
    return values.pop() if len(values) == 1 else "by model"


def table(cls: type[Task]) -> str:
    """Returns what the recipes of a task do not all fill in alike, model by model, in lines of 80 characters."""
    recipes = {model: _settings(cls, model) for model in cls.recipes}
    differ = [
        name for name in _settings(cls, None) if len({_words(settings[name]) for settings in recipes.values()}) > 1
    ]
    if not differ:
        return ""
    lines = ["By model (with --model NAME before --help, the defaults above are those of NAME):"]
    width = max(map(len, recipes), default=0) + 2
    for model, settings in recipes.items():
        pairs = ", ".join(filter(None, (_entries(name, settings[name]) for name in differ)))
        held = pairs.replace(" ", "\0").replace(",\0", ", ")  # a name and its value stay on one line
        held = re.sub('"[^"]*"', lambda words: words[0].replace("\0", " "), held)  # but for tables
        start, indent = f"{model}:".ljust(width), " " * width
        lines += textwrap.wrap(held, 78, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def _settings(cls: type[Task], model: str | None) -> dict[str, Any]:
    """Every setting of a model by its recipe; of a model without one if None."""
    from stiefelkit.training.config import Config

    settings = {
        field.name: {} if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(Config)
    }
    recipe = cls.recipes[model].filled(Settings()) if model else Settings()
    settings |= recipe.given()
    return {field.name: settings[field.name] for field in dataclasses.fields(Settings)}


def _entries(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    if isinstance(value, dict):
        return ", ".join(f"{option}.{key} {_words(item)}" for key, item in value.items())
    return f"{option} {_words(value)}"


def _words(value: Any) -> str:
    if isinstance(value, dict) and "optimizer" in value:
        options = (f"{key}={_words(item)}" for key, item in value.items() if key != "optimizer")
        return f'"{" ".join([value["optimizer"], *options])}"'
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _named(cls: type[Task]) -> Sequence[str]:
    """The models that the command line names, or else the file that it names."""
    words = asked.get()
    for option in ("--model", "--models"):
        given = _value(words, option)
        if given is not None:
            return words_of(given)
    file = _value(words, "--config")
    if file is None:
        return ()
    from stiefelkit.cli.options_file import read_options

    options = read_options(Path(file)).of_task(cls.name)
    return words_of(str(options.get("model", options.get("models", ""))))


def _value(words: Sequence[str], option: str) -> str | None:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            return after
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None
