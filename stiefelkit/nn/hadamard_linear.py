"""A linear layer that reads the Hadamard transform of its input."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit._torch import held_parameters
from stiefelkit.errors import CheckpointError
from stiefelkit.functional import hadamard_transform


class HadamardLinear(nn.Linear):
    """Computes :math:`W H x / √n + b`, with the Hadamard matrix of `stiefelkit.init.hadamard(n, random=False)`.

    With :math:`W H^T` in the place of W that is the layer as it was, whose input has no outliers where it is rounded.
    The transform is made anew for each input, in time :math:`O(n log n)`.

    The state has the key "hadamard" beside the weight, so that a plain layer, which would compute something else from
    the same weight, does not load it in silence; and a state without it is refused.

    Args:
        in_features, out_features, bias, device, dtype: as of `torch.nn.Linear`.

    Shape:
        (*, in_features) to (*, out_features).
    """

    hadamard: Tensor

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register_buffer("hadamard", torch.ones((), dtype=torch.uint8, device=self.weight.device))
        self.register_load_state_dict_pre_hook(_refuse_plain)

    @classmethod
    def around(cls, layer: nn.Module) -> "HadamardLinear":
        """Returns a layer with the weight and bias of a linear one, or of transformers' `Conv1D`, as they are."""
        held = held_parameters(layer)
        own, b = layer.get_parameter("weight"), held.get("bias")
        w = own if isinstance(layer, nn.Linear) else own.mT
        made = cls(w.shape[1], w.shape[0], bias=b is not None, device="meta", dtype=w.dtype)
        made.weight = own if w is own else nn.Parameter(w.detach().contiguous(), w.requires_grad)
        made.register_parameter("bias", b)
        made.hadamard = torch.ones((), dtype=torch.uint8, device=w.device)
        return made.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer."""
        return F.linear(hadamard_transform(x), self.weight, self.bias)


def _refuse_plain(layer: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Raises CheckpointError for the weight of a layer that does not transform its input."""
    if f"{prefix}weight" in state and f"{prefix}hadamard" not in state:
        raise CheckpointError(
            f"HadamardLinear needs a state of its own kind, got {prefix}weight without {prefix}hadamard, of a plain "
            "layer; load it before rotate_(online=True)."
        )
