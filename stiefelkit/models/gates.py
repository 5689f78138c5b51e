"""torch's gated nets with recurrent blocks that are frames, one for each gate."""

from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit.attach import orthogonal
from stiefelkit.errors import OptionError
from stiefelkit.models.parts import Map
from stiefelkit.param import OrthogonalParam

__all__ = ["FrameGates", "gated"]

Kind = type[nn.LSTM] | type[nn.GRU]


def gated(kind: Kind, input_size: int, hidden_size: int, parametrization: Map, options: dict[str, Any]) -> Any:
    """Returns one layer of torch's LSTM or GRU, Glorot-uniform, with one trained bias vector that is zero.

    Args:
        kind: nn.LSTM or nn.GRU.
        input_size: m.
        hidden_size: n.
        parametrization: of each recurrent block; None for torch's own layer.
        options: of the parametrization.
    """
    if parametrization is not None:
        return FrameGates(kind, input_size, hidden_size, parametrization, **options)
    if options:
        raise OptionError(f"{kind.__name__} needs a parametrization for the options {', '.join(options)}, got none.")
    rnn = kind(input_size, hidden_size, batch_first=True)
    weights = dict(rnn.named_parameters())
    nn.init.xavier_uniform_(weights["weight_ih_l0"])
    nn.init.xavier_uniform_(weights["weight_hh_l0"])
    nn.init.zeros_(weights["bias_ih_l0"])
    nn.init.zeros_(weights["bias_hh_l0"]).requires_grad_(False)
    return rnn


class FrameGates(nn.Module):
    """One layer of torch's LSTM or GRU, batch first, whose n x n recurrent blocks are frames.

    The weight `weight_hh_l0` has shape (gates, n, n) instead of (gates n, n), so that one map serves all blocks; the
    kernel is torch's. There is one bias vector. torch's own layers keep a list of their weights and cannot be
    parametrized.

    Args:
        kind: nn.LSTM or nn.GRU.
        input_size: m.
        hidden_size: n.
        parametrization: of each block, a registered name or a class.
        **options: of the parametrization, and `init=`.
    """

    def __init__(
        self,
        kind: Kind,
        input_size: int,
        hidden_size: int,
        parametrization: str | type[OrthogonalParam],
        **options: Any,
    ):
        super().__init__()
        self.is_lstm = kind is nn.LSTM
        gates = 4 if self.is_lstm else 3
        self.hidden_size = hidden_size
        self.weight_ih_l0 = nn.Parameter(torch.empty(gates * hidden_size, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(gates, hidden_size, hidden_size))
        self.bias_ih_l0 = nn.Parameter(torch.zeros(gates * hidden_size))
        nn.init.xavier_uniform_(self.weight_ih_l0)
        orthogonal(self, "weight_hh_l0", parametrization, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
        """Runs the net over (B, T, m); returns states and last states as torch's layers do."""
        zero = x.new_zeros(1, len(x), self.hidden_size)
        weights = [
            self.weight_ih_l0,
            self.weight_hh_l0.flatten(0, 1),
            self.bias_ih_l0,
            torch.zeros_like(self.bias_ih_l0),
        ]
        if self.is_lstm:
            out, h_n, c_n = torch.lstm(x, (zero, zero), weights, True, 1, 0.0, self.training, False, True)
            return out, (h_n, c_n)
        return torch.gru(x, zero, weights, True, 1, 0.0, self.training, False, True)
