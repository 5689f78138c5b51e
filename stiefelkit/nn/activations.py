"""Activations with parameters."""

import torch
from torch import Tensor, nn

from stiefelkit.functional import modrelu
from stiefelkit.functional._activations import EPSILON
from stiefelkit.numbers import integer


class ModReLU(nn.Module):
    """modReLU with a trainable bias, real and complex: :math:`relu(|z| + b) z / |z|`, and 0 at :math:`z = 0`.

    Args:
        features: size n of the last dimension.
        epsilon: 0, or that of scuRNN's equation 5, as in `stiefelkit.functional.modrelu`.
        device: of the bias.
        dtype: of the bias, real.

    Shape:
        (*, n) to (*, n).

    >>> ModReLU(3)(torch.tensor([1.0, -2.0, 0.0]))
    tensor([ 1., -2.,  0.], grad_fn=<MulBackward0>)
    """

    def __init__(
        self,
        features: int,
        *,
        epsilon: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.epsilon: float = EPSILON.require("ModReLU", "epsilon", epsilon)
        features = integer(0).require("ModReLU", "features", features)
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))

    def forward(self, z: Tensor) -> Tensor:
        return modrelu(z, self.bias, self.epsilon)
