"""Orthogonal and unitary weights for PyTorch: interchangeable parametrizations behind one interface."""

import importlib
from typing import TYPE_CHECKING, Any

from stiefelkit import adoption, errors, functional, init, metrics, models, nn, optim, parametrizations, testing
from stiefelkit._version import __version__
from stiefelkit.attach import (
    Drift,
    assign_,
    available,
    bake,
    coordinates,
    drift,
    orthogonal,
    rebase_,
    register,
    reset_,
)
from stiefelkit.carrier import CoordinateList
from stiefelkit.distributed import fully_shard_coordinates
from stiefelkit.errors import StiefelkitError
from stiefelkit.host import check_state_dict
from stiefelkit.param import OrthogonalParam, Traits

if TYPE_CHECKING:
    from stiefelkit import manifolds

__all__ = [
    "CoordinateList",
    "Drift",
    "OrthogonalParam",
    "StiefelkitError",
    "Traits",
    "__version__",
    "assign_",
    "available",
    "bake",
    "check_state_dict",
    "coordinates",
    "drift",
    "errors",
    "fully_shard_coordinates",
    "functional",
    "init",
    "manifolds",
    "metrics",
    "models",
    "nn",
    "optim",
    "orthogonal",
    "parametrizations",
    "rebase_",
    "register",
    "reset_",
    "testing",
]


def __getattr__(name: str) -> Any:
    # geoopt, under `manifolds`, takes half as long to import as torch.
    if name == "manifolds":
        return importlib.import_module("stiefelkit.manifolds")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


adoption.install()
