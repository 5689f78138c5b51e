"""The optimizers of frames that there are, for tables of tests, and frames and gradients to try them on."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import stiefelkit as sk
from stiefelkit import init
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.testing import seeds

OPTIMIZERS: dict[str, Any] = {
    cls.__name__: cls for cls in sk.optim.available().values() if getattr(cls, "moves_frames", False)
}
STATEFUL = {name: dict(cls.examples[-1]) for name, cls in OPTIMIZERS.items()}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def frame(shape, dtype=torch.float32, seed=0):
    exact = init.haar(shape, working_dtype(dtype), seeds.generator(seed))
    return nn.Parameter(exact.to(dtype))


def gradient(shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, dtype=dtype, generator=seeds.generator(seed)) / shape[-2] ** 0.5


def group(*params, metric="canonical", **settings):
    return [{"params": list(params), "manifold": f"stiefel:{metric}", **settings}]


def excess(w):
    return orthogonality_error(w).max().item() / rounding_limit(w.shape[-1], w.dtype)


def run(optimizer, w, gradients):
    for g in gradients:
        w.grad = g.clone()
        optimizer.step()


class Shapes(TorchDispatchMode):
    """Collects the shapes of results, and how many products are made."""

    def __init__(self):
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.largest = max(self.largest, found.numel())
        self.products += "mm" in func.__name__
        return found


def descend(optimizer: Any, loss: Any, steps: int = 1) -> list[float]:
    """The values of a loss before each of some steps by its gradient."""
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values
