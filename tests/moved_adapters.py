"""Draws that are always the same, and adapters that are moved away from the identity by them."""

from typing import Any

import torch
from torch import Tensor

from stiefelkit.testing import seeds


def drawn(*shape: int, key: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeds.generator(key))


def turned(model: Any, scale: float = 0.3) -> Any:
    """Moves each rotation of a model away from the identity."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "rotation" in name:
                p.copy_(scale * drawn(*p.shape, key=len(name)))
    return model
