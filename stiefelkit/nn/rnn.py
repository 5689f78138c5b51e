"""Recurrent layers whose recurrent matrix is orthogonal or unitary, with the arguments and shapes of torch.nn.RNN."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stiefelkit.attach import orthogonal
from stiefelkit.errors import DtypeError, OptionError, ShapeError, UnknownNameError, did_you_mean
from stiefelkit.functional import BACKENDS, find_activation, scan
from stiefelkit.host import carrier_of, carriers
from stiefelkit.param import OrthogonalParam

__all__ = ["OrthogonalRNN", "OrthogonalRNNCell"]

Field = Literal["real", "complex"]


class _Recurrent(nn.Module):
    """The weights of recurrences and how `scan` takes them; one set for each suffix ("_l0", "_l0_reverse", "")."""

    frame_gradients: ClassVar[tuple[str, ...]] = ("exact", "reference")
    """Kinds of dL/dW that an optimizer may ask the carrier of W for; "reference" of complex W only."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        parametrization: str | type[OrthogonalParam],
        field: Field,
        activation: str,
        bias: bool,
        trainable_h0: bool,
        backend: str,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        name = type(self).__name__
        for key, value in (("input_size", input_size), ("hidden_size", hidden_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"{name} needs {key} >= 1, got {value!r}.")
        if field not in ("real", "complex"):
            raise OptionError(f'{name} needs field "real" or "complex", got {field!r}.')
        if not dtype.is_floating_point:
            raise DtypeError(f'{name} needs a real floating dtype (field="complex" makes W complex), got {dtype}.')
        if field == "complex" and dtype not in (torch.float32, torch.float64):
            raise DtypeError(f"{name} with complex states needs float32 or float64, got {dtype}.")
        find_activation(activation, field == "complex")
        if backend not in BACKENDS:
            raise UnknownNameError(f"{name} has no backend {backend!r}{did_you_mean(backend, BACKENDS)}")
        self.input_size, self.hidden_size = input_size, hidden_size
        self.parametrization, self.field, self.activation = parametrization, field, activation
        self.has_bias, self.trainable_h0, self.backend, self.dtype = bias, trainable_h0, backend, dtype

    @property
    def is_complex(self) -> bool:
        """Whether states are complex."""
        return self.field == "complex"

    def _add_weights(self, suffix: str, width: int, device: torch.device | str | None, options: dict[str, Any]) -> None:
        """Registers U (Glorot-uniform), W, the bias (zero) and the first state (U(-0.01, 0.01))."""
        n, parts = self.hidden_size, 1 + self.is_complex

        def parameter(*shape: int, bound: float = 0.0) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=self.dtype).uniform_(-bound, bound))

        w = torch.zeros(n, n, device=device, dtype=self.dtype.to_complex() if self.is_complex else self.dtype)
        self.register_parameter(
            f"weight_ih{suffix}", parameter(parts * n, width, bound=(6 / (parts * n + width)) ** 0.5)
        )
        self.register_parameter(f"weight_hh{suffix}", nn.Parameter(w))
        orthogonal(self, f"weight_hh{suffix}", self.parametrization, **options)
        if self.has_bias:
            size = n if self.activation == "modrelu" else parts * n
            self.register_parameter(f"bias{suffix}", parameter(size))
        if self.trainable_h0:
            self.register_parameter(f"h0{suffix}", parameter(parts * n, bound=0.01))

    def _run(
        self,
        suffix: str,
        x: Tensor,
        h_0: Tensor | None,
        batch: int,
        batch_sizes: list[int] | None = None,
        reverse: bool = False,
        last_only: bool = False,
    ) -> tuple[Tensor | None, Tensor]:
        """Runs one recurrence over time-major or packed input; reads each of its weights once."""
        w, u = getattr(self, f"weight_hh{suffix}"), getattr(self, f"weight_ih{suffix}")
        carrier = carrier_of(self, f"weight_hh{suffix}")
        bias = getattr(self, f"bias{suffix}") if self.has_bias else None
        inside = self.activation == "modrelu"
        if h_0 is None and self.trainable_h0:
            h_0 = self._join(getattr(self, f"h0{suffix}")).expand(batch, -1)
        first = w.new_zeros(batch, self.hidden_size) if h_0 is None else h_0.to(w.dtype)
        return scan(
            x,
            w,
            first,
            u=self._join(u),
            bias=None if inside or bias is None else self._join(bias),
            activation_bias=bias if inside else None,
            activation=self.activation,
            batch_sizes=batch_sizes,
            reverse=reverse,
            backend=self.backend,
            last_only=last_only,
            gradient="exact" if carrier is None else carrier.gradient,
        )

    def _join(self, parts: Tensor) -> Tensor:
        """Turns [Re; Im], stacked in the first dimension, into a complex tensor, complex64 at least."""
        if not self.is_complex:
            return parts
        return torch.complex(*(parts if parts.dtype == torch.float64 else parts.float()).chunk(2))

    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of the real parameters, which casts change, and the complex one that goes with it."""
        real = next(p.dtype for name, p in self.named_parameters(recurse=False) if name.startswith("weight_ih"))
        return real, torch.complex128 if real == torch.float64 else torch.complex64

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_Recurrent":
        """Casts a complex W along with the real parameters; by itself it would stay, as torch's complex tensors do."""
        super()._apply(fn, recurse)
        wanted = self._dtypes()[1]
        for _, _, _, carrier in carriers(self):
            if carrier.param.is_complex and carrier.param.dtype != wanted:
                carrier._apply(lambda t: t.to(wanted) if t.is_complex() else t)
        return self

    def _check_input(self, x: Tensor, what: str = "an input") -> None:
        name = type(self).__name__.removeprefix("Parametrized")
        if not isinstance(x, Tensor):
            raise DtypeError(f"{name} needs {what} that is a tensor, got {type(x).__name__}.")
        fitting = self._dtypes()[: 1 + self.is_complex]
        if x.dtype not in fitting and not torch.is_autocast_enabled(x.device.type):
            raise DtypeError(f"{name} needs {what} of {' or '.join(map(str, fitting))}, got {x.dtype}.")

    def _check_width(self, x: Tensor) -> None:
        name = type(self).__name__.removeprefix("Parametrized")
        if x.shape[-1] != self.input_size:
            raise ShapeError(f"{name} needs an input of width {self.input_size}, got {x.shape[-1]}.")

    def extra_repr(self) -> str:
        """Sizes and choices."""
        return f"{self.input_size}, {self.hidden_size}, field={self.field!r}, activation={self.activation!r}"


