"""Maps from flat coordinates to frames, one a file; `sk.parametrizations.Name` imports the file of a map."""

from typing import Any

from stiefelkit.contract import table
from stiefelkit.contract.scaled import Scaled
from stiefelkit.contract.table import check_options, find_parametrization, option_names, rest_of
from stiefelkit.contract.view import VIEWS, View, Viewed
from stiefelkit.errors import no_attribute
from stiefelkit.weights import torch_hooks

__all__ = ["VIEWS", "Scaled", "View", "Viewed", "check_options", "find_parametrization", "option_names", "rest_of"]

torch_hooks.install()  # so that torch's own functions know our maps


def __getattr__(name: str) -> Any:
    cls = None if name.startswith("_") else table.registered.by_class_name(name)
    if cls is None:
        raise no_attribute(__name__, name)
    return cls


def __dir__() -> list[str]:
    return sorted({*__all__, *table.registered.class_names()})
