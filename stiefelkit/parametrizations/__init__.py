"""Maps from flat coordinates to frames, one a file; `sk.parametrizations.Name` imports the member's file."""

from typing import Any

from stiefelkit import registry
from stiefelkit.parametrizations.scaled import Scaled
from stiefelkit.parametrizations.view import VIEWS, View
from stiefelkit.parametrizations.viewed import Viewed

__all__ = ["VIEWS", "Scaled", "View", "Viewed"]


def __getattr__(name: str) -> Any:
    found = registry.parametrizations.by_class_name(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