class OrthogonalRNN(_Recurrent):
    r"""Multi-layer RNN h_t = act(x_t U^T + h_{t-1} W^T) with an orthogonal or unitary W.

    Arguments, shapes and parameter names are those of `torch.nn.RNN`: `weight_ih_l0` (U), `weight_hh_l0` (W, a frame),
    `bias_l0`, and `_reverse` for the second direction. With modReLU the bias stands inside the activation, as in the
    papers; with others it is added to the input projection. W is evaluated once a forward.

    With `field="complex"` states and outputs are complex, of `hidden_size` complex numbers, while every parameter is
    real: U as [Re; Im] of shape (2n, m), a trained h0 as [Re | Im] of shape (2n,), W by its coordinates.

    Args:
        input_size: width m of the input.
        hidden_size: width n of the state.
        num_layers: how many layers are stacked.
        parametrization: of W, a registered name or a class.
        field: "real" (orthogonal W) or "complex" (unitary W).
        activation: a name in `stiefelkit.functional.ACTIVATIONS`, or "leaky_relu(0.2)" for a slope; complex: "modrelu"
            or "identity".
        bias: whether there is a bias; modReLU without one is the identity, and the net linear.
        batch_first: whether input and output are (B, T, .) rather than (T, B, .).
        dropout: probability with which outputs between layers are zeroed in training.
        bidirectional: whether a second direction runs from the end.
        trainable_h0: whether the first state is a parameter, initially U(-0.01, 0.01), used when no h_0 is given.
        backend: what runs the recurrence, as in `stiefelkit.functional.scan`.
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
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__(
            input_size,
            hidden_size,
            parametrization=parametrization,
            field=field,
            activation=activation,
            bias=bias,
            trainable_h0=trainable_h0,
            backend=backend,
            dtype=dtype,
        )
        if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
            raise OptionError(f"OrthogonalRNN needs num_layers >= 1, got {num_layers!r}.")
        if not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
            raise OptionError(f"OrthogonalRNN needs dropout between 0 and 1, got {dropout!r}.")
        self.num_layers, self.batch_first, self.dropout = num_layers, batch_first, dropout
        self.bidirectional = bidirectional
        self._directions = ("", "_reverse") if bidirectional else ("",)
        for layer in range(num_layers):
            width = hidden_size * len(self._directions) if layer else input_size
            for direction in self._directions:
                self._add_weights(f"_l{layer}{direction}", width, device, options)

    def forward(
        self, input: Tensor | PackedSequence, h_0: Tensor | None = None, *, last_only: bool = False
    ) -> tuple[Any, Tensor]:
        """Runs the net over a batch of sequences.

        Args:
            input: the sequences.
            h_0: first states.
            last_only: return None for the outputs. The top layer then keeps about T^(1/2) states for the backward
                pass instead of T, and takes a quarter to a third more time.
        """
        if h_0 is not None:
            self._check_input(h_0, "an h_0")
        if isinstance(input, PackedSequence):
            self._check_input(input.data)
            sizes = input.batch_sizes.tolist()
            self._check_state(h_0, sizes[0])
            if h_0 is not None and input.sorted_indices is not None:
                h_0 = h_0.index_select(1, input.sorted_indices)
            out, h_n = self._layers(input.data, h_0, sizes[0], sizes, last_only)
            if input.unsorted_indices is not None:
                h_n = h_n.index_select(1, input.unsorted_indices)
            if out is None:
                return None, h_n
            return PackedSequence(out, input.batch_sizes, input.sorted_indices, input.unsorted_indices), h_n
        self._check_input(input)
        if input.dim() not in (2, 3):
            raise ShapeError(f"OrthogonalRNN needs an input of 2 or 3 dimensions, got shape {tuple(input.shape)}.")
        batched = input.dim() == 3
        if h_0 is not None and h_0.dim() != input.dim():
            raise ShapeError(
                f"OrthogonalRNN needs h_0 of {input.dim()} dimensions, as the input has, got {h_0.dim()} dimensions."
            )
        first_is_batch = batched and self.batch_first
        x = input.transpose(0, 1) if first_is_batch else input if batched else input.unsqueeze(1)
        out, h_n = self._layers(x, h_0 if batched or h_0 is None else h_0.unsqueeze(1), x.shape[1], None, last_only)
        if not batched:
            return None if out is None else out.squeeze(1), h_n.squeeze(1)
        if out is None:
            return None, h_n
        return (out.transpose(0, 1) if first_is_batch else out), h_n

    def _layers(
        self, x: Tensor, h_0: Tensor | None, batch: int, sizes: list[int] | None, last_only: bool
    ) -> tuple[Tensor | None, Tensor]:
        self._check_width(x)
        if sizes is None and x.shape[0] == 0:
            raise ShapeError("OrthogonalRNN needs a sequence of one step or more, got none.")
        self._check_state(h_0, batch)
        first = iter([None] * self.num_layers * len(self._directions) if h_0 is None else h_0)
        last = []
        for layer in range(self.num_layers):
            outputs, is_top = [], layer == self.num_layers - 1
            for direction in self._directions:
                reverse = direction == "_reverse"
                out, h_n = self._run(
                    f"_l{layer}{direction}", x, next(first), batch, sizes, reverse, last_only and is_top
                )
                outputs.append(out)
                last.append(h_n)
            if last_only and is_top:
                return None, torch.stack(last)
            x = torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
            if self.dropout and self.training and not is_top:
                # One real mask for both parts of a complex output.
                x = x * F.dropout(torch.ones_like(x.real), self.dropout)
        return x, torch.stack(last)

    def _check_state(self, h_0: Tensor | None, batch: int) -> None:
        shape = (self.num_layers * len(self._directions), batch, self.hidden_size)
        if h_0 is not None and tuple(h_0.shape) != shape:
            raise ShapeError(f"OrthogonalRNN needs h_0 of shape {shape}, got {tuple(h_0.shape)}.")


class OrthogonalRNNCell(_Recurrent):
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
        backend: what runs the step, as in `stiefelkit.functional.scan`.
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
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__(
            input_size,
            hidden_size,
            parametrization=parametrization,
            field=field,
            activation=activation,
            bias=bias,
            trainable_h0=trainable_h0,
            backend=backend,
            dtype=dtype,
        )
        self._add_weights("", input_size, device, options)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Returns the next state."""
        self._check_input(input)
        if hx is not None:
            self._check_input(hx, "an hx")
        if input.dim() not in (1, 2):
            raise ShapeError(f"OrthogonalRNNCell needs an input of 1 or 2 dimensions, got shape {tuple(input.shape)}.")
        self._check_width(input)
        shape = (*input.shape[:-1], self.hidden_size)
        if hx is not None and tuple(hx.shape) != shape:
            raise ShapeError(f"OrthogonalRNNCell needs hx of shape {shape}, got {tuple(hx.shape)}.")
        x = input.unsqueeze(0) if input.dim() == 2 else input.reshape(1, 1, -1)
        _, h = self._run("", x, None if hx is None else hx.reshape(-1, self.hidden_size), x.shape[1])
        return h.reshape(shape)
