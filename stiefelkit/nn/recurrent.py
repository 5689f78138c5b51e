"""The base of recurrent layers and cells: U, W, bias and first state, for real and complex states."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from stiefelkit._torch import class_name
from stiefelkit.contract.param import Parametrization, title
from stiefelkit.contract.protocols import prefers_factors, structure_of
from stiefelkit.contract.table import find_parametrization, no_option, option_names, registered
from stiefelkit.errors import DtypeError, OptionError, ShapeError, UnknownNameError, did_you_mean, shown
from stiefelkit.functional._arithmetic.product import is_autocast
from stiefelkit.init import draw
from stiefelkit.numbers import FLAG, integer, one_of, optional
from stiefelkit.scan import BACKENDS, Factored, find_activation
from stiefelkit.scan.dispatch import prefers_loop
from stiefelkit.weights.attach import orthogonal
from stiefelkit.weights.change import reset_
from stiefelkit.weights.coordinate_list import CoordinateList
from stiefelkit.weights.find import coordinate_list_of, orthogonal_weights

Field = Literal["real", "complex"]


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


def _paired(re: Tensor, im: Tensor) -> Tensor:
    """Returns the complex tensor of two parts, complex64 at least."""
    return torch.complex(*(part if part.dtype == torch.float64 else part.float() for part in (re, im)))


class Recurrent(nn.Module):
    """The weights of recurrences, one set for each suffix ("_l0", "_l0_reverse", ""), and the checks of what they read.

    With the field "complex" U is [Re; Im], W complex, or [Re; Im] if it is free, and a trained first state [Re | Im].
    """

    frame_gradients: ClassVar[tuple[str, ...]] = ("exact",)
    """Kinds of dL/dW that an optimizer may ask the coordinate list of W for; "half" of complex W only."""
    frame: ClassVar[str] = "weight_hh"
    """Name of the orthogonal weight."""
    free_coordinates: ClassVar[tuple[str, ...]] = ()
    """Names of further parameters that need a learning rate of their own, without weight decay."""
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

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        parametrization: Parametrization | None,
        field: Field,
        activation: str | None,
        nonlinearity: str | None,
        bias: bool,
        trainable_h0: bool,
        backend: str,
        factored: bool | None,
        dtype: torch.dtype | None,
        options: dict[str, Any],
    ):
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        name = self._name
        self.input_size = integer(1).require(name, "input_size", input_size)
        self.hidden_size = hidden_size = integer(1).require(name, "hidden_size", hidden_size)
        self.has_bias = FLAG.require(name, "bias", bias)
        self.trainable_h0 = FLAG.require(name, "trainable_h0", trainable_h0)
        if not one_of("real", "complex").holds(field):
            raise OptionError(f'{name} needs field "real" or "complex", got {shown(field)}.')
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise DtypeError(
                f'{name} needs a real floating dtype (field="complex" makes W complex), got {shown(dtype)}.'
            )
        if field == "complex" and dtype not in (torch.float32, torch.float64):
            raise DtypeError(f"{name} with complex states needs float32 or float64, got {dtype}.")
        if activation is not None and nonlinearity is not None:
            raise OptionError(
                f"{name} needs one of activation= and nonlinearity=, two names of one option, got "
                f"{shown(activation)} and {shown(nonlinearity)}."
            )
        activation = next((name for name in (activation, nonlinearity) if name is not None), "modrelu")
        if find_activation(activation, field == "complex").is_paired and field == "real" and hidden_size % 2:
            raise OptionError(f'{name} needs an even hidden_size with activation="{activation}", got {hidden_size}.')
        if not one_of(*self.backends).holds(backend):
            raise UnknownNameError(f"{name} has no backend {shown(backend)}{did_you_mean(backend, self.backends)}")
        self.factored = optional(FLAG).require(name, "factored", factored)
        if factored and backend not in ("auto", "inplace"):
            raise OptionError(f'{name} needs backend "auto" or "inplace" with factored=True, got {shown(backend)}.')
        require_options(type(self), parametrization, options)
        self.parametrization, self.field, self.activation = parametrization, field, activation
        self.backend, self.dtype = backend, dtype
        self._suffixes: list[str] = []
        self._init: Any = None

    _name = property(class_name)

    @property
    def nonlinearity(self) -> str:
        """The activation, by torch's name for it."""
        return self.activation

    @property
    def is_complex(self) -> bool:
        """True if states are complex."""
        return self.field == "complex"

    @property
    def _frame_shape(self) -> tuple[int, ...]:
        return self.hidden_size, self.hidden_size

    @property
    def _bias_inside(self) -> bool:
        return find_activation(self.activation, self.is_complex).bias_inside

    def _add_weights(self, suffix: str, width: int, device: torch.device | str | None, options: dict[str, Any]) -> None:
        """Registers U (Glorot-uniform), W, the bias (zero) and the first state (U(-0.01, 0.01))."""
        n, parts = self.hidden_size, 1 + self.is_complex
        self._suffixes.append(suffix)

        def parameter(*shape: int, bound: float = 0.0) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=self.dtype).uniform_(-bound, bound))

        u = parameter(self.input_blocks * parts * n, width, bound=(6 / (parts * n + width)) ** 0.5)
        self.register_parameter(f"weight_ih{suffix}", u)
        self._add_frame(suffix, device, options)
        if self.has_bias:
            self.register_parameter(f"bias{suffix}", parameter(n if self._bias_inside else parts * n))
        if self.trainable_h0:
            self.register_parameter(f"h0{suffix}", parameter(parts * n, bound=0.01))

    def _add_frame(self, suffix: str, device: torch.device | str | None, options: dict[str, Any]) -> None:
        name = f"{self.frame}{suffix}"
        if self.parametrization is None:
            self._init = options.get("init")
            w = self._free_matrix(**options).to(device=device, dtype=self.dtype)
            self.register_parameter(name, nn.Parameter(w.contiguous()))
        else:
            dtype = self.dtype.to_complex() if self.is_complex else self.dtype
            self.register_parameter(name, nn.Parameter(torch.zeros(self._frame_shape, device=device, dtype=dtype)))
            orthogonal(self, name, self.parametrization, **options)
        coordinate_list = coordinate_list_of(self, name)
        self._has_factors = coordinate_list is not None and structure_of(coordinate_list.param) is not None
        if self.factored and not self._has_factors:
            kind = "a free W" if coordinate_list is None else f"{title(coordinate_list.param)} {self.hidden_size}"
            raise OptionError(
                f"{self._name} needs a map with factors, without gain= and view=, for factored=True, such as givens, "
                f"householder and fourier, got {kind}."
            )

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
            u = getattr(self, inputs)
            bound = (6 / (len(u) // self.input_blocks + u.shape[1])) ** 0.5
            u.uniform_(-bound, bound)
        if coordinate_list_of(self, frame) is not None:
            reset_(self, frame)
        elif hasattr(self, frame):
            w = getattr(self, frame)
            fresh = self._free_matrix(self._init)
            w.copy_(self._join(fresh) if w.is_complex() else fresh)
        if self.has_bias:
            getattr(self, f"bias{suffix}").zero_()
        if self.trainable_h0:
            getattr(self, f"h0{suffix}").uniform_(-0.01, 0.01)

    def _first(self, suffix: str, h_0: Tensor | None, batch: int, w: Tensor) -> Tensor:
        """Returns the first state: the one given, the trained one, or zero; in the dtype of W."""
        if h_0 is None and self.trainable_h0:
            # Expanded part by part: ONNX repeats no complex tensors.
            parts = [part.expand(batch, -1) for part in getattr(self, f"h0{suffix}").chunk(1 + self.is_complex)]
            h_0 = _paired(*parts) if self.is_complex else parts[0]
        if h_0 is not None:
            return h_0.to(w.dtype)
        zero = w.real.new_zeros(batch, self.hidden_size)  # ONNX makes no complex ones
        return _paired(zero, zero) if self.is_complex else zero

    def _matrix(self, suffix: str, x: Tensor, batch: int, batch_sizes: list[int] | None) -> Tensor | Factored:
        """Returns W, in factors where its map has them and the scan is faster so, or as `factored` says."""
        held = coordinate_list_of(self, f"{self.frame}{suffix}") if self._has_factors else None
        factored = held.factored() if held is not None and self._takes_factors(held, x, batch, batch_sizes) else None
        return self._join(getattr(self, f"{self.frame}{suffix}")) if factored is None else factored

    def _takes_factors(self, held: CoordinateList, x: Tensor, batch: int, batch_sizes: list[int] | None) -> bool:
        """Returns whether factors are asked for, or faster, and the scan runs in the one backend that takes them."""
        if self.factored is False or (self.factored is None and not prefers_factors(held.param, batch)):
            return False
        if self.backend != "auto":
            return self.backend == "inplace"
        return x.device.type == "cpu" and not prefers_loop(len(x) if batch_sizes is None else len(batch_sizes))

    def _join(self, parts: Tensor) -> Tensor:
        """Turns [Re; Im], stacked in the first dimension, into a complex tensor, complex64 at least."""
        return _paired(*parts.chunk(2)) if self.is_complex and not parts.is_complex() else parts

    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtype of the real parameters, which casts change, and the complex one that goes with it."""
        # U may have a parametrization, of ours or torch's, or be no parameter, as in a replica.
        name = f"weight_ih{self._suffixes[0]}"
        coordinate_list = coordinate_list_of(self, name)
        real = getattr(self, name).dtype if coordinate_list is None else coordinate_list.param.dtype
        return real, torch.complex128 if real == torch.float64 else torch.complex64

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Recurrent":
        """Casts a complex W along with the real parameters; by itself it would stay, as torch's complex tensors do."""
        super()._apply(fn, recurse)
        wanted = self._dtypes()[1]
        held = [*self._parameters.values(), *(weight.coordinate_list.param for weight in orthogonal_weights(self))]
        if {w.dtype for w in held if w is not None and w.dtype.is_complex} - {wanted}:
            super()._apply(lambda t: t.to(wanted) if t.is_complex() else t, recurse)
        return self

    def _check_input(self, x: Tensor, what: str = "an input") -> None:
        if not isinstance(x, Tensor):
            raise DtypeError(f"{self._name} needs {what} that is a tensor, got {type(x).__name__}.")
        fitting = self._dtypes()[: 1 + self.is_complex]
        if x.dtype not in fitting and not is_autocast(x.device):
            raise DtypeError(f"{self._name} needs {what} of {' or '.join(map(str, fitting))}, got {x.dtype}.")

    def _check_width(self, x: Tensor) -> None:
        if x.shape[-1] != self.input_size:
            raise ShapeError(f"{self._name} needs an input of width {self.input_size}, got {x.shape[-1]}.")

    def extra_repr(self) -> str:
        """Sizes and choices."""
        text = f"{self.input_size}, {self.hidden_size}, field={self.field!r}, activation={self.activation!r}"
        if self.batch_first is not None:
            text += f", batch_first={self.batch_first}"
        usual = {"num_layers": 1, "dropout": 0, "bidirectional": False, "backend": "auto", "factored": None}
        choices = {name: getattr(self, name, value) for name, value in usual.items()}
        return text + "".join(f", {name}={value!r}" for name, value in choices.items() if value != usual[name])
