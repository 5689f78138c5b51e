"""The leaky rectifier."""

import torch
from torch import Tensor

from stiefelkit.functional import leaky_relu
from stiefelkit.scan.activations.activation import Activation, Step

__all__ = ["LeakyReLU"]


class LeakyReLU(Activation):
    """Z where it is positive, else slope z; the sign of z is that of h."""

    kernel = "leaky_relu"
    default_slope = 0.1

    def function(self, z: Tensor) -> Tensor:
        """With this slope."""
        return leaky_relu(z, self.slope)

    def step(self, like: Tensor, bias: Tensor | None) -> Step:
        """One call."""
        return lambda z, saved: torch.nn.functional.leaky_relu_(z, self.slope)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """1 where h > 0, else the slope."""
        return (torch.where(h > 0, h.new_ones(()), h.new_full((), self.slope)),)
