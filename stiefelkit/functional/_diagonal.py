"""The diagonal D that maps put beside their frame: fixed signs or trained phases."""

import torch
from torch import Tensor

__all__ = ["diagonal"]


def diagonal(*, signs: Tensor | None = None, phase: Tensor | None = None) -> Tensor:
    """Entries of D in float64 or complex128, from signs of any dtype or from angles in radians, shape (*, p)."""
    if phase is not None:
        theta = phase.double()
        return torch.complex(theta.cos(), theta.sin())
    assert signs is not None
    # Averaging a model's buffers can leave 0 in a sign: read it as 1, and the frame stays one.
    return signs.double().add(0.5).sign() if signs.is_floating_point() else (signs | 1).double()
