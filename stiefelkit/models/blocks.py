"""Models of residual blocks between two linear layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from stiefelkit.models.sequence import SequenceModel
from stiefelkit.nn import RotationBlock
from stiefelkit.numbers import integer


class _Blocks(nn.Module):
    """A linear layer and blocks, with the arguments of a recurrent layer: states are those of all blocks."""

    bidirectional = False

    def __init__(
        self, block: type[RotationBlock], input_size: int, width: int, hidden_size: int, count: int, **options: Any
    ):
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, count
        self.input = nn.Linear(input_size, width)
        self.blocks = nn.ModuleList(block(width, hidden_size, **options) for _ in range(count))
        self.dropout = self.blocks[0].dropout

    def forward(self, x: Any, hx: Tensor | None = None) -> tuple[Any, Tensor]:
        x, last = x._replace(data=self.input(x.data)) if isinstance(x, PackedSequence) else self.input(x), []
        for i, block in enumerate(self.blocks):
            x, h = block(x, None if hx is None else hx[i : i + 1])
            last.append(h)
        return x, torch.cat(last)


class _Model(SequenceModel):
    """Reads what the last block gives, instead of its states."""

    def _last(self, states: Any, last: Any, dims: int) -> Tensor:
        if isinstance(states, PackedSequence):
            states, lengths = pad_packed_sequence(states, batch_first=True)
            return states[torch.arange(len(lengths), device="cpu"), lengths - 1]
        return states[:, -1]


def stacked(
    name: str,
    block: type[RotationBlock],
    sizes: tuple[int, int, int],
    width: int | None,
    num_layers: int,
    **options: Any,
) -> SequenceModel:
    """Returns the model `name` of so many blocks, whose width is half of the state's if left out."""
    inputs, hidden_size, outputs = sizes
    hidden_size = integer(2).require(name, "hidden_size", hidden_size)
    num_layers = integer(1).require(name, "num_layers", num_layers)
    features: int = hidden_size // 2 if width is None else integer(1).require(name, "width", width)
    return _Model(_Blocks(block, inputs, features, hidden_size, num_layers, **options), nn.Linear(features, outputs))
