"""One subcommand per task, with the options of that task: shared by `train` and `compare`."""

import dataclasses
import functools
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cyclopts import App

from stiefelkit.cli.app import DEFAULTS, asked
from stiefelkit.cli.options import default_of, options
from stiefelkit.training.checks import words_of
from stiefelkit.training.recipes import Settings, written
from stiefelkit.training.tasks import Task, tasks

Command = Callable[[type[Task]], Callable[..., Any]]
"""From the class of a task to the function of its subcommand."""


class _TaskApp(App):
    """The application of a task, which tabulates its recipes when help is drawn."""

    task: type[Task]
    help_epilogue: Any = property(lambda self: table(self.task), lambda self, value: None)


def app_of_tasks(name: str, command: Command) -> App:
    """Returns an app with a subcommand for each known task; `train.__getattr__` gives each one by name."""
    app = App(name=name, default_parameter=DEFAULTS)
    # a plugin is looked at first: one that fails is left out
    own = [task for task in tasks.names() if (tasks.origin(task) or "").startswith("stiefelkit ")]
    for task in own:
        app.command(f"stiefelkit.cli.train:{name}_{task}", name=task)
    if len(own) < len(tasks.names()):
        tasks.map(lambda task, cls: task in own or app.command(subcommand(cls, command), name=task))
    return app


def subcommand(cls: type[Task], command: Command) -> App:
    """Returns the subcommand of a task."""
    app = _TaskApp(name=cls.name, help=(cls.__doc__ or "").strip().partition("\n")[0], default_parameter=DEFAULTS)
    app.task = cls
    app.default(command(cls))
    return app


def with_options(run: Callable[..., int], cls: type[Task]) -> Callable[..., int]:
    """Returns `run` with the options of a task and the settings of training in place of its `task` and `settings`."""
    return options(functools.partial(filled, cls), cls)(run)


def resume_line(*words: str, data: Path | None, tensorboard: bool = False, ranks: int = 1) -> str:
    """Returns the line that goes on with what was stopped, by so many ranks, with the data and the curves it had.

    >>> resume_line("train", "chars", "--out", "my runs", data=Path("text"))
    "stiefelkit train chars --out 'my runs' --data text --resume"
    """
    here = os.environ.get("LOCAL_WORLD_SIZE", str(ranks))
    start = ["stiefelkit"] if ranks == 1 else ["torchrun", "--nproc-per-node", here, "-m", "stiefelkit"]
    more = [] if data is None else ["--data", str(data)]
    more += ["--tensorboard"] if tensorboard else []
    return shlex.join([*start, *words, *more, "--resume"])


def filled(cls: type[Task], name: str) -> str:
    """Returns the value of a setting that is left out, or where to look if that is not the same for all models."""
    models = [model for model in _named(cls) if model in cls.recipes] or list(cls.recipes)
    values = {_words(_settings(cls, model)[name]) for model in models}
    return values.pop() if len(values) == 1 else "by model"


def table(cls: type[Task]) -> str:
    """Returns what the recipes of a task do not all fill in alike, model by model, in lines of 80 characters."""
    recipes = {model: _settings(cls, model) for model in cls.recipes}
    names = [field.name for field in dataclasses.fields(Settings)]
    differ = [name for name in names if len({_words(settings[name]) for settings in recipes.values()}) > 1]
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


def _settings(cls: type[Task], model: str) -> dict[str, Any]:
    """Returns every setting of a model by its recipe."""
    from stiefelkit.training.config import Config

    settings = {field.name: default_of(field) for field in dataclasses.fields(Config)}
    settings |= cls.recipes[model].filled(Settings()).given()
    return {field.name: settings[field.name] for field in dataclasses.fields(Settings)}


def _entries(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    if isinstance(value, dict):
        return ", ".join(f"{option}.{key} {_words(item)}" for key, item in value.items())
    return f"{option} {_words(value)}"


def _words(value: Any) -> str:
    if isinstance(value, dict) and "optimizer" in value:
        return f'"{written(value)}"'
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _named(cls: type[Task]) -> Sequence[str]:
    """Returns the models that the command line names, or else the file that it names."""
    model, models, file = (_value(asked.get(), option) for option in ("--model", "--models", "--config"))
    if model is None and models is None and file is not None:
        from stiefelkit.cli.options_file import read_options

        held = read_options(Path(file)).of_task(cls.name)
        models = str(held.get("model", held.get("models", "")))
    return words_of(models or "" if model is None else model)


def _value(words: Sequence[str], option: str) -> str | None:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after
    return None
