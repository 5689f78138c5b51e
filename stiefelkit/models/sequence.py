"""A recurrent layer and a linear read-out."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stiefelkit.errors import OptionError, ShapeError
from stiefelkit.functional import skew_size
from stiefelkit.models.gates import run
from stiefelkit.weights.find import orthogonal_weights


class SequenceModel(nn.Module):
    """Reads a sequence with a recurrent layer and maps its states to outputs; complex states enter as [Re, Im].

    Args:
        rnn: a layer with the interface of torch.nn.RNN or torch.nn.LSTM, batch first, of any depth, in one direction or
            both.
        output: linear layer on the states.
        real_part: read Re h alone of complex states.

    Shape:
        (B, T, m), the batch first, to (B, T, output_size), or to (B, output_size) with `last_only`. A PackedSequence
        gives one of the outputs at every step, or with `last_only` the output at the end of each sequence.

    Raises:
        OptionError: the layer reads (T, B, m).
        ShapeError: the last states that the layer returns are not (layers, B, n).
    """

    def __init__(self, rnn: nn.Module, output: nn.Linear, *, real_part: bool = False):
        super().__init__()
        if not getattr(rnn, "batch_first", True):
            raise OptionError("SequenceModel needs a layer with batch_first=True, got one that reads (T, B, m).")
        self.rnn = rnn
        self.output = output
        self.real_part = real_part

    def forward(self, x: Tensor | PackedSequence, last_only: bool = False) -> Any:
        """Returns the outputs at every step, or at the last one; of two directions, where each of them ends.

        With gradients all states are kept in either case, which is fastest; `model.rnn(x, last_only=True)` keeps about
        :math:`√T` of them. Without, under `torch.no_grad`, only the last, if they are many.
        """
        states, last = run(self.rnn, x, last_only)
        rows = x.data if isinstance(x, PackedSequence) else x
        if last_only:
            return self._read(self._last(states, last, 3 if isinstance(x, PackedSequence) else x.dim()), rows)
        if isinstance(states, PackedSequence):
            return states._replace(data=self._read(states.data, rows))
        return self._read(states, rows)

    def _last(self, states: Any, last: Any, dims: int) -> Tensor:
        """Returns what is read at the last step, (B, .); the layer returned `states` and `last`, which has `dims`."""
        h_n = last[0] if isinstance(last, tuple) else last
        if h_n.dim() != dims:
            raise ShapeError(
                "SequenceModel needs a layer whose last states have shape (layers, B, n) as those of torch.nn.RNN, "
                f"got {tuple(h_n.shape)} of {type(self.rnn).__name__}."
            )
        return torch.cat([*h_n[-2:]], dim=-1) if getattr(self.rnn, "bidirectional", False) else h_n[-1]

    def _read(self, states: Tensor, x: Tensor) -> Tensor:
        if states.is_complex():
            states = states.real if self.real_part else torch.cat([states.real, states.imag], dim=-1)
            states = states.to(x.real.dtype)  # no complex dtype has 16-bit parts
        return self.output(states)

    def extra_repr(self) -> str:
        """Returns which dimension is which."""
        return "(batch, time, features)"


def count_parameters(model: nn.Module) -> int:
    """Returns the number of trained real numbers in a model, as the papers count them.

    A frame that is a coordinate itself counts with the dimension of its manifold: np - p(p + 1)/2 for a real one,
    :math:`2np - p^2` for a complex one.
    """
    bound = {
        id(w.coordinate_list.coordinates[name])
        for w in orthogonal_weights(model)
        for name in w.coordinate_list.param.manifolds
    }
    return sum(_size(p, id(p) in bound) for p in model.parameters() if p.requires_grad)


def _size(p: Tensor, is_frame: bool) -> int:
    if is_frame:
        *batch, n, columns = p.shape
        return math.prod(batch) * skew_size(n, columns, p.is_complex())
    return p.numel() * (2 if p.is_complex() else 1)
