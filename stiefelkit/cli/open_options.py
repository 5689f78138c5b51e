"""From a dataclass of options to one that can be left open field by field, with stricter numbers.

cyclopts rounds 2.5 to an integer and reads 0.9 as 1 where either kind of number may stand; here a fraction is
refused, or kept.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token

from stiefelkit.cli.words import unwrapped
from stiefelkit.training.figure import Figures
from stiefelkit.training.recipes import Option

__all__ = ["FigureOptions", "given", "literal", "open_options", "whole"]


def open_options(cls: type, filled: Callable[[str], str | None] = lambda name: None) -> type:
    """Returns a frozen dataclass with the fields and the help of `cls`, each of which may be None or empty.

    Args:
        cls: a dataclass whose fields are numbers, words, switches or dictionaries of options, with defaults.
        filled: from a field without a default to what is taken in its place, in words, when help is shown.
    """
    hints = typing.get_type_hints(cls)
    fields = [(field.name, *_opened(field, hints[field.name], filled)) for field in dataclasses.fields(cls)]
    # left to itself, make_dataclass names the module "types", whose classes cyclopts does not open
    namespace = {"__doc__": unwrapped(cls.__doc__ or ""), "__module__": __name__}
    return dataclasses.make_dataclass(cls.__name__, fields, frozen=True, namespace=namespace)


def given(options: Any) -> dict[str, Any]:
    """Returns the fields that were named, of an instance of a class made by `open_options`, or of None."""
    return {name: value for name, value in vars(options).items() if value not in (None, {})} if options else {}


def _opened(field: dataclasses.Field[Any], hint: Any, filled: Callable[[str], str | None]) -> tuple[Any, Any]:
    kinds = set(typing.get_args(hint)) - {types.NoneType} if isinstance(hint, types.UnionType) else {hint}
    default = field.default if field.default is not dataclasses.MISSING else None
    shown = Parameter(show_default=functools.partial(_shown, field.name, default, filled))
    if typing.get_origin(hint) is dict:
        value = typing.get_args(hint)[1]
        item = Annotated[value, Parameter(converter=literal)] if value == Option else value
        return Annotated[dict[str, item], shown], dataclasses.field(default_factory=dict)
    if kinds == {int}:
        return Annotated[int | None, shown, Parameter(converter=whole)], None
    return Annotated[hint | None, shown], None


def _shown(name: str, default: Any, filled: Callable[[str], str | None], _: Any) -> str | None:
    return filled(name) if default is None else str(default)


def whole(hint: Any, tokens: Sequence[Token]) -> int:
    """Reads an integer, 1e4 among them; a fraction or a word is refused."""
    try:
        return int(tokens[0].value)
    except ValueError:
        number = float(tokens[0].value)  # 1e4 is an integer, 2.5 is none
        if not number.is_integer():
            raise ValueError(f"{tokens[0].value} is no integer") from None
        return int(number)


def literal(hint: Any, tokens: Sequence[Token]) -> Any:
    """Reads a number, true, false or a word, as the option of a dictionary may be."""
    word = tokens[0].value
    readers: tuple[Callable[[str], Any], ...] = (int, float)
    for reader in readers:
        try:
            return reader(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


if TYPE_CHECKING:
    FigureOptions = Any
else:
    FigureOptions = Annotated[open_options(Figures) | None, Parameter(name="*")]
"""Type of the argument of a command that has the options of `Figures`."""
