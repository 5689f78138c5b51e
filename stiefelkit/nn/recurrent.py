"""The base of recurrent layers and cells: their weights, and layers over layers with the face of torch.nn.RNN."""

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stiefelkit._torch import class_name, is_jit_traced
from stiefelkit.contract.param import Parametrization
from stiefelkit.contract.table import find_parametrization, no_option, option_names, registered
from stiefelkit.errors import (
    DtypeError,
    OptionError,
    ShapeError,
    UnknownNameError,
    did_you_mean,
    needs,
    shown,
    warn_caller,
)
from stiefelkit.functional._arithmetic.product import is_autocast
from stiefelkit.init import draw
from stiefelkit.numbers import FLAG, at_least, integer, optional
from stiefelkit.scan import BACKENDS, Factored, find_activation
from stiefelkit.scan.dispatch import prefers_loop
from stiefelkit.tensors import coordinate_dtype, followed, keep_precision
from stiefelkit.weights.attach import orthogonal
from stiefelkit.weights.change import reset_
from stiefelkit.weights.find import coordinate_list_of
from stiefelkit.weights.modules import CoordinateParameters

Field = Literal["real", "complex"]
_STACK = {"num_layers": integer(1), "bidirectional": FLAG, "dropout": at_least(0, most=1)}


class Steps(TypedDict):
    """Arguments of `stiefelkit.scan.scan` that say in which order a layer takes the steps."""

    batch_sizes: list[int] | None
    reverse: bool
    last_only: bool


States = tuple[Tensor | None, Tensor]  # all states, or None with `last_only`, and the last ones


