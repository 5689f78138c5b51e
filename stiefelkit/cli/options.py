"""From the fields of a dataclass to options of a command, with stricter numbers.

cyclopts rounds 2.5 to an integer and reads 0.9 as 1 where either kind of number may stand; here a fraction is
refused, or kept. Fields that are tuples are read from words with commas between them. Docstrings are the help:
paragraphs that the console breaks into lines, not the source.
"""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from cyclopts import App, ArgumentCollection, Parameter, Token

from stiefelkit.errors import OptionError
from stiefelkit.training.checks import listed, words_of
from stiefelkit.training.recipes import Option, literal

F = TypeVar("F", bound=Callable[..., Any])
FORMULA = re.compile(r":math:[`]([^`]*)`")
HEADING = re.compile(r"^(Args|Attributes|Raises|Returns|References):$")


def unwrapped(text: str) -> str:
    r"""Returns a docstring in which each paragraph, each entry of a list and each argument is one line, as plain text.

    >>> unwrapped("One sentence, broken\nin two.\n\nArgs:\n    n: size\n        of it.")
    'One sentence, broken in two.\n\nArgs:\n    n: size of it.'
    """
    lines: list[str] = []
    starts_anew = True
    section = ""
    for line in inspect.cleandoc(text).splitlines():
        depth = len(line) - len(line.lstrip())
        heading = HEADING.match(line)
        if heading or (line and not depth):
            section = heading[1] if heading else ""
        # references have no names in front, and may go on at the same depth
        is_entry = depth <= 4 and (section != "References" or lines[-1].endswith((".", ":")))
        if starts_anew or not line or (section and is_entry) or line.lstrip().startswith("* "):
            lines.append(line)
        else:
            lines[-1] += f" {line.strip()}"
        starts_anew = not line
    return FORMULA.sub(r"\1", "\n".join(lines))


def sections(text: str) -> dict[str, list[str]]:
    r"""Returns the paragraphs of a docstring, without its examples, by the heading of their section; "" is the first.

    >>> sections("What it is.\n\nArgs:\n    n: size.\n\n>>> 1 + 1\n2\n")
    {'': ['What it is.'], 'Args': ['n: size.']}
    """
    paragraphs: dict[str, list[str]] = {"": []}
    heading = ""
    for line in unwrapped(text.partition("\n    >>>")[0].partition("\n>>>")[0]).splitlines():
        matched = HEADING.match(line)
        if matched:
            heading = matched[1]
            paragraphs[heading] = []
        elif line.strip():
            paragraphs[heading].append(line.strip())
    return paragraphs


def entries(lines: Iterable[str]) -> dict[str, str]:
    """Returns name to words, of the lines of a section.

    >>> entries(["n: size.", "p: columns: at most n."])
    {'n': 'size.', 'p': 'columns: at most n.'}
    """
    return {name: words for name, _, words in (line.partition(": ") for line in lines)}


def _size(word: str) -> tuple[int, int]:
    rows, tall, columns = word.partition("x")
    return int(rows), int(columns if tall else rows)


READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    tuple[str, ...]: (str, "words"),
    tuple[int, ...]: (int, "integers, as in 0,300,"),
    tuple[float, ...]: (lambda word: float(int(word)), "integers, as in 0,300,"),
    tuple[tuple[int, int], ...]: (_size, "n or NxP, as in 64,2048x32,"),
}
"""Type of a field to what makes an item of each word, and to what the words must be."""


def options(filled: Callable[[str], str | None] = lambda name: None, task: type | None = None) -> Callable[[F], F]:
    """Decorates a command, whose docstring is its help: arguments that are dataclasses are options field by field.

    The fields of a class come before those of its bases, with the words that the nearest docstring has for them;
    `training.checks` says what their metadata tell, and `filled` what help shows for `settings` without a default. The
    command gets an instance of each class; of `task`, that of its argument of this name, the fields that were named.
    """

    def decorated(command: F) -> F:
        signature = inspect.signature(command)
        classes = {name: task if name == "task" else each.annotation for name, each in signature.parameters.items()}
        known: dict[str, Any] = {name: cls for name, cls in classes.items() if dataclasses.is_dataclass(cls)}
        told = {group: facts(cls) for group, cls in known.items()}

        def run(*words: Any, **others: Any) -> int:
            for group, cls in known.items():
                named = {name: others.pop(name) for name in told[group] if name in others}
                named = {name: value for name, value in named.items() if value not in (None, {})}
                others[group] = named if group == "task" else built(cls, named)
            return command(*words, **others)

        parameters = []
        for name, parameter in signature.parameters.items():
            shown = filled if name == "settings" else lambda name: None
            parameters += [
                inspect.Parameter(option, parameter.KEYWORD_ONLY, default=None, annotation=_hint(option, *fact, shown))
                for option, fact in told.get(name, {}).items()
            ] or [parameter]
        opened: Any = run
        opened.__signature__ = signature.replace(parameters=parameters)
        opened.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        opened.__name__, opened.__doc__ = command.__name__, unwrapped(command.__doc__ or "")
        return opened

    return decorated


