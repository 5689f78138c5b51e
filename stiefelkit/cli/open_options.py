"""From a dataclass of options to one that can be left open field by field, with stricter numbers.

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
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter, Token

from stiefelkit.errors import OptionError
from stiefelkit.training.board import Board
from stiefelkit.training.checks import listed
from stiefelkit.training.figure import Figures
from stiefelkit.training.recipes import Option, literal

__all__ = [
    "BoardOptions",
    "FigureOptions",
    "built",
    "entries",
    "given",
    "of_plan",
    "open_options",
    "sections",
    "unwrapped",
    "with_plain_help",
    "words_of",
]

F = TypeVar("F", bound=Callable[..., Any])
HEADING = re.compile(r"^(Args|Attributes|Raises|Returns|References):$")


def unwrapped(text: str) -> str:
    r"""Returns a docstring in which each paragraph, each entry of a list and each argument is one line.

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
    return "\n".join(lines)


def with_plain_help(command: F) -> F:
    """Decorates a command whose docstring is its help."""
    command.__doc__ = unwrapped(command.__doc__ or "")
    return command


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


def words_of(listed: str) -> tuple[str, ...]:
    """Returns the words, each once."""
    return tuple(dict.fromkeys(word.strip() for word in listed.split(",") if word.strip()))


def _each(read: Callable[[str], Any], needs: str) -> Callable[[str, str], Any]:
    def reader(listed: str, option: str) -> tuple[Any, ...]:
        values = []
        for word in words_of(listed):
            try:
                values.append(read(word))
            except ValueError as error:
                raise OptionError(f"{option} needs {needs} separated by commas, got {word!r}.") from error
        return tuple(values)

    return reader


def _size(word: str) -> tuple[int, int]:
    rows, tall, columns = word.partition("x")
    return int(rows), int(columns if tall else rows)


READERS: dict[Any, Callable[[str, str], Any]] = {
    tuple[str, ...]: lambda words, option: words_of(words),
    tuple[int, ...]: _each(int, "integers, as in 0,300,"),
    tuple[float, ...]: _each(lambda word: float(int(word)), "integers, as in 0,300,"),
    tuple[tuple[int, int], ...]: _each(_size, "n or NxP, as in 64,2048x32,"),
}
"""Type of a field to what makes its value of the words after the option."""

LITERAL = Parameter(converter=lambda hint, tokens: literal(tokens[0].value))


def open_options(cls: type, filled: Callable[[str], str | None] = lambda name: None) -> type:
    """Returns a frozen dataclass with the fields and the help of `cls`, each of which may be None or empty.

    The fields of a class come before those of its bases, with the words that the nearest docstring has for them;
    `training.checks` says what their metadata tell, and `filled` what help shows for a field without a default.
    """
    opened = [(name, *_opened(name, *facts, filled)) for name, facts in _facts(cls).items()]
    # left to itself, make_dataclass names the module "types", whose classes cyclopts does not open
    return dataclasses.make_dataclass(cls.__name__, opened, frozen=True, namespace={"__module__": __name__})


def given(options: Any) -> dict[str, Any]:
    """Returns the fields that were named, of an instance of a class made by `open_options`, or of None."""
    return {name: value for name, value in vars(options).items() if value not in (None, {})} if options else {}


def built(cls: type, options: Any) -> Any:
    """Returns the instance of `cls` that has the options named, of what `open_options` made of it."""
    named, hints = given(options), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner = {name: named.pop(name) for name in field.metadata.get("fields", ()) if name in named}
        if inner:
            named[field.name] = dataclasses.replace(_default(field), **inner)
        if field.name not in named:
            continue
        value, read = named[field.name], field.metadata.get("read")
        if read is not None:
            named[field.name] = read(value)
        elif hints[field.name] in READERS:
            named[field.name] = READERS[hints[field.name]](value, field.metadata.get("names", (f"--{field.name}",))[0])
        elif isinstance(value, dict):
            named[field.name] = {key.replace("-", "_"): item for key, item in value.items()}
    return cls(**named)


def of_plan(cls: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorates a command, whose docstring is its help: the fields of its argument `plan`, a `cls`, are options."""

    def decorated(command: Callable[..., int]) -> Callable[..., int]:
        def run(*words: Any, plan: Any = None, **others: Any) -> int:
            return command(*words, plan=built(cls, plan), **others)

        signature = inspect.signature(command)
        hint = Annotated[open_options(cls) | None, Parameter(name="*")]
        options = inspect.Parameter("plan", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        others = [parameter for name, parameter in signature.parameters.items() if name != "plan"]
        ordered = sorted([options, *others], key=lambda parameter: parameter.kind)
        typing.cast(Any, run).__signature__ = signature.replace(parameters=ordered)
        run.__annotations__ = {**command.__annotations__, "plan": hint}
        run.__name__, run.__doc__ = command.__name__, unwrapped(command.__doc__ or "")
        return run

    return decorated


def _facts(cls: type) -> dict[str, tuple[Any, Any, str, Mapping[str, Any]]]:
    """Maps name to type, default, help and what else is told, of all that is to be an option."""
    hints, fields = typing.get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    words: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        words |= entries(sections(base.__doc__ or "").get("Args", ()))
    facts = {}
    declared = [name for base in cls.__mro__[:-1] for name in inspect.get_annotations(base) if name in fields]
    for name in dict.fromkeys(declared):
        metadata: Mapping[str, Any] = fields[name].metadata
        if "fields" in metadata:
            default, inner = _default(fields[name]), _facts(hints[name])
            for option in metadata["fields"]:
                hint, _, help, _ = inner[option]
                facts[option] = (hint, getattr(default, option), help, {"shown": metadata["shown"]})
        elif not metadata.get("hidden"):
            facts[name] = (hints[name], _default(fields[name]), words.get(name, ""), metadata)
    return facts


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _opened(
    name: str, hint: Any, default: Any, help: str, metadata: Mapping[str, Any], filled: Callable[[str], str | None]
) -> tuple[Any, Any]:
    kinds = set(typing.get_args(hint)) - {types.NoneType} if isinstance(hint, types.UnionType) else {hint}
    shown = functools.partial(_shown, name, metadata.get("shown") if default is None else default, filled)
    parameter = Parameter(
        name=metadata.get("names"),
        negative=metadata.get("negative"),
        converter=whole if kinds == {int} else None,
        help=help,
        show_default=shown,
    )
    if typing.get_origin(hint) is dict:
        value = typing.get_args(hint)[1]
        value = str if typing.get_origin(value) is dict else value  # a table in words
        item = Annotated[value, LITERAL] if value == Option else value
        return Annotated[dict[str, item], parameter], dataclasses.field(default_factory=dict)
    return Annotated[(str if typing.get_origin(hint) is tuple else hint) | None, parameter], None


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


if TYPE_CHECKING:
    BoardOptions = FigureOptions = Any
else:
    BoardOptions = Annotated[open_options(Board) | None, Parameter(name="*")]
    FigureOptions = Annotated[open_options(Figures) | None, Parameter(name="*")]
"""Types of the arguments of commands that have the options of `Board` and `Figures`."""
