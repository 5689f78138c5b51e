"""Layers with every built-in map, in both fields."""

from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk

DTYPES = {"real": torch.float32, "complex": torch.complex64}
MAPS = [
    pytest.param(name, dtype, id=f"{name}-{field}")
    for field, dtype in DTYPES.items()
    for name, cls in sk.available().items()
    if cls.__module__.startswith("stiefelkit.") and cls.supports((4, 4), dtype) is None
]
over_all_maps = pytest.mark.parametrize(("name", "dtype"), MAPS)


class OwnLinear(nn.Linear):
    """A layer that is none of torch's: `torch.fx` traces through it, to its weight."""


def make(name, dtype, rows=4, columns=4) -> Any:
    return sk.orthogonal(nn.Linear(columns, rows, dtype=dtype), "weight", name)


def squares(y):
    return y.abs().square().sum()


def close(a, b, tolerance=1e-5):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)
