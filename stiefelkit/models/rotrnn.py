"""RotRNN: residual blocks of linear recurrences that rotate."""

from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit.contract.param import Parametrization
from stiefelkit.errors import OptionError
from stiefelkit.models.sequence import SequenceModel
from stiefelkit.nn import RotationBlock
from stiefelkit.numbers import whole


class _Blocks(nn.Module):
    """A linear layer and blocks, with what a recurrent layer gives: outputs, and the last one with a layer in front."""

    def __init__(self, input_size: int, width: int, hidden_size: int, num_layers: int, **options: Any):
        super().__init__()
        self.input = nn.Linear(input_size, width)
        self.blocks = nn.ModuleList(RotationBlock(width, hidden_size, **options) for _ in range(num_layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.input(x)
        for block in self.blocks:
            x, _ = block(x)
        return x, x[:, -1][None]


def rotrnn(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    width: int | None = None,
    num_layers: int = 2,
    heads: int | None = None,
    parametrization: Parametrization | None = "matrix_exp",
    decay: tuple[float, float] = (0.9, 0.999),
    max_angle: float = 2 * torch.pi,
    dropout: float = 0.0,
    **options: Any,
) -> SequenceModel:
    """Builds RotRNN: blocks of a norm, h_t = g W h_{t-1} + s U x_t with W = P R(angle) P^T, and a gate.

    As in the authors' code each head has its own P = exp(A), angles from U(0, 2 pi) and a decay g = exp(-exp(q)), and
    U is scaled by s = sqrt(1 - g^2) / ||U||_F of the head. The states have no bias. Behind GELU stands a gated linear
    unit. With `parametrization=None` P is the identity: U and the layer behind the states contain it, since both are
    free, so that no function is lost, and a step takes no product n x n.

    Arguments as in `stiefelkit.models.create`, and those of `stiefelkit.nn.RotationBlock`: `hidden_size` is the width
    of the state of each block, `width` that of what blocks read and write, half of it if left out, and `heads` is a
    quarter of it, at most 32, if it is left out and divides the state.

    References:
        Biegun, Dolga, Cunningham, Barber, RotRNN: modelling long sequences with rotations, 2024.
    """
    hidden_size = whole(2).require("rotrnn", "hidden_size", hidden_size)
    num_layers = whole(1).require("rotrnn", "num_layers", num_layers)
    features: int = max(1, hidden_size // 2) if width is None else whole(1).require("rotrnn", "width", width)
    if heads is None:
        heads = next(h for h in (32, 16, 8, 4, 2, 1) if hidden_size % (4 * h) == 0 or h == 1)
    for name in ("bidirectional", "field"):
        if name in options:
            raise OptionError(f"rotrnn has real states of one direction and no option {name}.")
    blocks = _Blocks(
        input_size,
        features,
        hidden_size,
        num_layers,
        heads=heads,
        parametrization=parametrization,
        decay=decay,
        max_angle=max_angle,
        dropout=dropout,
        bias=False,
        **options,
    )
    return SequenceModel(blocks, nn.Linear(features, output_size))
