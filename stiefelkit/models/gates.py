"""torch's gated nets with recurrent blocks that are frames, one for each gate."""

from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit._torch import is_exported
from stiefelkit.contract.param import Parametrization
from stiefelkit.errors import OptionError, ShapeError
from stiefelkit.models.parts import named
from stiefelkit.nn.layers import Layers, check_dropout, check_stack
from stiefelkit.scan.onnx import exported_gates
from stiefelkit.weights.attach import orthogonal

MANY = 2**22
"""Numbers in all states of a sequence from which on it pays not to keep them: fewer are made faster than left out."""
Kind = type[nn.LSTM] | type[nn.GRU]


def gated(
    kind: Kind,
    input_size: int,
    hidden_size: int,
    parametrization: Parametrization | None,
    stack: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """Returns torch's LSTM or GRU, Glorot-uniform, with one trained bias vector a layer and direction that is zero.

    Args:
        kind: nn.LSTM or nn.GRU.
        input_size: m.
        hidden_size: n.
        parametrization: of each recurrent block; None for torch's own layer.
        stack: num_layers, bidirectional and dropout.
        options: of the parametrization.
    """
    stack = check_stack(kind.__name__, **stack)
    if parametrization is not None:
        check_dropout(kind.__name__, stack["num_layers"], stack["dropout"])
        return FrameGates(kind, input_size, hidden_size, parametrization, **stack, **options)
    if options:
        raise OptionError(f"{kind.__name__} needs a parametrization for the options {', '.join(options)}, got none.")
    rnn = kind(input_size, hidden_size, batch_first=True, **stack)
    for u, w in zip(named(rnn, "weight_ih"), named(rnn, "weight_hh"), strict=True):
        nn.init.xavier_uniform_(u)
        nn.init.xavier_uniform_(w)
    for b, second in zip(named(rnn, "bias_ih"), named(rnn, "bias_hh"), strict=True):
        nn.init.zeros_(b)
        nn.init.zeros_(second).requires_grad_(False)
    return rnn


def run(rnn: nn.Module, x: Tensor, last_only: bool = False) -> Any:
    """Runs a layer, batch first; for ONNX torch's own LSTM or GRU too so that any number of steps is written.

    With `last_only`, and where nothing is kept for a backward pass, a layer that can leaves the other states out, if
    they are many.
    """
    if last_only and isinstance(rnn, Layers) and not torch.is_grad_enabled() and not is_exported():
        if x.shape[:-1].numel() * rnn.hidden_size >= MANY:
            return rnn(x, last_only=True)
    if not is_exported() or not isinstance(rnn, nn.LSTM | nn.GRU) or any(len(layer) != 4 for layer in rnn.all_weights):
        return rnn(x)
    return _exported(rnn, rnn.all_weights, isinstance(rnn, nn.LSTM), x)


def _exported(rnn: Any, weights: Any, is_lstm: bool, x: Tensor) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
    if rnn.training and rnn.dropout:
        raise OptionError(
            "torch.onnx.export needs a net that drops nothing, got dropout in training; call eval() first."
        )
    out, h_n, c_n = exported_gates(x.transpose(0, 1), weights, is_lstm=is_lstm, directions=1 + rnn.bidirectional)
    return out.transpose(0, 1), (h_n, c_n) if is_lstm else h_n


class FrameGates(nn.Module):
    """torch's LSTM or GRU, batch first, whose n x n recurrent blocks are frames.

    The weight `weight_hh_l0` has shape (gates, n, n) instead of (gates n, n), so that one map serves all blocks; the
    kernel is torch's. There is one bias vector a layer and direction. torch's own layers keep a list of their weights
    and cannot be parametrized.

    Args:
        kind: nn.LSTM or nn.GRU.
        input_size: m.
        hidden_size: n.
        parametrization: of each block, a registered name or a class.
        num_layers: how many layers are stacked.
        bidirectional: whether a second direction runs from the end.
        dropout: probability with which outputs between layers are zeroed in training.
        **options: of the parametrization, and `init=`.
    """

    batch_first = True

    def __init__(
        self,
        kind: Kind,
        input_size: int,
        hidden_size: int,
        parametrization: Parametrization,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        **options: Any,
    ):
        super().__init__()
        self.is_lstm = kind is nn.LSTM
        gates = 4 if self.is_lstm else 3
        self.input_size, self.hidden_size = input_size, hidden_size
        self.num_layers, self.bidirectional, self.dropout = num_layers, bidirectional, dropout
        directions = ("", "_reverse") if bidirectional else ("",)
        self._suffixes = [f"_l{layer}{direction}" for layer in range(num_layers) for direction in directions]
        for suffix in self._suffixes:
            m = input_size if suffix.startswith("_l0") else hidden_size * len(directions)
            u = nn.init.xavier_uniform_(torch.empty(gates * hidden_size, m))
            self.register_parameter(f"weight_ih{suffix}", nn.Parameter(u))
            w = torch.zeros(gates, hidden_size, hidden_size)
            self.register_parameter(f"weight_hh{suffix}", nn.Parameter(w))
            self.register_parameter(f"bias_ih{suffix}", nn.Parameter(torch.zeros(gates * hidden_size)))
            orthogonal(self, f"weight_hh{suffix}", parametrization, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
        """Runs the net over (B, T, m) or (T, m); returns states and last states as torch's layers do.

        Raises:
            ShapeError: the input has other dimensions, or another width.
        """
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size:
            raise ShapeError(
                f"FrameGates needs an input (batch, time, {self.input_size}) or (time, {self.input_size}), "
                f"got {tuple(x.shape)}."
            )
        if x.dim() == 2:
            out, last = self(x[None])
            return out[0], tuple(h[:, 0] for h in last) if self.is_lstm else last[:, 0]
        zero = x.new_zeros(len(self._suffixes), x.shape[0], self.hidden_size)
        weights = []
        for suffix in self._suffixes:
            bias = getattr(self, f"bias_ih{suffix}")
            w = getattr(self, f"weight_hh{suffix}").flatten(0, 1)
            weights.append([getattr(self, f"weight_ih{suffix}"), w, bias, torch.zeros_like(bias)])
        if is_exported():
            return _exported(self, weights, self.is_lstm, x)
        flat = [w for layer in weights for w in layer]
        stack = (flat, True, self.num_layers, self.dropout, self.training, self.bidirectional, True)
        if self.is_lstm:
            out, h_n, c_n = torch.lstm(x, (zero, zero), *stack)
            return out, (h_n, c_n)
        return torch.gru(x, zero, *stack)

    def extra_repr(self) -> str:
        """Sizes and choices."""
        text = f"{self.input_size}, {self.hidden_size}, batch_first=True"
        usual = {"num_layers": 1, "dropout": 0, "bidirectional": False}
        choices = {key: getattr(self, key) for key in usual}
        return text + "".join(f", {key}={value!r}" for key, value in choices.items() if value != usual[key])
