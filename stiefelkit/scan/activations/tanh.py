"""The hyperbolic tangent."""

import torch
from torch import Tensor

from stiefelkit.scan.activations.activation import Activation, Step

__all__ = ["Tanh"]


class Tanh(Activation):
    """tanh z; the derivative is 1 - h^2."""

    kernel = "tanh"
    function = staticmethod(torch.tanh)  # type: ignore[assignment]

    def step(self, like: Tensor, bias: Tensor | None) -> Step:
        """One call."""
        return lambda z, saved: torch.tanh(z, out=z)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """1 - h^2."""
        return ((h * h).neg_().add_(1),)
