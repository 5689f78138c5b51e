"""Draws that are always the same, and adapters that are moved away from the identity by them."""

from typing import Any

import torch
from torch import Tensor

from stiefelkit.testing import seeds


def drawn(*shape: int, key: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeds.generator(key))


@torch.no_grad()
def moved(model: Any, name: str = "default", key: int = 1) -> Any:
    """Moves the adapters of a name away from the identity."""
    for k, adapter in enumerate(m for m in model.modules() if getattr(m, "name", None) == name):
        for path, p in adapter.named_parameters():
            if not path.startswith("layer."):
                p.add_(0.3 * drawn(*p.shape, key=key + k))
    return model


def turned(model: Any, scale: float = 0.3) -> Any:
    """Moves each rotation of a model away from the identity."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "rotation" in name:
                p.copy_(scale * drawn(*p.shape, key=len(name)))
    return model
