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
    """A linear layer and blocks, with the arguments of a recurrent layer: states are those of all blocks."""

    bidirectional = False

    def __init__(self, input_size: int, width: int, hidden_size: int, num_layers: int, dropout: float, **options: Any):
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.input = nn.Linear(input_size, width)
        blocks = (RotationBlock(width, hidden_size, dropout=dropout, **options) for _ in range(num_layers))
        self.blocks = nn.ModuleList(blocks)
        self.dropout = self.blocks[0].dropout

    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, last = self.input(x), []
        for i, block in enumerate(self.blocks):
            x, h = block(x, None if hx is None else hx[i : i + 1])
            last.append(h)
        return x, torch.cat(last)


class _Model(SequenceModel):
    """Reads what the last block gives, instead of its states."""

    def forward(self, x: Tensor, last_only: bool = False) -> Tensor:
        """Returns the outputs at every step, or at the last one."""
        features, _ = self.rnn(x)
        return self.output(features[:, -1] if last_only else features)


def rotrnn(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    width: int | None = None,
    num_layers: int = 2,
    heads: int = 1,
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
    of the state of each block, `width` that of what blocks read and write, half of it if left out. It reads one way,
    and drops, with `dropout`, within blocks.

    References:
        Biegun, Dolga, Cunningham, Barber, RotRNN: modelling long sequences with rotations, 2024.
    """
    hidden_size = whole(2).require("rotrnn", "hidden_size", hidden_size)
    num_layers = whole(1).require("rotrnn", "num_layers", num_layers)
    features: int = max(1, hidden_size // 2) if width is None else whole(1).require("rotrnn", "width", width)
    for name in ("bidirectional", "field"):
        if name in options:
            raise OptionError(f"rotrnn has real states of one direction and no option {name}.")
    blocks = _Blocks(
        input_size,
        features,
        hidden_size,
        num_layers,
        dropout,
        heads=heads,
        parametrization=parametrization,
        decay=decay,
        max_angle=max_angle,
        bias=False,
        **options,
    )
    return _Model(blocks, nn.Linear(features, output_size))
