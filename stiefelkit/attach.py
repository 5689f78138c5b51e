"""Putting a parametrization on a weight, and everything one does with such a weight afterwards."""

import math
import warnings
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefelkit import registry
from stiefelkit.carrier import CoordinateList
from stiefelkit.errors import (
    DtypeError,
    ImageError,
    NonFiniteError,
    NotAFrameError,
    OptionError,
    ShapeError,
    UnknownNameError,
    did_you_mean,
)
from stiefelkit.host import attach_carrier, carrier_of, carriers
from stiefelkit.metrics import bits_lost, orthogonality_error, rounding_limit
from stiefelkit.notices import retire
from stiefelkit.param import OrthogonalParam, check_options, coarser, frame_tolerance
from stiefelkit.parametrizations.rebased import Rebased
from stiefelkit.parametrizations.viewed import VIEWS, View, Viewed

__all__ = [
    "Drift",
    "assign_",
    "available",
    "bake",
    "coordinates",
    "drift",
    "orthogonal",
    "rebase_",
    "register",
    "reset_",
    "tie",
]

M = TypeVar("M", bound=nn.Module)
Map = str | type[OrthogonalParam]


def orthogonal(
    module: M,
    name: str,
    parametrization: Map = "cayley",
    *,
    init: str | Tensor | None = None,
    view: str | None = None,
    precision: str = "exact",
    generator: torch.Generator | None = None,
    **options: Any,
) -> M:
    """Makes a weight orthogonal (unitary, if it is complex) for good, and returns the module.

    From then on `module.name` is a frame, computed from coordinates in `module.parametrizations.name`, which any
    torch optimizer trains. Create the optimizer afterwards. A wide matrix gets orthonormal rows; dimensions before
    the last two are a batch. A weight tied to another module's is untied.

    Args:
        module: the module that owns the weight.
        name: the parameter's name, "weight".
        parametrization: a registered name (`sk.available()`) or a class.
        init: None keeps a weight that is a frame, which must be in the map's image, and draws in place of any other by
            the member's default scheme (Haar) from torch's generator; a scheme ("haar", "identity", "unit_circle",
            "henaff", ...) draws; "project" takes the frame nearest to the weight; a tensor is assigned.
        view: how a convolution's kernel is read: "out_by_rest", "in_by_rest" or "per_tap".
        precision: "exact", the default, rounds once.
        generator: source of randomness for a drawn init.
        **options: the member's own (`negative=` for "cayley").

    Returns:
        The same module.

    Raises:
        UnknownNameError: no parametrization or parameter has this name.
        ShapeError: the weight is no matrix, is empty, or is a kernel without `view`.
        DtypeError: the weight is neither floating nor complex, or the member does not do its field.
        OptionError: an option is unknown or out of range, or the weight is parametrized already.
        NonFiniteError, NotAFrameError, ImageError: `init` is a tensor, or "project", that the map cannot take.
        ImageError: the weight is a frame outside the map's image, and `init` is None.

    >>> layer = orthogonal(nn.Linear(8, 4, bias=False), "weight", "cayley")
    >>> torch.dist(layer.weight @ layer.weight.mT, torch.eye(4)).item() < 1e-6
    True
    """
    weight = _find_weight(module, name)
    param = _build(parametrization, module, name, weight, view, {"precision": precision, **options})
    device, dtypes = weight.device, param.coordinate_dtypes
    blank = [torch.empty(shape, device=device, dtype=dtypes[key]) for key, shape in param.coordinates.items()]
    carrier = CoordinateList(param, blank, weight.requires_grad)
    if init is not None and not isinstance(init, Tensor) and init != "project":
        _check_scheme(param, init)
        carrier.scheme = init
    if device.type != "meta":
        _initialise(carrier, weight.detach(), init, generator)
    elif isinstance(init, Tensor) or init == "project":
        raise OptionError(f"{param.title} on the meta device needs an init scheme or None, got {init!r:.40}.")
    attach_carrier(module, name, carrier)
    return module


def assign_(module: nn.Module, name: str, weight: Tensor) -> None:
    """Sets an orthogonal weight to a given frame; the same as `module.name = weight`.

    Args:
        module: the module.
        name: the weight's name.
        weight: any frame in the map's image; checked first, copied, never aliased.

    Raises:
        ShapeError, DtypeError, NonFiniteError, NotAFrameError, ImageError: what the map cannot take; nothing changes.
    """
    _carrier(module, name).right_inverse(weight)


