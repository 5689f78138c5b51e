"""A linear layer that reads the Hadamard transform of its input."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit.functional import hadamard_transform


class HadamardLinear(nn.Linear):
    """Computes W H x / sqrt(n) + b, with the Hadamard matrix of `stiefelkit.init.hadamard(n, random=False)`.

    With W H^T in the place of W that is the layer as it was, whose input has no outliers where it is rounded. The
    transform is made anew for each input, in n log n.

    Args:
        in_features, out_features, bias, device, dtype: as of `torch.nn.Linear`.

    Shape:
        (*, in_features) to (*, out_features).
    """

    @classmethod
    def around(cls, layer: Any) -> "HadamardLinear":
        """Returns a layer with the weight and bias of a linear one, or of transformers' `Conv1D`, as they are."""
        is_linear = isinstance(layer, nn.Linear)
        w, b = (layer.weight if is_linear else layer.weight.mT), layer.bias
        made = cls(w.shape[1], w.shape[0], bias=b is not None, device="meta", dtype=w.dtype)
        made.weight = layer.weight if is_linear else nn.Parameter(w.detach().contiguous(), w.requires_grad)
        made.bias = b
        return made.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer."""
        return F.linear(hadamard_transform(x), self.weight, self.bias)
