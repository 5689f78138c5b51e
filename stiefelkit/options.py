"""The options of parametrizations, by name: what the constructor of a class takes beside shape, dtype and device."""

import inspect
from collections.abc import Mapping
from typing import Any

from stiefelkit.errors import OptionError, did_you_mean

__all__ = ["check_options", "option_names"]


def option_names(cls: type) -> list[str]:
    """The names of a class's options, `precision` among them."""
    parameters = inspect.signature(cls.__init__).parameters
    return [key for key in parameters if key not in ("self", "shape", "dtype", "device")]


def check_options(cls: type, options: Any) -> None:
    """Raises OptionError unless options are a mapping whose keys the class takes."""
    if not isinstance(options, Mapping):
        raise OptionError(f"{cls.__name__} needs options as a mapping, got {options!r}.")
    known = option_names(cls)
    for key in options:
        if key not in known:
            raise OptionError(f"{cls.__name__} has no option {key!r}{did_you_mean(key, known)}")