def require_options(cls: type, parametrization: Parametrization | None, options: dict[str, Any]) -> None:
    """Raises OptionError for what is neither an option of a layer nor one of its parametrization."""
    known = [key for key, p in inspect.signature(cls).parameters.items() if p.kind is not p.VAR_KEYWORD]
    which = " without a parametrization" if "parametrization" in known else ""
    known += ["init", "generator"] if which else []
    if parametrization is not None:
        param_class = find_parametrization(parametrization)
        known += ["init", "generator", "view", "gain", *option_names(param_class)]
        which = f" with {registered.name_of(param_class) or param_class.__name__}"
    for key in options:
        if key not in known:
            if reason := getattr(cls, "_refused", {}).get(key):
                raise OptionError(f"{cls.__name__} has no option {key!r}: {reason}.")
            names = {*known} - {"layer", "name"}  # of adapters, which are given otherwise
            raise no_option(f"{cls.__name__}{which}", key, names)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which autocast is off."""
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else contextlib.nullcontext()


def _paired(re: Tensor, im: Tensor) -> Tensor:
    """Returns the complex tensor of two parts, complex64 at least."""
    return torch.complex(*(part if part.dtype == torch.float64 else part.float() for part in (re, im)))


class Recurrent(CoordinateParameters):
    """The weights of recurrences, one set for each suffix ("_l0", "_l0_reverse", ""), and the checks of what they read.

    With the field "complex" U is [Re; Im], W complex, or [Re; Im] if it is free, and a trained first state [Re | Im].
    """

    frame: ClassVar[str] = "weight_hh"
    """Name of the orthogonal weight."""
    input_blocks: ClassVar[int] = 1
    """The number of matrices of U that stand on top of each other."""
    _refused: ClassVar[dict[str, str]] = {}
    """Options of other layers that this one does not have, and why."""
    backends: ClassVar[tuple[str, ...]] = BACKENDS
    """Names that `backend=` takes."""
    factored: bool | None = None
    """True if the recurrence takes W in factors; None to do so where that is faster."""
    _has_factors: bool = False
    batch_first: bool | None = None
    """Of layers, whether a batch is (B, T, .); a cell reads no sequence."""

    def __init_subclass__(cls) -> None:
        """Gives a class with an `__init__` its signature: that of its parent, with what it changes and refuses."""
        super().__init_subclass__()
        if "__init__" not in vars(cls):
            return
        _, *own = inspect.signature(cls.__init__).parameters.values()
        takes_all = any(p.kind is p.VAR_POSITIONAL for p in own)
        inherited = inspect.signature(cls.__mro__[1]).parameters.items()
        merged = {key: p for key, p in inherited if takes_all or p.kind >= p.KEYWORD_ONLY}
        merged |= {p.name: p for p in own if p.kind is not p.VAR_POSITIONAL}
        kept = [p for key, p in merged.items() if key not in cls._refused]
        cls.__signature__ = inspect.Signature(sorted(kept, key=attrgetter("kind")))

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str | None = None,
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
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        name = self._name
        self.input_size = integer(1).require(name, "input_size", input_size)
        self.hidden_size = hidden_size = integer(1).require(name, "hidden_size", hidden_size)
        self.has_bias = FLAG.require(name, "bias", bias)
        self.trainable_h0 = FLAG.require(name, "trainable_h0", trainable_h0)
        needs(field in ("real", "complex"), OptionError, name, 'field "real" or "complex"', shown(field))
        is_complex = field == "complex"
        needs(dtype.is_floating_point, DtypeError, name, 'a real dtype (field="complex" makes W complex)', str(dtype))
        is_wide = not is_complex or dtype in (torch.float32, torch.float64)
        needs(is_wide, DtypeError, f"{name} with complex states", "float32 or float64", str(dtype))
        is_one = activation is None or nonlinearity is None
        needs(is_one, OptionError, name, "one of activation= and nonlinearity=, names of one option", "both")
        activation = next((name for name in (activation, nonlinearity) if name is not None), "modrelu")
        fits = is_complex or hidden_size % 2 == 0 or not find_activation(activation, is_complex).is_paired
        needs(fits, OptionError, name, f'an even hidden_size with activation="{activation}"', hidden_size)
        if backend not in self.backends:
            raise UnknownNameError(f"{name} has no backend {shown(backend)}{did_you_mean(backend, self.backends)}")
        self.factored = optional(FLAG).require(name, "factored", factored)
        takes_factors = not factored or backend in ("auto", "inplace")
        needs(takes_factors, OptionError, name, 'backend "auto" or "inplace" with factored=True', backend)
        require_options(type(self), parametrization, options)
        self.parametrization, self.field, self.activation = parametrization, field, activation
        self.backend, self.dtype = backend, dtype
        self._suffixes: list[str] = []
        self._init: str | None = None
        self._build(device, options)

    def _build(self, device: torch.device | str | None, options: dict[str, Any]) -> None:
        self._add_weights("", self.input_size, device, options)

    _name = property(class_name)

    @property
    def nonlinearity(self) -> str:
        """The activation, by torch's name for it."""
        return self.activation

    @property
    def is_complex(self) -> bool:
        """Whether states are complex."""
        return self.field == "complex"

    @property
    def _frame_shape(self) -> tuple[int, ...]:
        return self.hidden_size, self.hidden_size

    @property
    def _frame_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def _bias_inside(self) -> bool:
        return find_activation(self.activation, self.is_complex).bias_inside

    @property
    def _input_rows(self) -> int:
        return self.hidden_size * (1 + self.is_complex)

    def _read(self, name: str, suffix: str) -> Tensor:
        """Returns a weight of a layer and direction; a frame is worked out anew."""
        return getattr(self, f"{name}{suffix}")

    def _add_weights(self, suffix: str, width: int, device: torch.device | str | None, options: dict[str, Any]) -> None:
        """Registers U (Glorot-uniform), W, the bias (zero) and the first state (U(-0.01, 0.01))."""
        n, parts = self.hidden_size, 1 + self.is_complex
        self._suffixes.append(suffix)

        def parameter(*shape: int, bound: float = 0.0) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=self.dtype).uniform_(-bound, bound))

        rows = self._input_rows
        u = parameter(self.input_blocks * rows, width, bound=(6 / (rows + width)) ** 0.5)
        self.register_parameter(f"weight_ih{suffix}", u)
        self._add_frame(suffix, device, options)
        if self.has_bias:
            self.register_parameter(f"bias{suffix}", parameter(n if self._bias_inside else rows))
        if self.trainable_h0:
            self.register_parameter(f"h0{suffix}", parameter(parts * n, bound=0.01))

    def _add_frame(self, suffix: str, device: torch.device | str | None, options: dict[str, Any]) -> None:
        name = f"{self.frame}{suffix}"
        if self.parametrization is None:
            self._init = options.get("init")
            w = self._free_matrix(**options).to(device=device, dtype=self.dtype)
            self.register_parameter(name, nn.Parameter(w.contiguous()))
        else:
            dtype = self._frame_dtype.to_complex() if self.is_complex else self._frame_dtype
            self.register_parameter(name, nn.Parameter(torch.zeros(self._frame_shape, device=device, dtype=dtype)))
            orthogonal(self, name, self.parametrization, **options)
        coordinate_list = coordinate_list_of(self, name)
        self._has_factors = coordinate_list is not None and coordinate_list.param.structure is not None
        wanted = "a map with factors (givens, householder, fourier), without gain= and view=, for factored=True"
        kind = "a free W" if coordinate_list is None else coordinate_list.param.title
        needs(not self.factored or self._has_factors, OptionError, self._name, wanted, kind)

    def _free_matrix(self, init: str | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Draws a matrix that nothing holds orthogonal afterwards, in float64; [Re; Im] if it is complex."""
        dtype = torch.complex128 if self.is_complex else torch.float64
        w = draw("haar" if init is None else init, self._frame_shape, dtype, generator)
        return torch.cat([w.real, w.imag]) if w.is_complex() else w

    def reset_parameters(self) -> None:
        """Draws all weights anew, as the layer does when it is made; W by its scheme, a baked one as a Haar frame."""
        for suffix in self._suffixes:
            self._reset(suffix)

    @torch.no_grad()
    def _reset(self, suffix: str) -> None:
        inputs, frame = f"weight_ih{suffix}", f"{self.frame}{suffix}"
        if coordinate_list_of(self, inputs) is not None:
            reset_(self, inputs)
        else:
            u = self._read("weight_ih", suffix)
            bound = (6 / (len(u) // self.input_blocks + u.shape[1])) ** 0.5
            u.uniform_(-bound, bound)
        if coordinate_list_of(self, frame) is not None:
            reset_(self, frame)
        elif frame in self._parameters:
            w = self.get_parameter(frame)
            fresh = self._free_matrix(self._init)
            w.copy_(self._join(fresh) if w.is_complex() else fresh)
        if self.has_bias:
            self._read("bias", suffix).zero_()
        if self.trainable_h0:
            self._read("h0", suffix).uniform_(-0.01, 0.01)

    def _first(self, suffix: str, h_0: Tensor | None, batch: int, w: Tensor) -> Tensor:
        """Returns the first state: the one given, the trained one, or zero; in the dtype of W."""
        if h_0 is None and self.trainable_h0:
            # Expanded part by part: ONNX repeats no complex tensors.
            parts = [part.expand(batch, -1) for part in self._read("h0", suffix).chunk(1 + self.is_complex)]
            h_0 = _paired(*parts) if self.is_complex else parts[0]
        if h_0 is not None:
            return h_0.to(w.dtype)
        zero = w.real.new_zeros(batch, self.hidden_size)  # ONNX makes no complex ones
        return _paired(zero, zero) if self.is_complex else zero

    def _begin(
        self, suffix: str, x: Tensor, h0: Tensor | None, batch: int, batch_sizes: list[int] | None
    ) -> tuple[Tensor | Factored, Tensor, Tensor]:
        """Returns W, or its factors where the scan is faster so or `factored` says so; U; and the first state."""
        w: Tensor | Factored | None = None
        takes_factors = self._has_factors and self.factored is not False and not is_jit_traced()
        held = coordinate_list_of(self, f"{self.frame}{suffix}") if takes_factors else None
        if held is not None and (self.factored or held.param.prefers_factors(batch)):
            steps = len(x) if batch_sizes is None else len(batch_sizes)
            is_in_place = self.backend == "auto" and x.device.type == "cpu" and not prefers_loop(steps)
            w = held.factored() if is_in_place or self.backend == "inplace" else None
        w = self._join(self._read(self.frame, suffix)) if w is None else w
        u = self._join(self._read("weight_ih", suffix))
        return w, u, self._first(suffix, h0, batch, w.factors if isinstance(w, Factored) else w)

    def _join(self, parts: Tensor) -> Tensor:
        """Turns [Re; Im], stacked in the first dimension, into a complex tensor, complex64 at least."""
        return _paired(*parts.chunk(2)) if self.is_complex and not parts.is_complex() else parts

    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtype of the real parameters, which casts change, and the complex one that goes with it."""
        # U may have a parametrization, of ours or torch's, or be no parameter, as in a replica.
        first = self._suffixes[0]
        coordinate_list = coordinate_list_of(self, f"weight_ih{first}")
        real = self._read("weight_ih", first).dtype if coordinate_list is None else coordinate_list.param.dtype
        return real, torch.complex128 if real == torch.float64 else torch.complex64

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Recurrent":
        """Casts a complex W along with the real parameters; by itself it would stay, or lose its imaginary part."""
        keep = keep_precision(fn, followed(fn, self._dtypes()[0]))
        super()._apply(lambda t: keep(t) if t.is_complex() else fn(t), recurse)
        return self

    def _check_input(self, x: Tensor, what: str = "an input") -> None:
        real, paired = self._dtypes()
        # States of 16-bit layers go on in float32.
        fitting = [real, *([coordinate_dtype(real)] if what == "an hx" else []), *([paired] if self.is_complex else [])]
        if x.dtype not in fitting and not is_autocast(x.device):
            names = " or ".join(map(str, dict.fromkeys(fitting)))
            raise DtypeError(f"{self._name} needs {what} of {names}, got {x.dtype}.")

    def _check_width(self, x: Tensor) -> None:
        if x.shape[-1] != self.input_size:
            raise ShapeError(f"{self._name} needs an input of width {self.input_size}, got {x.shape[-1]}.")

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}, field={self.field!r}, activation={self.activation!r}"
        if self.batch_first is not None:
            text += f", batch_first={self.batch_first}"
        return text + other_choices(self, num_layers=1, dropout=0, bidirectional=False, backend="auto", factored=None)