def tie(module: nn.Module, name: str, other: nn.Module, other_name: str) -> None:
    """Has a second module read the same orthogonal weight: one set of coordinates, whose gradients add up.

    For what one would write as `decoder.weight = encoder.weight`, as of an embedding and the layer before a softmax.
    State dicts hold the coordinates under both names, copies stay tied, and `sk.bake(model)` leaves one parameter.

    Args:
        module: the module that has the orthogonal weight.
        name: its name there.
        other: the module that shall read it as well.
        other_name: the name of the weight that it takes the place of, plain or orthogonal, of the same shape.

    Raises:
        UnknownNameError: the module has no orthogonal weight of this name, or the other no weight of its name.
        ShapeError, DtypeError: the two weights differ in shape, in dtype or in where they are.
        OptionError: the other weight has a parametrization of another kind.

    >>> encoder, decoder = nn.Embedding(9, 4), nn.Linear(4, 9)
    >>> tie(orthogonal(encoder, "weight"), "weight", decoder, "weight")
    >>> torch.equal(encoder.weight, decoder.weight)
    True
    """
    carrier = _carrier(module, name)
    if module is other and name == other_name:
        raise OptionError(f"tie needs two weights, got {carrier.weight} twice.")
    present = carrier_of(other, other_name)
    if present is carrier:
        return
    old = _find_weight(other, other_name) if present is None else present.evaluate_whole().detach()
    ours = f"{carrier.weight} of shape {carrier.param.shape}"
    if old.shape != carrier.param.shape:
        raise ShapeError(f"tie needs weights of one shape, got {ours} and {other_name!r} of {tuple(old.shape)}.")
    device = next(iter(carrier.coordinates.values())).device
    if (old.dtype, old.device) != (carrier.param.dtype, device):
        raise DtypeError(
            f"tie needs weights of one dtype and device, got {ours}, {carrier.param.dtype} on {device}, and "
            f"{other_name!r}, {old.dtype} on {old.device}."
        )
    if present is not None:
        bake(other, other_name)
    weight, gradients = carrier.weight, carrier.gradients
    attach_carrier(other, other_name, carrier)
    if present is not None:
        retire(present.coordinates.values(), f"the coordinates of {present.weight} as they were before sk.tie", carrier)
    carrier.gradients = tuple(kind for kind in gradients if kind in carrier.gradients)
    carrier.weight = weight


def reset_(module: nn.Module, name: str, init: str | None = None, generator: torch.Generator | None = None) -> None:
    """Draws an orthogonal weight anew, also one that holds no values yet (`to_empty`).

    Args:
        module: the module.
        name: the weight's name.
        init: a scheme of the map; when None the one given to `orthogonal`, or else the default (Haar).
        generator: source of randomness; torch's default when None.

    Raises:
        OptionError: the map has no such scheme.
    """
    carrier = _carrier(module, name)
    if any(c.is_meta for c in carrier.coordinates.values()):
        raise OptionError(f"reset_ needs {name!r} on a real device, got meta; call module.to_empty(device=...) first.")
    if init is not None:
        _check_scheme(carrier.param, init)
    _draw_(carrier, init, generator)


