"""geoopt with our manifold, and if asked for our optimizers, in the place of its own, while pytest runs its tests.

`pytest -p geoopt_on_ours test_of_geoopts.py`: what a test takes from `geoopt` by these names is ours.
"""

import os
from functools import partial
from typing import Any

import geoopt
import pytest
import torch
from differences import mark_differences

import stiefelkit as sk


class CanonicalFrames(sk.manifolds.Stiefel):
    """Ours, but for random square frames, which are rotations: no search leaves a component that it begins in."""

    def random(self, *size: Any, **options: Any) -> Any:
        shape: Any = geoopt.utils.size2shape(*size)
        (*_, n, p), dtype = shape, options.get("dtype")
        is_real = not (dtype or torch.get_default_dtype()).is_complex
        return super().random(*size, **({"det": 1} if n == p and is_real else {}), **options)


class EuclideanFrames(CanonicalFrames):
    def __init__(self) -> None:
        super().__init__("euclidean")


class GeodesicFrames(EuclideanFrames):
    """geoopt's retracts along geodesics; ours has both, and one of them under each name."""


def ours(optimizer: str, params: Any, stabilize: int | None = None, **options: Any) -> Any:
    """One of our optimizers; `stabilize`, which none of them needs, stays in the groups as a word of the user's."""
    groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
    groups = groups if stabilize is None else [{**group, "stabilize": stabilize} for group in groups]
    return getattr(sk.optim, optimizer)(groups, **options)


STAND_INS = {
    "Stiefel": CanonicalFrames,
    "CanonicalStiefel": CanonicalFrames,
    "EuclideanStiefel": EuclideanFrames,
    "EuclideanStiefelExact": GeodesicFrames,
}
OPTIMIZERS = {"RiemannianAdam": partial(ours, "CayleyAdam"), "RiemannianSGD": partial(ours, "CayleySGD")}


def pytest_configure() -> None:
    """Puts ours in the place of geoopt's: as a plugin, and not whenever this file is imported."""
    for name, stand_in in STAND_INS.items():
        setattr(geoopt, name, stand_in)
        setattr(geoopt.manifolds, name, stand_in)
    if os.environ.get("STIEFELKIT_SUITES_OPTIMIZERS") == "ours":
        for name, stand_in in OPTIMIZERS.items():
            setattr(geoopt.optim, name, stand_in)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expects what differs on purpose to fail, and nothing else."""
    mark_differences("geoopt", items)
