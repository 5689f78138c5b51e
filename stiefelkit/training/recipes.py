"""Settings of training, which may be left open, and the recipes that close them."""

import ast
import contextlib
import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stiefelkit.checks import Option
from stiefelkit.errors import OptionError, needs
from stiefelkit.optim import names_in_words

__all__ = ["Option", "Recipe", "Settings", "recipes_of"]

Share = Callable[[int], dict[str, Any]]
"""From the hidden size to options of the model."""


def tables_of(words: Mapping[str, str]) -> dict[str, dict[str, Option]]:
    """Returns the table of each coordinate from its words, or raises OptionError if they are no name, then options.

    >>> tables_of({"skew": "rmsprop lr=1e-4 eps-inside=true"})
    {'skew': {'optimizer': 'rmsprop', 'lr': 0.0001, 'eps_inside': True}}
    """
    tables = {}
    for coordinate, text in words.items():
        name, *words_of_options = text.split() or ["="]
        pairs = [word.partition("=")[::2] for word in words_of_options]
        is_table = "=" not in name and all(value for _, value in pairs)
        example = 'a name and options, as in "rmsprop lr=1e-4 alpha=0.9"'
        needs(is_table, OptionError, f"--optimizers.{coordinate}", example, repr(text))
        tables[coordinate] = {"optimizer": name, **{key.replace("-", "_"): literal(value) for key, value in pairs}}
    return tables


def literal(word: str) -> Option:
    """Returns the number of a word, true or false, a list of numbers, or the word; raises OptionError for odd brackets.

    >>> [literal(word) for word in ("12", "true", "cosine", "0.9,0.999", "[0.9, 0.999]")]
    [12, True, 'cosine', [0.9, 0.999], [0.9, 0.999]]
    """
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        value = ast.literal_eval(word)
        values = value if isinstance(value, list | tuple) else [value]
        if {*map(type, values)} <= {int, float}:
            return value if isinstance(value, int | float) else list(values)
    words = 'numbers separated by commas in a list, as in "[0.1, 0.9999]"'
    needs(word[:1] not in ("[", "(") and word[-1:] != "]", OptionError, "An option", words, repr(word))
    return {"true": True, "false": False}.get(word.lower(), word)


def written(value: object) -> str:
    """Returns the word of a value on the command line, as `literal` reads it, or of a table as `tables_of` does.

    >>> written({"optimizer": "adam", "lr": 1e-4, "betas": [0.9, 0.99], "amsgrad": True})
    'adam lr=0.0001 betas=[0.9,0.99] amsgrad=true'
    """
    if isinstance(value, Mapping):
        pairs = (f"{key}={written(item)}" for key, item in value.items() if key != "optimizer")
        return " ".join([str(value.get("optimizer", "")), *pairs])
    return str(value).lower() if isinstance(value, bool) else str(value).replace(", ", ",")


@dataclass(frozen=True)
class Settings:
    """Settings of training; whatever is left out comes from the task's recipe for the model.

    Args:
        hidden_size: units of the recurrent layer.
        steps: optimizer steps of the whole run.
        batch_size: sequences per step.
        optimizer: {free}; {of_frames}, which move frames too; or the name of an installed plugin.
        lr: learning rate.
        rates: learning rates of single coordinates, as in --rates.skew 1e-4 or --rates.stiefel 1e-4; the others use lr.
        optimizers: other optimizers for single coordinates, with their options, as in --optimizers.skew "rmsprop
            lr=1e-4 alpha=0.9", in a file skew = {optimizer = "rmsprop", lr = 1e-4, alpha = 0.9}; a rate in rates wins.
        schedule: constant, or cosine: all rates fall to zero along half a cosine over the run.
        clip_norm: gradients are scaled down to at most this norm, that of the tangent space for frames; 0 switches it
            off.
        seed: fixes the initial weights and the training data.
        options: options of the model, as in --options.negative 32 or, of several numbers, --options.decay 0.1,0.9999.
        optimizer_options: options of the optimizer, as in --optimizer-options.alpha 0.9.
        eval_every: steps between two evaluations on the held-out set.
        log_every: steps between two lines of the log.
        checkpoint_every: steps between two checkpoints.
        threads: CPU threads; another number may change the last bits.
        device: cpu, cuda, cuda:1, ...
    """

    hidden_size: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    optimizer: str | None = None
    lr: float | None = None
    rates: dict[str, float] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Option]] = field(default_factory=dict)
    schedule: str | None = None
    clip_norm: float | None = None
    seed: int | None = None
    options: dict[str, Option] = field(default_factory=dict)
    optimizer_options: dict[str, Option] = field(default_factory=dict)
    eval_every: int | None = None
    log_every: int | None = None
    checkpoint_every: int | None = None
    threads: int | None = None
    device: str | None = None

    def given(self) -> dict[str, Any]:
        """Returns the settings that are not left open; keys of dictionaries get the underscores of Python's names."""
        settings = {name: value for name, value in vars(self).items() if value is not None and value != {}}
        for name, value in settings.items():
            if isinstance(value, dict):
                settings[name] = {key.replace("-", "_"): item for key, item in value.items()}
        return settings

    def with_defaults(self, defaults: "Settings") -> "Settings":
        """Returns these settings with the gaps filled from `defaults`, dictionaries key by key.

        Options of one optimizer mean nothing to another: who names one means it for all coordinates without their own.
        """
        merged, asked = defaults.given(), self.given()
        if self.optimizer is not None:
            merged.pop("optimizers", None)
        if self.optimizer not in (None, defaults.optimizer):
            merged.pop("optimizer_options", None)
        rates, tables = merged.get("rates", {}), merged.get("optimizers", {})
        for name in asked.get("rates", {}).keys() & tables.keys():
            tables[name] = {key: value for key, value in tables[name].items() if key != "lr"}
        for name, table in asked.get("optimizers", {}).items():
            if "lr" in table:
                rates.pop(name, None)
        for name, value in asked.items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
        return Settings(**merged)


_free, _of_frames = names_in_words()
Settings.__doc__ = (Settings.__doc__ or "").replace("{free}", _free).replace("{of_frames}", _of_frames)


@dataclass(frozen=True)
class Recipe:
    """Default settings of a task for one model.

    Args:
        settings: the settings; what is left open here gets the defaults of `Config`.
        options: from the hidden size to the model's options, for those that are a share of it.
    """

    settings: Settings = field(default_factory=Settings)
    options: Share = lambda n: {}

    def filled(self, settings: Settings) -> Settings:
        """Returns `settings` with gaps filled; options are not for another parametrization than the model's own."""
        merged = settings.with_defaults(self.settings)
        if merged.hidden_size is None or "parametrization" in settings.options:
            return merged
        return dataclasses.replace(merged, options={**self.options(merged.hidden_size), **merged.options})


def recipes_of(task: str) -> Mapping[str, Recipe]:
    """Returns the recipes of a task in recipes.toml, by model."""
    file = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    own = file[task]
    own = file.get(own.pop("like", ""), {}) | own
    of_all, start = own.pop("all"), {"lr": 1e-3, "optimizer": "adam"}
    return {model: _recipe(start | of_all | file["kin"].get(model, {}) | fields) for model, fields in own.items()}


def _recipe(fields: dict[str, Any]) -> Recipe:
    options, shares = fields.pop("options", {}), fields.pop("shares", {})
    return Recipe(Settings(**fields), lambda n: options | {name: n // part for name, part in shares.items()})
