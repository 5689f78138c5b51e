"""Recurrent layers whose recurrent matrix is orthogonal or unitary, with the arguments and shapes of torch.nn.RNN."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stiefelkit.attach import orthogonal
from stiefelkit.errors import DtypeError, OptionError, ShapeError
from stiefelkit.functional import find_activation, scan
from stiefelkit.param import OrthogonalParam

__all__ = ["OrthogonalRNN", "OrthogonalRNNCell"]

Field = Literal["real", "complex"]


class OrthogonalRNN(nn.Module):
    r"""Multi-layer RNN h_t = act(x_t U^T + h_{t-1} W^T) with an orthogonal or unitary W.

    Arguments, shapes and parameter names are those of `torch.nn.RNN`: `weight_ih_l0` (U), `weight_hh_l0` (W, a frame),
    `bias_l0`, and `_reverse` for the second direction. With modReLU the bias stands inside the activation, as in the
    papers; with others it is added to the input projection. W is evaluated once a forward.

    With `field="complex"` states and outputs are complex, of `hidden_size` complex numbers, while every parameter is
    real: U as [Re; Im] of shape (2n, m), a trained h0 as [Re | Im] of shape (2n,), W by real coordinates.

    Args:
        input_size: width m of the input.
        hidden_size: width n of the state.
        num_layers: how many layers are stacked.
        parametrization: of W, a registered name or a class.
        field: "real" (orthogonal W) or "complex" (unitary W).
        activation: a name in `stiefelkit.functional.ACTIVATIONS`; complex: "modrelu" or "identity".
        bias: whether there is a bias.
        batch_first: whether input and output are (B, T, .) rather than (T, B, .).
        dropout: probability with which outputs between layers are zeroed in training.
        bidirectional: whether a second direction runs from the end.
        trainable_h0: whether the first state is a parameter, initially U(-0.01, 0.01), used when no h_0 is given.
        device: of the parameters.
        dtype: real dtype of the parameters; the complex field uses its complex counterpart.
        **options: options of the parametrization (`negative=`) and `init=`.

    Shape:
        input (T, B, m), (B, T, m) with batch_first, (T, m) unbatched, or a PackedSequence; h_0 (layers * directions,
        B, n); output (T, B, directions * n) and h_n like h_0.

    Raises:
        UnknownNameError, OptionError, DtypeError: as `stiefelkit.orthogonal`; ShapeError: input or h_0 does not fit.

    >>> rnn = OrthogonalRNN(3, 8)
    >>> out, h_n = rnn(torch.randn(5, 2, 3))
    >>> out.shape, h_n.shape
    (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        parametrization: str | type[OrthogonalParam] = "cayley",
        field: Field = "real",
        activation: str = "modrelu",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        trainable_h0: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        _check_sizes(input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        if not 0 <= dropout <= 1:
            raise OptionError(f"OrthogonalRNN needs dropout between 0 and 1, got {dropout}.")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.activation, self.bias, self.batch_first, self.dropout = activation, bias, batch_first, dropout
        self.bidirectional, self.field = bidirectional, field
        self.suffixes = [f"_l{k}{d}" for k in range(num_layers) for d in (["", "_reverse"] if bidirectional else [""])]
        directions = 1 + bidirectional
        for i, suffix in enumerate(self.suffixes):
            width = input_size if i < directions else hidden_size * directions
            _add_weights(
                self, suffix, width, hidden_size, field, activation, bias, trainable_h0, parametrization, options, device, dtype
            )

    def forward(
        self, input: Tensor | PackedSequence, h_0: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Runs the net over a batch of sequences."""
        if isinstance(input, PackedSequence):
            if h_0 is not None and input.sorted_indices is not None:
                h_0 = h_0.index_select(1, input.sorted_indices)
            sizes = input.batch_sizes.tolist()
            out, h_n = self._layers(input.data, h_0, sizes[0], sizes)
            if input.unsorted_indices is not None:
                h_n = h_n.index_select(1, input.unsorted_indices)
            return PackedSequence(out, input.batch_sizes, input.sorted_indices, input.unsorted_indices), h_n
        if input.dim() not in (2, 3) or 0 in input.shape:
            raise ShapeError(f"OrthogonalRNN needs a non-empty input of 2 or 3 dimensions, got shape {tuple(input.shape)}.")
        batched = input.dim() == 3
        if h_0 is not None and h_0.dim() != input.dim():
            raise ShapeError(
                f"OrthogonalRNN needs h_0 of {input.dim()} dimensions for an input of as many, got {h_0.dim()} dimensions."
            )
        batch_dim = 0 if self.batch_first else 1
        x = input.transpose(0, 1) if batched and self.batch_first else input if batched else input.unsqueeze(1)
        out, h_n = self._layers(x, h_0 if batched or h_0 is None else h_0.unsqueeze(1), x.shape[1], None)
        if not batched:
            return out.squeeze(1), h_n.squeeze(1)
        return out.transpose(0, 1) if batch_dim == 0 else out, h_n

    def _layers(self, x: Tensor, h_0: Tensor | None, batch: int, sizes: list[int] | None) -> tuple[Tensor, Tensor]:
        _check_input(self, x)
        directions = 1 + self.bidirectional
        shape = (len(self.suffixes), batch, self.hidden_size)
        if h_0 is not None and tuple(h_0.shape) != shape:
            raise ShapeError(f"OrthogonalRNN needs h_0 of shape {shape}, got {tuple(h_0.shape)}.")
        last = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(directions):
                k = layer * directions + direction
                step = _weights(self, self.suffixes[k], batch, None if h_0 is None else h_0[k])
                out, h_n = scan(x, batch_sizes=sizes, reverse=direction == 1, activation=self.activation, **step)
                outputs.append(out)
                last.append(h_n)
            x = torch.cat(outputs, dim=-1) if directions > 1 else outputs[0]
            if layer < self.num_layers - 1 and self.dropout and self.training:
                # One real mask for both parts of a complex output.
                x = x * F.dropout(torch.ones_like(x.real if x.is_complex() else x), self.dropout)
        return x, torch.stack(last)

    def extra_repr(self) -> str:
        """Sizes and choices."""
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, field={self.field!r}, activation={self.activation!r}"


class OrthogonalRNNCell(nn.Module):
    """One step of `OrthogonalRNN`, with the arguments and shapes of torch.nn.RNNCell.

    W is evaluated at each call; under `torch.nn.utils.parametrize.cached()` once for a whole loop.

    Args:
        input_size: width m of the input.
        hidden_size: width n of the state.
        parametrization: of W, a registered name or a class.
        field: "real" or "complex".
        activation: as in `OrthogonalRNN`.
        bias: whether there is a bias.
        trainable_h0: whether the state used when none is given is a parameter.
        device: of the parameters.
        dtype: real dtype of the parameters.
        **options: options of the parametrization and `init=`.

    Shape:
        input (B, m) or (m,), hx (B, n) or (n,), output like hx.

    >>> cell = OrthogonalRNNCell(3, 8, field="complex")
    >>> cell(torch.randn(2, 3)).dtype
    torch.complex64
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        parametrization: str | type[OrthogonalParam] = "cayley",
        field: Field = "real",
        activation: str = "modrelu",
        bias: bool = True,
        trainable_h0: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        _check_sizes(input_size=input_size, hidden_size=hidden_size)
        self.input_size, self.hidden_size, self.activation, self.bias = input_size, hidden_size, activation, bias
        self.field = field
        _add_weights(
            self, "", input_size, hidden_size, field, activation, bias, trainable_h0, parametrization, options, device, dtype
        )

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Returns the next state."""
        _check_input(self, input)
        if input.dim() not in (1, 2):
            raise ShapeError(f"OrthogonalRNNCell needs an input of 1 or 2 dimensions, got shape {tuple(input.shape)}.")
        x = input if input.dim() == 2 else input.unsqueeze(0)
        shape = (*input.shape[:-1], self.hidden_size)
        if hx is not None and tuple(hx.shape) != shape:
            raise ShapeError(f"OrthogonalRNNCell needs hx of shape {shape}, got {tuple(hx.shape)}.")
        step = _weights(self, "", len(x), None if hx is None else hx.reshape(len(x), -1))
        _, h = scan(x.unsqueeze(0), activation=self.activation, last_only=True, **step)
        return h if input.dim() == 2 else h.squeeze(0)

    def extra_repr(self) -> str:
        """Sizes and choices."""
        return f"{self.input_size}, {self.hidden_size}, field={self.field!r}, activation={self.activation!r}"


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise OptionError(f"An orthogonal RNN needs {name} >= 1, got {value!r}.")


def _add_weights(
    module: nn.Module,
    suffix: str,
    width: int,
    n: int,
    field: Field,
    activation: str,
    bias: bool,
    trainable_h0: bool,
    parametrization: str | type[OrthogonalParam],
    options: dict[str, Any],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """Registers U, W, the bias and the first state of one layer and direction."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if field not in ("real", "complex"):
        raise OptionError(f'An orthogonal RNN needs field "real" or "complex", got {field!r}.')
    if not dtype.is_floating_point:
        raise DtypeError(f'An orthogonal RNN needs a real floating dtype (field="complex" makes W complex), got {dtype}.')
    is_complex = field == "complex"
    find_activation(activation, is_complex)
    parts = 1 + is_complex

    def parameter(*shape: int, bound: float = 0.0) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, device=device, dtype=dtype).uniform_(-bound, bound))

    u = parameter(parts * n, width, bound=math.sqrt(6 / (parts * n + width)))
    w = torch.empty(n, n, device=device, dtype=dtype.to_complex() if is_complex else dtype).fill_(float("nan"))
    module.register_parameter(f"weight_ih{suffix}", u)
    module.register_parameter(f"weight_hh{suffix}", nn.Parameter(w))
    orthogonal(module, f"weight_hh{suffix}", parametrization, **options)
    if bias:
        module.register_parameter(f"bias{suffix}", parameter(n if activation == "modrelu" else parts * n))
    if trainable_h0:
        module.register_parameter(f"h0{suffix}", parameter(parts * n, bound=0.01))


def _weights(module: nn.Module, suffix: str, batch: int, h_0: Tensor | None) -> dict[str, Tensor | None]:
    """Reads the weights of one layer and direction, each once, as `scan` takes them."""
    is_complex = getattr(module, "field") == "complex"
    w: Tensor = getattr(module, f"weight_hh{suffix}")
    u: Tensor = getattr(module, f"weight_ih{suffix}")
    bias: Tensor | None = getattr(module, f"bias{suffix}", None)
    first: Tensor | None = getattr(module, f"h0{suffix}", None)
    inside = getattr(module, "activation") == "modrelu"
    if h_0 is None:
        h_0 = w.new_zeros(batch, w.shape[0]) if first is None else _join(first, is_complex).expand(batch, -1)
    return {
        "w": w,
        "h0": h_0.to(w.dtype),
        "u": _join(u, is_complex),
        "bias": None if inside or bias is None else _join(bias, is_complex),
        "activation_bias": bias if inside else None,
    }


def _join(parts: Tensor, is_complex: bool) -> Tensor:
    """Turns [Re; Im], stacked in the first dimension, into a complex tensor."""
    return torch.complex(*parts.chunk(2)) if is_complex else parts


def _check_input(module: nn.Module, x: Tensor) -> None:
    name, wanted = type(module).__name__, getattr(module, "input_size")
    if x.shape[-1] != wanted:
        raise ShapeError(f"{name} needs an input of width {wanted}, got {x.shape[-1]}.")
    if x.is_complex() and getattr(module, "field") == "real":
        raise DtypeError(f"{name} with a real field needs a real input, got {x.dtype}.")
