"""Options as cyclopts reads them from dataclasses, a stricter reader of their values, and options from a TOML file."""

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from itertools import pairwise
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import cyclopts
from cyclopts import App, ArgumentCollection, Parameter, Token

from stiefelkit.checks import listed, words_of
from stiefelkit.errors import OptionError
from stiefelkit.files import LARGEST, importing, read_file
from stiefelkit.training.recipes import literal, tables_of, written
from stiefelkit.training.tasks import tasks

T = TypeVar("T")
Options = Annotated[T | None, Parameter(name="*")]  # an argument whose fields are options; None where none is given

asked: ContextVar[tuple[str, ...]] = ContextVar("asked", default=())  # the words of the command line


def read_integer(text: str) -> int:
    """Reads an integer, 1e4 among them; cyclopts would round 2.5."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(f"{text} is no integer") from None
        return int(number)


def read(kind: Any, tokens: Sequence[Token] | Mapping[str, Any]) -> Any:
    """Reads a value as cyclopts does, but integers exactly, tuples with commas, and tables whose keys have dots."""
    if isinstance(tokens, Mapping):
        return {name: _read_entry(get_args(kind)[1], name, found[-1].value) for name, found in tokens.items()}
    if kind in (int, int | None) and len(tokens) == 1:
        return read_integer(tokens[0].value)
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return tuple(_read_item(item, word) for word in words_of(",".join(token.value for token in tokens)))
    return cyclopts.convert(kind, tokens)


def _read_item(kind: Any, word: str) -> object:
    try:
        if kind == tuple[int, int]:
            rows, tall, columns = word.partition("x")
            return int(rows), int(columns if tall else rows)
        return kind(word)
    except ValueError:
        raise ValueError(f"{word!r} is no {'size, n or NxP' if kind == tuple[int, int] else kind.__name__}") from None


def _read_entry(kind: object, name: str, text: str) -> object:
    if get_origin(kind) is dict:
        return tables_of({name: text})[name]
    value = literal(text)
    if kind is float and not isinstance(value, int | float):
        raise ValueError(f"{name} needs a number, got {text!r}")
    return value


def join_keys(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Makes one key of what follows the dot of an option, as in --rates.u.skew; cyclopts would nest tables."""
    for argument in arguments:
        argument.tokens[:] = [
            token.evolve(keys=(".".join(token.keys).replace("-", "_"),) if token.keys else ())
            for token in argument.tokens
        ]


def _shown(default: object) -> str | None:
    return None if default is None or default in ((), {}) else listed(default)


DEFAULTS = Parameter(
    name_transform=methodcaller("replace", "_", "-"), negative_iterable=(), converter=read, show_default=_shown
)
"""Of all parameters: options have dashes for underscores, and T stays T."""


def resume_line() -> str:
    """Returns the line that goes on with what was stopped: the words of this one, and --resume."""
    return shlex.join(["stiefelkit", *(word for word in asked.get() if word != "--resume"), "--resume"])


def read_toml(who: str, path: Path) -> dict[str, Any]:
    """Returns what a TOML file says; raises OptionError if it is unreadable or no TOML."""
    with importing(who, path, OptionError):
        return tomllib.loads(read_file(path, most=LARGEST).decode("utf-8-sig"))


def words_of_file(path: Path, words: tuple[str, ...]) -> list[str]:
    """Returns the options in a TOML file as words of the command line, but for those that `words` name.

    Keys are the options without their dashes in front, `hidden-size = 96` or `hidden_size = 96`; tables hold the
    options with a dot, `[rates]` `skew = 1e-4`, or what is for one task only, `[digits]` and `[digits.rates]`.
    cyclopts.config.Toml would drop a whole table for one entry of it on the command line.
    """
    content = read_toml("--config", path)
    own = {}
    if words[:1] in (("train",), ("compare",)):
        of_tasks = {name: content.pop(name) for name in tasks.names() if isinstance(content.get(name), dict)}
        own = of_tasks.get("".join(words[1:2]), {})
    named = {word.partition("=")[0].replace("--no-", "--") for word in words}
    named |= {word.replace("optimizers", "rates") for word, value in pairwise(words) if "lr=" in value}
    options = options_in(content) | options_in(own)
    return [f"--{key}={word}" for key, word in options.items() if f"--{key}" not in named]


def options_in(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns the words of options by their names, those in tables with dots; the table of an optimizer is one option.

    >>> options_in({"batch_size": 8, "models": ["lru", "lstm"], "rates": {"skew": 1e-4}})
    {'batch-size': '8', 'models': 'lru,lstm', 'rates.skew': '0.0001'}
    """
    words = {}
    for key, value in table.items():
        name = f"{prefix}{key}".replace("_", "-")
        if isinstance(value, Mapping) and "optimizer" not in value:
            words |= options_in(value, f"{name}.")
        else:
            is_list = isinstance(value, list) and not prefix
            words[name] = ",".join(map(str, value)) if is_list else written(value)
    return words
