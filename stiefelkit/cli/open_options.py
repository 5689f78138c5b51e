"""From a dataclass of options to one that can be left open field by field, with stricter numbers.

cyclopts rounds 2.5 to an integer and reads 0.9 as 1 where either kind of number may stand; here a fraction is
refused, or kept.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from cyclopts import Parameter, Token

from stiefelkit.experiments.recipe import Option

__all__ = ["given", "literal", "open_options", "whole"]


def open_options(cls: type) -> type:
    """Returns a frozen dataclass with the fields and the help of `cls`, each of which may be None or empty.

    Args:
        cls: a dataclass whose fields are numbers, words, switches or dictionaries of options, with defaults.
    """
    hints = typing.get_type_hints(cls)
    fields = [(field.name, *_opened(field, hints[field.name])) for field in dataclasses.fields(cls)]
    # left to itself, make_dataclass names the module "types", whose classes cyclopts does not open
    namespace = {"__doc__": cls.__doc__, "__module__": __name__}
    return dataclasses.make_dataclass(cls.__name__, fields, frozen=True, namespace=namespace)


def given(options: Any) -> dict[str, Any]:
    """Returns the fields that were named, of an instance of a class made by `open_options`, or of None."""
    return {name: value for name, value in vars(options).items() if value not in (None, {})} if options else {}


def _opened(field: dataclasses.Field[Any], hint: Any) -> tuple[Any, Any]:
    kinds = set(typing.get_args(hint)) - {types.NoneType} if isinstance(hint, types.UnionType) else {hint}
    if typing.get_origin(hint) is dict:
        value = typing.get_args(hint)[1]
        item = Annotated[value, Parameter(converter=literal)] if value == Option else value
        return Annotated[dict[str, item], Parameter(show_default=False)], dataclasses.field(default_factory=dict)
    default = field.default if field.default is not dataclasses.MISSING else None
    shown = Parameter(show_default=functools.partial(_shown, default) if default is not None else None)
    if kinds == {int}:
        return Annotated[int | None, shown, Parameter(converter=whole)], None
    return Annotated[hint | None, shown], None


def _shown(default: Any, _: Any) -> str:
    return str(default)


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
