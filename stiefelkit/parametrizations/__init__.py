"""Maps from flat coordinates to frames, one a file; `sk.parametrizations.Name` imports the file of a map."""

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stiefelkit.errors import OptionError, did_you_mean
from stiefelkit.registry import Registry

if TYPE_CHECKING:
    from stiefelkit.contract.param import OrthogonalParam, Parametrization
    from stiefelkit.contract.scaled import Scaled
    from stiefelkit.contract.view import VIEWS, View
    from stiefelkit.contract.viewed import Viewed
from stiefelkit.contract.table import registered

__all__ = ["Scaled", "VIEWS", "View", "Viewed"]


_HOMES = {"Scaled": "scaled", "VIEWS": "view", "View": "view", "Viewed": "viewed"}
"""Modules of what has no name in the table, imported when it is asked for."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        globals()[name] = value = getattr(importlib.import_module(f"stiefelkit.parametrizations.{_HOMES[name]}"), name)
        return value
    cls = None if name.startswith("_") else registered.by_class_name(name)
    if cls is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return cls