def other_choices(module: nn.Module, **usual: object) -> str:
    """Returns the attributes of a module that are not as usual, for its repr."""
    found = {name: vars(module).get(name, value) for name, value in usual.items()}
    return "".join(f", {name}={value!r}" for name, value in found.items() if value != usual[name])


def check_stack(name: str, **stack: Any) -> dict[str, Any]:
    """Returns how layers are stacked, with Python's numbers; raises OptionError unless they can be."""
    return {key: _STACK[key].require(name, key, value) for key, value in stack.items()}


def check_dropout(name: str, num_layers: int, dropout: float) -> None:
    """Warns, as torch does, of a dropout that does nothing."""
    if dropout and num_layers == 1:
        which = f"{name} has dropout={dropout:g} and one layer"
        warn_caller(f"{which}: dropout acts between layers, so that nothing is dropped.")


class Layers(Recurrent, ABC):
    """A recurrent net of several layers with the face of `OrthogonalRNN`; `_run` says how one layer runs one way."""

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
        **options: Any,
    ):
        self.batch_first = FLAG.require(self._name, "batch_first", batch_first)
        stack = check_stack(self._name, num_layers=num_layers, bidirectional=bidirectional, dropout=dropout)
        self.num_layers, self.bidirectional, self.dropout = stack.values()
        self._directions = ("", "_reverse")[: 1 + self.bidirectional]
        super().__init__(input_size, hidden_size, bias, nonlinearity, device, dtype, **options)
        check_dropout(self._name, self.num_layers, self.dropout)

    def _build(self, device: torch.device | str | None, options: dict[str, Any]) -> None:
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
                pass instead of T, and takes about 1.4 times the time, where its scan can.
        """
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
            raise ShapeError(f"{self._name} needs hx of {input.dim()} dimensions, as the input has, got {hx.dim()}.")
        first_is_batch = batched and self.batch_first
        x = input.transpose(0, 1) if first_is_batch else input if batched else input.unsqueeze(1)
        out, h_n = self._layers(x, hx if batched or hx is None else hx.unsqueeze(1), x.shape[1], None, last_only)
        if out is not None:
            out = out.transpose(0, 1) if first_is_batch else out if batched else out.squeeze(1)
        return out, h_n if batched else h_n.squeeze(1)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights of each layer and direction, as `torch.nn.RNN.all_weights`: [U, W, bias], one bias at most."""
        names = (*self.matrices, *(self.biases if self.has_bias else ()))
        return [[self._read(name, suffix) for name in names] for suffix in self._suffixes]

    def flatten_parameters(self) -> None:
        """Does nothing, and is here for code that calls it on `torch.nn.RNN`: there is no cuDNN buffer to lay out."""

    @abstractmethod
    def _run(self, suffix: str, x: Tensor, h0: Tensor | None, batch: int, **steps: Unpack[Steps]) -> States:
        """Runs one layer in one direction from h0 (B, n) or its own first state; reads each weight once."""

    def _layers(self, x: Tensor, hx: Tensor | None, batch: int, sizes: list[int] | None, last_only: bool) -> States:
        self._check_width(x)
        if sizes is None and x.shape[0] == 0:
            raise ShapeError(f"{self._name} needs a sequence of one step or more, got none.")
        self._check_state(hx, batch)
        first = iter([None] * self.num_layers * len(self._directions) if hx is None else hx)
        last = []
        for layer in range(self.num_layers):
            outputs, is_top = [], layer == self.num_layers - 1
            for direction in self._directions:
                steps: Steps = {"batch_sizes": sizes, "reverse": bool(direction), "last_only": last_only and is_top}
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
            order = f"batch_first={self.batch_first}"
            raise ShapeError(f"{self._name} needs hx of shape {shape} ({order}), got {tuple(hx.shape)}.")


class GRULayers(Layers):
    """Layers with the positional arguments of torch.nn.GRU, among which no activation is."""

    _activation: ClassVar[str | None] = None
    _refused: ClassVar[dict[str, str]] = {"nonlinearity": "activation= names it"}

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, *args: Any, **options: Any):
        super().__init__(input_size, hidden_size, num_layers, self._activation, *args, **options)
