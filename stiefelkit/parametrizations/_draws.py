"""Draws of coordinates, in float64 on the generator's device."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["device_of", "gaussian", "symmetric", "uniform"]


def device_of(generator: torch.Generator | None) -> torch.device | None:
    """Where a generator draws; None, torch's default, without one."""
    return None if generator is None else generator.device


def uniform(shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Numbers uniform on [0, 1)."""
    return torch.rand(*shape, dtype=torch.float64, device=device_of(generator), generator=generator)


def symmetric(shape: Sequence[int], bound: float, generator: torch.Generator | None) -> Tensor:
    """Numbers uniform on (-bound, bound)."""
    return (2 * uniform(shape, generator) - 1) * bound


def gaussian(shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Numbers from N(0, 1)."""
    return torch.randn(*shape, dtype=torch.float64, device=device_of(generator), generator=generator)
