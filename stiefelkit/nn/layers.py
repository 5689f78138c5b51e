"""Layers over layers of recurrences, in one direction or both, with the arguments and shapes of torch.nn.RNN."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from stiefelkit.contract.param import Parametrization
from stiefelkit.errors import ShapeError, warn_caller
from stiefelkit.nn.recurrent import Field, Recurrent
from stiefelkit.numbers import FLAG, at_least, integer

_STACK = {"num_layers": integer(1), "bidirectional": FLAG, "dropout": at_least(0, most=1)}


def check_stack(name: str, **stack: Any) -> dict[str, Any]:
    """Returns how layers are stacked, with Python's numbers; raises OptionError unless they can be."""
    return {key: _STACK[key].require(name, key, value) for key, value in stack.items()}


def check_dropout(name: str, num_layers: int, dropout: float) -> None:
    """Warns, as torch does, of a dropout that does nothing."""
    if dropout and num_layers == 1:
        warn_caller(
            f"{name} has dropout={dropout:g} and one layer: dropout acts between layers, so that nothing is dropped."
        )


class Layers(Recurrent, ABC):
    """A recurrent net of several layers; a subclass says in `_run` how one layer runs in one direction.

    Arguments, shapes and errors are those of `OrthogonalRNN`.
    """

    matrices: ClassVar[tuple[str, ...]] = ("weight_ih", "weight_hh")
    """Names of the weights of a layer and direction, without their suffix."""
    biases: ClassVar[tuple[str, ...]] = ("bias",)
    """Names of its biases."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str | None = None,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        parametrization: Parametrization | None = "cayley",
        field: Field = "real",
        activation: str | None = None,
        trainable_h0: bool = False,
        backend: str = "auto",
        factored: bool | None = None,
        **options: Any,
    ):
        recurrence = parametrization, field, activation, nonlinearity, bias, trainable_h0, backend, factored, dtype
        super().__init__(input_size, hidden_size, *recurrence, options)
        self.batch_first = FLAG.require(self._name, "batch_first", batch_first)
        stack = check_stack(self._name, num_layers=num_layers, bidirectional=bidirectional, dropout=dropout)
        self.num_layers, self.bidirectional, self.dropout = stack.values()
        check_dropout(self._name, self.num_layers, self.dropout)
        self._directions = ("", "_reverse")[: 1 + self.bidirectional]
        for layer in range(self.num_layers):
            width = self.hidden_size * len(self._directions) if layer else self.input_size
            for direction in self._directions:
                self._add_weights(f"_l{layer}{direction}", width, device, options)

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None, *, last_only: bool = False
    ) -> tuple[Any, Tensor]:
        """Runs the net over a batch of sequences.

        Args:
            input: the sequences, (T, B, m), or (B, T, m) with batch_first.
            hx: first states (layers * directions, B, n).
            last_only: return None for the outputs. The top layer then keeps about :math:`√T` states for the backward
                pass instead of T, and takes about 1.4 times the time.
        """
        last_only = FLAG.require(self._name, "last_only", last_only)
        if hx is not None:
            self._check_input(hx, "an hx")
        if isinstance(input, PackedSequence):
            self._check_input(input.data)
            sizes = input.batch_sizes.tolist()
            self._check_state(hx, sizes[0])
            if hx is not None and input.sorted_indices is not None:
                hx = hx.index_select(1, input.sorted_indices)
            out, h_n = self._layers(input.data, hx, sizes[0], sizes, last_only)
            if input.unsorted_indices is not None:
                h_n = h_n.index_select(1, input.unsorted_indices)
            return None if out is None else input._replace(data=out), h_n
        self._check_input(input)
        if input.dim() not in (2, 3):
            raise ShapeError(f"{self._name} needs an input of 2 or 3 dimensions, got shape {tuple(input.shape)}.")
        batched = input.dim() == 3
        if hx is not None and hx.dim() != input.dim():
            raise ShapeError(
                f"{self._name} needs hx of {input.dim()} dimensions, as the input has, got {hx.dim()} dimensions."
            )
        first_is_batch = batched and self.batch_first
        x = input.transpose(0, 1) if first_is_batch else input if batched else input.unsqueeze(1)
        out, h_n = self._layers(x, hx if batched or hx is None else hx.unsqueeze(1), x.shape[1], None, last_only)
        if out is not None:
            out = out.transpose(0, 1) if first_is_batch else out if batched else out.squeeze(1)
        return out, h_n if batched else h_n.squeeze(1)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights of each layer and direction, [U, W, bias], in the order of their states.

        As `torch.nn.RNN.all_weights`, with one bias, or none without `bias`. An orthogonal W is worked out anew.
        """
        names = (*self.matrices, *(self.biases if self.has_bias else ()))
        return [[getattr(self, f"{name}{suffix}") for name in names] for suffix in self._suffixes]

    def flatten_parameters(self) -> None:
        """Does nothing, and is here for code that calls it on `torch.nn.RNN`: there is no cuDNN buffer to lay out."""

    @abstractmethod
    def _run(self, suffix: str, x: Tensor, h0: Tensor | None, batch: int, **steps: Any) -> tuple[Tensor | None, Tensor]:
        """Runs one layer in one direction over time-major or packed input; reads each of its weights once.

        Args:
            suffix: that of the weights' names.
            x: (T, B, width), or packed rows.
            h0: first states (B, n); None for the trained ones or zero.
            batch: B.
            **steps: `batch_sizes`, `reverse` and `last_only`, as `stiefelkit.scan.scan` takes them.
        """

    def _layers(
        self, x: Tensor, hx: Tensor | None, batch: int, sizes: list[int] | None, last_only: bool
    ) -> tuple[Tensor | None, Tensor]:
        self._check_width(x)
        if sizes is None and x.shape[0] == 0:
            raise ShapeError(f"{self._name} needs a sequence of one step or more, got none.")
        self._check_state(hx, batch)
        first = iter([None] * self.num_layers * len(self._directions) if hx is None else hx)
        last = []
        for layer in range(self.num_layers):
            outputs, is_top = [], layer == self.num_layers - 1
            for direction in self._directions:
                steps = {"batch_sizes": sizes, "reverse": bool(direction), "last_only": last_only and is_top}
                out, h_n = self._run(f"_l{layer}{direction}", x, next(first), batch, **steps)
                outputs.append(out)
                last.append(h_n)
            if last_only and is_top:
                return None, torch.stack(last)
            x = torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
            if self.dropout and self.training and not is_top:
                # One real mask for both parts of a complex output.
                x = x * F.dropout(torch.ones_like(x.real), self.dropout)
        return x, torch.stack(last)

    def _check_state(self, hx: Tensor | None, batch: int) -> None:
        shape = (self.num_layers * len(self._directions), batch, self.hidden_size)
        if hx is not None and tuple(hx.shape) != shape:
            raise ShapeError(
                f"{self._name} needs hx of shape {shape} (batch_first={self.batch_first}), got {tuple(hx.shape)}."
            )
