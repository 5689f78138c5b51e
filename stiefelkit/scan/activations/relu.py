"""The rectifier."""

import torch
from torch import Tensor

from stiefelkit.scan.activations.activation import Activation, Step

__all__ = ["ReLU"]


class ReLU(Activation):
    """max(z, 0); the derivative is the sign of h."""

    kernel = "relu"
    function = staticmethod(torch.relu)  # type: ignore[assignment]

    def step(self, like: Tensor, bias: Tensor | None) -> Step:
        """One call."""
        return lambda z, saved: z.clamp_min_(0)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """1 where h > 0."""
        return (h.sign(),)