def rebase_(module: nn.Module, name: str, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Takes the present frame of a `"rebased"` weight into its base, and its coordinates back to the identity's.

    The weight stays the same up to rounding; what changes is where the coordinates' origin is, and with it the meaning
    of an optimizer's moments.

    Args:
        module: the module.
        name: the weight's name.
        optimizer: forgets its state of these coordinates, as if they were new; without it the stale moments stay.

    Raises:
        OptionError: the weight's map is not `Rebased`, or the optimizer does not hold its coordinates.
        NonFiniteError: the weight holds NaN or infinity; nothing changes.

    >>> layer = orthogonal(nn.Linear(4, 4), "weight", "rebased", inner="matrix_exp")
    >>> rebase_(layer, "weight")
    """
    carrier = _carrier(module, name)
    param = carrier.param.inner if isinstance(carrier.param, Viewed) else carrier.param
    if not isinstance(param, Rebased):
        raise OptionError(f'rebase_ needs a weight with the map "rebased", got {param.title}.')
    held = {id(c) for group in getattr(optimizer, "param_groups", ()) for c in group["params"]}
    if optimizer is not None and not all(id(c) in held for c in carrier.coordinates.values()):
        raise OptionError(
            f"rebase_ needs an optimizer that holds the coordinates of {name!r}, got {type(optimizer).__name__}."
        )
    carrier.check_assignable()
    values, chart = param.rebased(*carrier.gathered())
    param.load_chart_(chart)
    carrier.fill_(values)
    if isinstance(optimizer, torch.optim.LBFGS):  # keeps one history for all parameters
        optimizer.state.clear()
    elif optimizer is not None:
        for c in carrier.coordinates.values():
            optimizer.state.pop(c, None)


def coordinates(module: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Returns name to parameter of an orthogonal weight's coordinates."""
    return _carrier(module, name).coordinates


def bake(module: M, name: str | None = None) -> M:
    """Replaces an orthogonal weight by one plain parameter that holds the frame, and returns the module.

    Copies of the module are not touched. The parameter is a new one: optimizers must be told.

    Args:
        module: the module.
        name: the weight's name; None bakes every orthogonal weight of the module and of those inside it, as
            `torch.onnx.export` needs.

    Raises:
        UnknownNameError: the module has no orthogonal weight of this name.

    >>> drift(bake(orthogonal(nn.Linear(4, 4), "weight")))
    {}
    """
    if name is not None:
        _bake(module, name, _carrier(module, name), None)
        return module
    baked: dict[int, nn.Parameter] = {}
    for _, host, own, carrier in list(carriers(module)):
        baked[id(carrier)] = _bake(host, own, carrier, baked.get(id(carrier)))
    return module


@dataclass(frozen=True)
class Drift:
    """How far a weight is from being a frame.

    Attributes:
        error: ||W^H W - I||_F in float64, the worst of a batch.
        limit: what rounding an exact frame to the weight's dtype costs, `stiefelkit.metrics.rounding_limit`.
        bits_lost: binary digits lost beyond that, log2(max(error / limit, 1)).
    """

    error: float
    limit: float
    bits_lost: float


@torch.no_grad()
def drift(model: nn.Module) -> dict[str, Drift]:
    """Measures every orthogonal weight of a model, under FSDP2 too (then on every rank).

    What is measured is the map's own frame, without parametrizations that were put on top of it.

    Returns:
        Qualified name of the weight, "rnn.weight_hh_l0", to `Drift`.

    Raises:
        NonFiniteError: a weight holds NaN or infinity.
    """
    found = {}
    for qualified, _, _, carrier in carriers(model):
        frames = carrier.param.frames(carrier.evaluate_whole())
        error = orthogonality_error(frames).max().item()
        if not math.isfinite(error):
            raise NonFiniteError(
                f"{qualified} needs finite entries, got NaN or infinity; restore it from a checkpoint."
            )
        limit = rounding_limit(frames.shape[-1], frames.dtype)
        found[qualified] = Drift(error, limit, bits_lost(error, limit))
    return found


def available() -> dict[str, type[OrthogonalParam]]:
    """Returns name to class of every parametrization: built-ins, installed plugins and registered ones.

    A plugin that does not import, or is no `OrthogonalParam`, is warned about and left out.
    """
    found = {}
    for name, cls in registry.parametrizations.available().items():
        try:
            registry.find_parametrization(cls)
        except OptionError as error:
            warnings.warn(f"The parametrization {name!r} is left out: {error}", stacklevel=2)
            continue
        found[name] = cls
    return found


def register(name: str, parametrization: type[OrthogonalParam] | str) -> None:
    """Adds a parametrization to those that `sk.orthogonal` knows by name.

    Args:
        name: the new name.
        parametrization: a class, or a dotted string "package.module:Class" that is imported at first use.

    Raises:
        OptionError: the name is taken, or the object is no subclass of `OrthogonalParam`.
    """
    if not isinstance(parametrization, str):
        registry.find_parametrization(parametrization)
    registry.parametrizations.register(name, parametrization)


def _find_weight(module: nn.Module, name: str) -> nn.Parameter:
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise DtypeError(f"orthogonal needs a torch.nn.Module, got {kind}.")
    held: Any = module._modules.get("parametrizations", ())  # not by getattr, which a wrapper may pass on
    if name in held:
        raise OptionError(
            f"orthogonal needs a plain parameter, got {kind}.{name}, parametrized already; sk.bake it first."
        )
    weight = module._parameters.get(name) if isinstance(name, str) else None
    if weight is None:
        known = [key for key, value in module._parameters.items() if value is not None]
        raise UnknownNameError(f"{kind} has no parameter {name!r}{did_you_mean(name, known)}")
    if isinstance(module, nn.RNNBase):
        raise OptionError(
            f"orthogonal needs a module that reads its weight at each forward, got {kind}, which keeps its own list of "
            "weights; use sk.nn.OrthogonalRNN, or a cell."
        )
    return weight


def _bake(module: nn.Module, name: str, carrier: CoordinateList, frame: nn.Parameter | None) -> nn.Parameter:
    """Bakes one weight, into a parameter that is given for one that is tied to it, and returns the parameter."""
    trains = any(c.requires_grad for c in carrier.coordinates.values())
    with torch.no_grad():
        frame = nn.Parameter(getattr(module, name).detach().clone(), trains) if frame is None else frame
    parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    delattr(module, name)
    module.register_parameter(name, frame)
    retire(carrier.coordinates.values(), f"the coordinates of {carrier.weight} as they were before sk.bake", frame)
    return frame


def _build(
    parametrization: Map, module: nn.Module, name: str, weight: Tensor, view: str | None, options: dict[str, Any]
) -> OrthogonalParam:
    cls = registry.find_parametrization(parametrization)
    convolution = isinstance(module, nn.modules.conv._ConvNd) and name == "weight"
    where = f"{cls.__name__} on {type(module).__name__}.{name}"
    if weight.dim() < 2:
        raise ShapeError(f"{where} needs a matrix or a batch of matrices, got shape {tuple(weight.shape)}.")
    if weight.numel() == 0:
        raise ShapeError(f"{where} needs at least one row and one column, got shape {tuple(weight.shape)}.")
    if convolution and view is None:
        choices = ", ".join(repr(key) for key in VIEWS if key != "matrix")
        raise ShapeError(f"{where} needs view= ({choices}) for a kernel, got shape {tuple(weight.shape)}.")
    if not (weight.is_floating_point() or weight.is_complex()):
        raise DtypeError(f"{where} needs a floating or complex weight, got {weight.dtype}.")
    transposed = convolution and bool(getattr(module, "transposed", False))
    seen = View(view or "matrix", tuple(weight.shape), out_dim=int(transposed))
    check_options(cls, options)
    reason = cls.supports(seen.frame_shape, weight.dtype, **options)
    if reason is not None:
        raise DtypeError(f"{where} needs {reason}, got shape {seen.frame_shape} and {weight.dtype}.")
    inner = cls(seen.frame_shape, dtype=weight.dtype, device=weight.device, **options)
    return inner if seen.is_plain else Viewed(inner, seen)


def _initialise(
    carrier: CoordinateList, weight: Tensor, init: str | Tensor | None, generator: torch.Generator | None
) -> None:
    if isinstance(init, Tensor):
        carrier.right_inverse(init)
    elif init == "project":
        if not torch.isfinite(weight).all():
            raise NonFiniteError('init="project" needs a finite weight, got one with NaN or infinity.')
        carrier.right_inverse(carrier.param.project(weight))
    elif init is not None:
        _draw_(carrier, init, generator)
    else:
        try:
            carrier.right_inverse(_kept(carrier.param, weight))
        except (NotAFrameError, NonFiniteError):
            _draw_(carrier, None, generator)
        except ImageError as error:
            param = carrier.param
            if _is_frame(param, weight):
                reason = str(error).removesuffix(".")
                raise ImageError(f"{reason}; init={param.schemes[0]!r} draws another in its place.") from error
            _draw_(carrier, None, generator)


def _is_frame(param: OrthogonalParam, weight: Tensor) -> bool:
    """Whether a finite weight is a frame in its own dtype, or to float32 and cast up from there."""
    frames = param.frames(weight)
    return orthogonality_error(frames).max().item() <= frame_tolerance(
        frames.shape[-1], coarser(frames.dtype, torch.float32)
    )


def _kept(param: OrthogonalParam, weight: Tensor) -> Tensor:
    """A float64 weight that is a frame to float32, cast up from there, is taken for one: its nearest."""
    if weight.dtype not in (torch.float64, torch.complex128) or not torch.isfinite(weight).all():
        return weight
    return param.project(weight) if _is_frame(param, weight) else weight


def _draw_(carrier: CoordinateList, init: str | None, generator: torch.Generator | None) -> None:
    carrier.check_assignable()
    param = carrier.param
    drawn, chart = param.initial(init or carrier.scheme or param.schemes[0], generator)
    param.load_chart_(chart)
    carrier.fill_(drawn)


def _check_scheme(param: OrthogonalParam, init: object) -> None:
    if init not in param.schemes:
        raise OptionError(f"{param.title} has no init {init!r}{did_you_mean(init, param.schemes)}")


def _carrier(module: nn.Module, name: str) -> CoordinateList:
    found = {own: carrier for _, host, own, carrier in carriers(module) if host is module}
    if name not in found:
        raise UnknownNameError(f"{type(module).__name__} has no orthogonal weight {name!r}{did_you_mean(name, found)}")
    return found[name]
