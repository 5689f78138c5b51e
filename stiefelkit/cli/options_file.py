"""Options from a TOML file."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection, Token
from cyclopts.config import Dict

from stiefelkit.errors import OptionError, did_you_mean
from stiefelkit.training.recipes import written
from stiefelkit.training.tasks import tasks

LARGEST = 2**20
DEEPEST = 32
"""Tables within tables, and parts of a key, at most."""
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
LONG_KEY = re.compile(rf"{_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{DEEPEST}}}")


@dataclass(frozen=True)
class OptionsFile:
    """The content of a file, with its name, in the form that cyclopts calls, which lets no unknown key pass."""

    options: dict[str, Any]
    source: str

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Puts the options under those of the command line; raises OptionError if the command has no such option."""
        names = {name.lstrip("-").partition(".")[0] for argument in arguments for name in argument.names}
        # the negative of a switch, and the place of a table's entries, are no keys of a file
        names = {name for name in names if not name.startswith("no-") and name != "*"}
        has_tasks = commands[:1] in (("train",), ("compare",))
        options = self.of_task(commands[-1]) if has_tasks else self.options
        for key in options:
            if has_tasks and key in tasks.names():
                raise OptionError(f"Option {key!r} in {self.source} needs a table of that task, got {options[key]!r}.")
            if key.replace("_", "-") not in names:
                message = f"Command {' '.join(commands)!r} has no option {key!r}, which {self.source} sets"
                raise OptionError(f"{message}{did_you_mean(key, {*names, *(tasks.names() if has_tasks else ())})}")
        # cyclopts would drop a whole table for one option of it on the command line: tables go entry by entry
        tables = {key: value for key, value in options.items() if isinstance(value, dict)}
        for key, table in tables.items():
            for entry, value in table.items():
                if key != "rates" or not self._is_rated(arguments, entry):
                    self._put(arguments, key, entry, value)
        plain = {
            key: ",".join(map(str, value)) if isinstance(value, list) else value
            for key, value in options.items()
            if key not in tables
        }
        Dict(data=plain, source=self.source, use_commands_as_keys=False)(app, commands, arguments)

    def of_task(self, task: str) -> dict[str, Any]:
        """Returns the options of a task: those outside of the tables of tasks, under those of its own table."""
        tables = {key for key, value in self.options.items() if key in tasks.names() and isinstance(value, dict)}
        merged = {key: value for key, value in self.options.items() if key not in tables}
        for key, value in self.options[task].items() if task in tables else ():
            same = next((name for name in merged if name.replace("_", "-") == key.replace("_", "-")), key)
            are_tables = isinstance(value, dict) and isinstance(merged.get(same), dict)
            merged[same] = {**merged[same], **value} if are_tables else value
        return merged

    def _is_rated(self, arguments: ArgumentCollection, coordinate: str) -> bool:
        """Returns whether the command line gives a coordinate an optimizer with a rate, which wins over the file's."""
        try:
            argument, keys, _ = arguments.match(f"--optimizers.{coordinate}")
        except ValueError:
            return False
        words = [token.value.split() for token in argument.tokens if token.keys == keys and token.source != self.source]
        return any(word.startswith("lr=") for line in words for word in line)

    def _put(self, arguments: ArgumentCollection, key: str, entry: str, value: Any) -> None:
        place = f"{key}.{entry}"
        is_list = isinstance(value, list) and all(isinstance(item, int | float) for item in value)
        is_table = key == "optimizers" and isinstance(value, dict)
        if not (is_list or is_table or isinstance(value, bool | int | float | str)):
            raise OptionError(
                f"Option {place!r} in {self.source} needs a number, a list of numbers, a word, true or false, "
                f"got {value!r}."
            )
        try:
            argument, keys, _ = arguments.match(f"--{key.replace('_', '-')}.{entry}")
        except ValueError:
            raise OptionError(f"Option {key!r} in {self.source} needs one value, got a table.") from None
        if all(token.keys != keys for token in argument.tokens):
            argument.append(Token(keyword=place, value=written(value), source=self.source, keys=keys))


def read_options(path: Path) -> OptionsFile:
    """Returns the options in a TOML file; raises OptionError if it cannot be read, or is no TOML.

    Keys are the options without their dashes in front, `hidden-size = 96` or `hidden_size = 96`; tables hold the
    options with a dot, `[rates]` `skew = 1e-4`, or what is for one task only, `[digits]` and `[digits.rates]`.
    """
    return OptionsFile(read_toml("--config", path), str(path))


def read_toml(who: str, path: Path) -> dict[str, Any]:
    """Returns what a TOML file says; raises OptionError if it is unreadable, no TOML, or too large or deep."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        text = content.decode("utf-8-sig")
        if len(content) > LARGEST:
            raise ValueError(f"it is larger than {LARGEST} bytes")
        if LONG_KEY.search(text):  # which takes Python minutes
            raise ValueError(f"a key has more than {DEEPEST} parts")
        options = tomllib.loads(text.replace("\r\n", "\n"))
        _check_depth(options)
    except OSError as error:
        raise OptionError(f"{who} needs a readable file, got {path}: {error.strerror}.") from error
    except RecursionError as error:
        raise OptionError(f"{who} needs valid TOML, got {path}: it is nested too deeply.") from error
    except ValueError as error:
        raise OptionError(f"{who} needs valid TOML, got {path}: {error}.") from error
    return options


def _check_depth(options: dict[str, Any]) -> None:
    """Raises ValueError for a table or list deeper than options are, or a text that no path can be."""
    level: list[Any] = [options]
    for _ in range(DEEPEST + 1):
        inner = [item for held in level for item in (held.values() if isinstance(held, dict) else held)]
        if any(isinstance(item, str) and "\0" in item for item in inner):
            raise ValueError("a text has a null character")
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError("it is nested too deeply")