def built(cls: type, named: dict[str, Any]) -> Any:
    """Returns the instance of `cls` that has the options named."""
    named, hints = dict(named), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner = {name: named.pop(name) for name in field.metadata.get("fields", ()) if name in named}
        if inner:
            named[field.name] = dataclasses.replace(default_of(field), **inner)
        if field.name not in named:
            continue
        value, read = named[field.name], field.metadata.get("read")
        if read is not None:
            named[field.name] = read(value)
        elif hints[field.name] in READERS:
            named[field.name] = _read(value, field.metadata.get("names", (f"--{field.name}",))[0], hints[field.name])
        elif isinstance(value, dict):
            reader = literal if typing.get_args(hints[field.name])[1] == Option else lambda word: word
            named[field.name] = {key.replace("-", "_"): reader(item) for key, item in value.items()}
    return cls(**named)


def _read(listed: str, option: str, hint: Any) -> tuple[Any, ...]:
    (read, needs), values = READERS[hint], []
    for word in words_of(listed):
        try:
            values.append(read(word))
        except ValueError as error:
            raise OptionError(f"{option} needs {needs} separated by commas, got {word!r}.") from error
    return tuple(values)


def facts(cls: type) -> dict[str, tuple[Any, Any, str, Mapping[str, Any]]]:
    """Maps name to type, default, help and what else is told, of all that is to be an option."""
    hints, fields = typing.get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    words: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        words |= entries(sections(base.__doc__ or "").get("Args", ()))
    found = {}
    declared = [name for base in cls.__mro__[:-1] for name in inspect.get_annotations(base) if name in fields]
    for name in dict.fromkeys(declared):
        metadata: Mapping[str, Any] = fields[name].metadata
        if "fields" in metadata:
            default, inner = default_of(fields[name]), facts(hints[name])
            for option in metadata["fields"]:
                hint, _, help, _ = inner[option]
                found[option] = (hint, getattr(default, option), help, {"shown": metadata["shown"]})
        elif not metadata.get("hidden"):
            found[name] = (hints[name], default_of(fields[name]), words.get(name, ""), metadata)
    return found


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Returns the default of a field, None where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _hint(
    name: str, hint: Any, default: Any, help: str, metadata: Mapping[str, Any], filled: Callable[[str], str | None]
) -> Any:
    kinds = set(typing.get_args(hint)) - {types.NoneType} if isinstance(hint, types.UnionType) else {hint}
    shown = functools.partial(_shown, name, metadata.get("shown") if default is None else default, filled)
    reader = whole if kinds == {int} else None
    parameter = Parameter(name=metadata.get("names"), converter=reader, help=help, show_default=shown)
    if typing.get_origin(hint) is dict:
        value = typing.get_args(hint)[1]
        item = value if value is float else str  # `built` reads words
        return Annotated[dict[str, item], parameter]
    return Annotated[(str if typing.get_origin(hint) is tuple else hint) | None, parameter]


def _shown(name: str, default: Any, filled: Callable[[str], str | None], _: Any) -> str | None:
    if default is None or default == {}:
        return filled(name)
    return (listed(default) or '""') if isinstance(default, tuple) else str(default)


def whole(hint: Any, tokens: Sequence[Token]) -> int:
    """Reads an integer, 1e4 among them; a fraction or a word is refused."""
    try:
        return int(tokens[0].value)
    except ValueError:
        number = float(tokens[0].value)  # 1e4 is an integer, 2.5 is none
        if not number.is_integer():
            raise ValueError(f"{tokens[0].value} is no integer") from None
        return int(number)


def join_keys(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Makes one key of what follows the dot of an option, as in --rates.u.skew; cyclopts would nest tables."""
    for argument in arguments:
        argument.tokens[:] = [
            token.evolve(keys=(".".join(token.keys),) * bool(token.keys)) for token in argument.tokens
        ]
