"""Putting a parametrization on a weight, and what one does with such a weight afterwards."""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefelkit import parametrizations
from stiefelkit.coordinate_list import CoordinateList
from stiefelkit.errors import DtypeError, OptionError, ShapeError
from stiefelkit.filling import Start, check_scheme, start_
from stiefelkit.host import (
    OrthogonalWeight,
    check_loading_of,
    check_module,
    orthogonal_weights,
    share_coordinate_list,
    stop_checking,
)
from stiefelkit.names import (
    Place,
    Where,
    choose,
    find_place,
    find_weight,
    groups_of,
    is_convolution,
    is_pattern,
    notes_on,
    plain_weight,
)
from stiefelkit.notices import retire
from stiefelkit.numbers import plain, sizes
from stiefelkit.param import OrthogonalParam, Parametrization
from stiefelkit.parametrizations import check_options, find_parametrization, option_names
from stiefelkit.parametrizations._inner import SideBySide, cores
from stiefelkit.parametrizations.rebased import Rebased
from stiefelkit.parametrizations.scaled import Scaled
from stiefelkit.parametrizations.view import VIEWS, View, axis_of, views_of_blocks
from stiefelkit.parametrizations.viewed import Viewed

__all__ = ["assign_", "available", "bake", "coordinates", "orthogonal", "rebase_", "register", "reset_"]

M = TypeVar("M", bound=nn.Module)


def orthogonal(
    module: M,
    name: Where | None = None,
    parametrization: Parametrization = "cayley",
    *,
    where: Where | None = None,
    init: str | Tensor | None = None,
    view: str | None = None,
    blocks: int | Sequence[int] | None = None,
    dim: int | None = None,
    gain: float | str = 1.0,
    precision: str = "exact",
    generator: torch.Generator | None = None,
    **options: Any,
) -> M:
    """Makes weights orthogonal (unitary, if complex) for good, each the frame nearest to what it was if the map can.

    A weight that is a frame stays as it is. Any other finite one of full rank becomes the frame nearest to it, its
    polar factor, if the map's image holds that; else (the map cannot invert, or reaches too few frames; a chart fixed
    by an option, as `negative=`; a default scheme that is not Haar; zeros, dependent columns, NaN) it is drawn. Either
    is logged once, as information, by the logger "stiefelkit". For a layer fresh from torch the nearest frame is much
    like a Haar draw; `init="haar"` draws one.

    From then on `module.name` is a frame, computed from coordinates in `module.parametrizations.name`, which any
    torch optimizer trains. Create the optimizer afterwards. A wide matrix gets orthonormal rows; dimensions before
    the last two are a batch. A weight that another module holds, too, is one and the same for both only if both are
    chosen by `where`.

    Args:
        module: the module that owns the weight, or a model that contains it.
        name: the parameter's name, "weight", or, as `sk.drift` prints it, "encoder.0.weight"; or what `where` takes.
        parametrization: a registered name (`sk.available()`) or a class.
        where: in place of a name, which weights of two dimensions or more: a pattern of names, "encoder.*.weight" (*
            stands for any characters, dots too), a sequence of them, or a function (name, module that owns it) -> bool.
            Either all are made orthogonal or, on an error, none.
        init: None as above; a scheme ("haar", "identity", "unit_circle", "henaff", ...) draws; "project" takes the
            frame nearest to the weight, or says why not; a tensor is assigned.
        view: how a convolution's kernel is read: "out_by_rest", "in_by_rest" or "per_tap", with "group_" before it for
            a matrix in each group. The layer keeps norms where patches do not overlap; see `sk.metrics.lipschitz`.
        blocks: how many weights of equal size stand side by side in this one, or the size of each, as queries, keys and
            values do: each becomes a frame of its own. Wide ones get orthonormal rows. A map with an option of this
            name ("block_diagonal") keeps it to itself, as any option.
        dim: along which dimension of the matrix, or of the kernel, blocks stand: 0, rows or outputs, if left out, or 1.
        gain: the weight is this times a frame: a positive number, as of `torch.nn.init.calculate_gain`, or "learned", a
            coordinate more, "gain", 1 after a draw, and else the mean singular value of the weight, or of each block.
        precision: "exact", the default, rounds once.
        generator: source of randomness for a drawn init.
        **options: the parametrization's own (`negative=` for "cayley").

    Returns:
        The same module.

    Raises:
        UnknownNameError: no parametrization or parameter has this name, or `where` matches none.
        ShapeError: the weight is no matrix, is empty, is a kernel without `view`, or is not made of such blocks.
        DtypeError: the weight is neither floating nor complex, or the parametrization does not do its field.
        OptionError: an option is unknown or out of range, or the weight is no plain parameter.
        NonFiniteError, NotAFrameError, RankError, ImageError: `init` is a tensor, or "project", that the map cannot
            take.
        ImageError: the weight is a frame outside the map's image, and `init` is None.

    >>> layer = orthogonal(nn.Linear(8, 4, bias=False), "weight", "cayley")
    >>> torch.dist(layer.weight @ layer.weight.mT, torch.eye(4)).item() < 1e-6
    True
    """
    check_module(module, "orthogonal")
    if (name is None) == (where is None):
        raise OptionError(
            f"orthogonal needs a weight's name or where=, one of both, got name={name!r:.80} and where={where!r:.80}."
        )
    where = name if is_pattern(name) else where
    chosen = [find_place(module, name, "orthogonal")] if where is None else choose(module, where)  # type: ignore[arg-type]
    if len(chosen) > 1 and isinstance(init, Tensor):
        raise OptionError(f"orthogonal needs init= as a name for {len(chosen)} weights, got a tensor.")
    tied: dict[int, list[Place]] = {}
    for place in chosen:
        tied.setdefault(id(plain_weight(place)), []).append(place)
    cls = find_parametrization(parametrization)
    given = {key: value for key, value in (("blocks", blocks), ("dim", dim)) if value is not None}
    own = {key: value for key, value in given.items() if key in option_names(cls)}
    options, blocks, dim = options | own, None if "blocks" in own else blocks, None if "dim" in own else dim
    if dim is not None and blocks is None:
        raise OptionError(f"orthogonal needs blocks= of its own beside dim=, got dim={dim!r:.80} with {cls.__name__}.")
    runs, dim = sizes(blocks) or plain(blocks), plain(dim)
    plan = _Plan(cls, view, runs, 0 if dim is None else dim, plain(gain), {"precision": precision, **plain(options)})
    start = Start(init, generator)
    carried = [(places, _carry(plan, places, start)) for places in tied.values()]
    notes = list(notes_on(module, tied.values(), view, cls if blocks is None else None))
    for places, coordinate_list in carried:
        share_coordinate_list([(place.host, place.name) for place in places], coordinate_list)
    for place in chosen:
        if place.host is not module:
            check_loading_of(module, place.qualified)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return module


def assign_(module: nn.Module, name: str, weight: Tensor) -> None:
    """Sets an orthogonal weight to any frame in its map's image, as `module.name = weight` does.

    The frame is checked first, copied, never aliased.

    Args:
        module: the module that owns the weight, or a model that contains it.
        name: the weight's name.
        weight: of the weight's shape, (*, n, p), (*, p, n) if wide, or a kernel's; columns (rows, if wide) orthonormal.

    Raises:
        ShapeError, DtypeError, NonFiniteError, NotAFrameError, ImageError: what the map cannot take; nothing changes.
    """
    find_weight(module, name, "assign_").coordinate_list.right_inverse(weight)


def reset_(module: nn.Module, name: str, init: str | None = None, generator: torch.Generator | None = None) -> None:
    """Draws an orthogonal weight anew, also one that holds no values yet (`to_empty`), by a scheme of its map.

    When `init` is None that is the scheme given to `orthogonal`, or else the default (Haar).

    Args:
        module: the module that owns the weight, or a model that contains it.
        name: the weight's name.
        init: a scheme.
        generator: source of randomness; torch's default when None.

    Raises:
        OptionError: the map has no such scheme.
    """
    coordinate_list = find_weight(module, name, "reset_").coordinate_list
    if any(c.is_meta for c in coordinate_list.coordinates.values()):
        raise OptionError(f"reset_ needs {name!r} on a real device, got meta; call module.to_empty(device=...) first.")
    if init is not None:
        check_scheme(coordinate_list.param, init)
    coordinate_list.draw_(init, generator)


def rebase_(module: nn.Module, name: str, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Takes the present frame of a `"rebased"` weight into its base, and its coordinates back to the identity's.

    The weight stays the same up to rounding; what changes is where the coordinates' origin is, and with it the meaning
    of an optimizer's moments: one that is given forgets its state of these coordinates, as if they were new.

    Args:
        module: the module that owns the weight, or a model that contains it.
        name: the weight's name.
        optimizer: one that trains the coordinates, if its moments shall begin anew.

    Raises:
        OptionError: the weight's map is not `Rebased`, or the optimizer does not hold its coordinates.
        NonFiniteError: the weight holds NaN or infinity; nothing changes.

    >>> layer = orthogonal(nn.Linear(4, 4), "weight", "rebased", inner="matrix_exp")
    >>> rebase_(layer, "weight")
    """
    coordinate_list = find_weight(module, name, "rebase_").coordinate_list
    maps = [(start, param) for start, param in cores(coordinate_list.param) if isinstance(param, Rebased)]
    if not maps:
        raise OptionError(f'rebase_ needs a weight with the map "rebased", got {coordinate_list.param.title}.')
    held = {id(c) for group in getattr(optimizer, "param_groups", ()) for c in group["params"]}
    own = list(coordinate_list.coordinates.values())
    moved = [c for start, param in maps for c in own[start : start + len(param.coordinates)]]
    if optimizer is not None and not all(id(c) in held for c in moved):
        raise OptionError(
            f"rebase_ needs an optimizer that holds the coordinates of {name!r}, got {type(optimizer).__name__}."
        )
    coordinate_list.check_assignable()
    present = coordinate_list.gathered()  # of which gains stay
    charts = []
    for start, param in maps:
        shares = slice(start, start + len(param.coordinates))
        present[shares], chart = param.rebased(*present[shares])
        charts.append((param, chart))
    for param, chart in charts:
        param.load_chart_(chart)
    coordinate_list.fill_(present)
    if isinstance(optimizer, torch.optim.LBFGS):  # keeps one history for all parameters
        optimizer.state.clear()
    elif optimizer is not None:
        for c in moved:
            optimizer.state.pop(c, None)


def coordinates(module: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Returns name to parameter of an orthogonal weight's coordinates.

    Args:
        module: the module that owns the weight, or a model that contains it.
        name: the weight's name, "weight" or "encoder.0.weight".

    Raises:
        UnknownNameError: there is no orthogonal weight of this name.
    """
    return find_weight(module, name, "coordinates").coordinate_list.coordinates


def bake(module: M, name: str | None = None) -> M:
    """Replaces an orthogonal weight by one plain parameter that holds the frame, and returns the module.

    Copies of the module are not touched. The parameter is a new one: optimizers must be told. One of several tied
    weights comes apart from the others, with a warning.

    Args:
        module: the module.
        name: the weight's name; None bakes every orthogonal weight of the module and of those inside it, as
            `torch.onnx.export` needs.

    Raises:
        UnknownNameError: the module has no orthogonal weight of this name.

    >>> type(bake(orthogonal(nn.Linear(4, 4), "weight"))).__name__
    'Linear'
    """
    if name is not None:
        weight = find_weight(module, name, "bake")
        _bake(weight, None)
        stop_checking(module)
        tied = [w.qualified for w in orthogonal_weights(module) if w.coordinate_list is weight.coordinate_list]
        if tied:
            warnings.warn(
                f"{weight.qualified} and {', '.join(tied)} were one weight, and are no longer; without a name "
                "sk.bake makes one parameter of them.",
                stacklevel=2,
            )
        return module
    check_module(module, "bake")
    baked: dict[int, nn.Parameter] = {}
    for weight in list(orthogonal_weights(module)):
        baked[id(weight.coordinate_list)] = _bake(weight, baked.get(id(weight.coordinate_list)))
    stop_checking(module)
    return module


def available() -> dict[str, type[OrthogonalParam]]:
    """Returns name to class of every parametrization: built-ins, installed plugins and registered ones.

    A plugin that does not import, or is no `OrthogonalParam`, is warned about and left out.
    """
    return parametrizations.registered.available()


def register(name: str, parametrization: type[OrthogonalParam] | str) -> None:
    """Adds a class, or a dotted string "package.module:Class" that is imported at first use, to those known by name.

    Args:
        name: the new name.
        parametrization: the class, or the dotted string.

    Raises:
        OptionError: the name is taken, or the object is no subclass of `OrthogonalParam`.
    """
    if not isinstance(parametrization, str):
        find_parametrization(parametrization)
    parametrizations.registered.register(name, parametrization)


class _Plan(NamedTuple):
    """The map of each weight: its class, view, blocks, gain and options."""

    cls: type[OrthogonalParam]
    view: str | None
    blocks: int | Sequence[int] | None
    dim: int
    gain: float | str
    options: dict[str, Any]


def _bake(weight: OrthogonalWeight, frame: nn.Parameter | None) -> nn.Parameter:
    """Bakes one weight, into a parameter that is given for one that is tied to it, and returns the parameter."""
    title, module, name, coordinate_list = weight
    if not parametrize.is_parametrized(module, name):
        raise OptionError(
            f"bake needs a module that reads its weight, got {title} of a traced graph; bake, then trace."
        )
    trains = any(c.requires_grad for c in coordinate_list.coordinates.values())
    with torch.no_grad():
        coordinate_list.mend(by_value=True)
        frame = nn.Parameter(getattr(module, name).detach().clone(), trains) if frame is None else frame
    parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    delattr(module, name)
    module.register_parameter(name, frame)
    retire(coordinate_list.coordinates.values(), coordinate_list.weight, "sk.bake", frame, are_coordinates=True)
    return frame


def _carry(plan: _Plan, places: Sequence[Place], start: Start) -> CoordinateList:
    """Makes what will carry a weight, filled; the weight may stand in several places."""
    first, *others = places
    weight, seen = plain_weight(first), _seen(plan, first)
    for other in others:
        if _seen(plan, other) != seen:
            raise OptionError(
                f"orthogonal needs modules that read a weight in one way, got {first.title} and {other.title}, one "
                "parameter in a convolution and in a transposed one; choose one of them, and tie the other to it."
            )
    parts = [_build(plan, first, weight, view) for view in seen]
    axis = axis_of(seen[0].name, weight.shape, plan.dim) - weight.dim()
    param = parts[0] if len(parts) == 1 else SideBySide(parts, plan.blocks, plan.dim, axis)  # type: ignore[arg-type]
    device, dtypes = weight.device, param.coordinate_dtypes
    blank = [torch.empty(shape, device=device, dtype=dtypes[key]) for key, shape in param.coordinates.items()]
    coordinate_list = CoordinateList(param, blank, weight.requires_grad)
    init = start.init
    if init is not None and not isinstance(init, Tensor) and init != "project":
        check_scheme(param, init)
        coordinate_list.scheme = init
    if device.type != "meta":
        start_(coordinate_list, weight.detach(), start, first.title)
    elif isinstance(init, Tensor) or init == "project":
        raise OptionError(f"{param.title} on the meta device needs an init scheme or None, got {init!r:.40}.")
    return coordinate_list


_WORDS = tuple(inspect.signature(orthogonal).parameters)


def _seen(plan: _Plan, place: Place) -> tuple[View, ...]:
    """How a weight is read, run by run of its blocks; checks that it is a matrix, or kernel, that can be."""
    weight = plain_weight(place)
    convolution, groups = is_convolution(place), groups_of(place)
    where = f"{plan.cls.__name__} on {place.title}"
    if weight.dim() < 2:
        raise ShapeError(f"{where} needs a matrix or a batch of matrices, got shape {tuple(weight.shape)}.")
    if weight.numel() == 0:
        raise ShapeError(f"{where} needs at least one row and one column, got shape {tuple(weight.shape)}.")
    if convolution and plan.view is None:
        views = [key for key in VIEWS if key != "matrix" and key.startswith("group_") == (groups > 1)]
        *most, last = [f'"{key}"' for key in views]
        choices = f"{', '.join(most)} or {last}"
        raise ShapeError(f"{where} needs view={choices} for a kernel, got shape {tuple(weight.shape)}.")
    if not (weight.is_floating_point() or weight.is_complex()) or weight.itemsize == 1:
        raise DtypeError(f"{where} needs a floating or complex weight of 16 bits or more, got {weight.dtype}.")
    transposed = convolution and bool(getattr(place.host, "transposed", False))
    view = View(plan.view or "matrix", tuple(weight.shape), int(transposed), groups)
    if plan.blocks is None:
        return (view,)
    try:
        return views_of_blocks(view, plan.blocks, plan.dim)
    except ShapeError as error:
        raise ShapeError(f"{where}: {error}") from None


def _build(plan: _Plan, place: Place, weight: Tensor, seen: View) -> OrthogonalParam:
    check_options(plan.cls, plan.options, near=_WORDS)
    reason = plan.cls.supports(seen.frame_shape, weight.dtype, **plan.options)
    if reason is not None:
        where = f"{plan.cls.__name__} on {place.title}"
        takes_complex = plan.cls.supports(seen.frame_shape, torch.complex64, **plan.options) is None
        words = 'field="complex"' if hasattr(place.host, "field") else "dtype=torch.complex64"
        remedy = f"; make the layer with {words}" if takes_complex else ""
        raise DtypeError(f"{where} needs {reason}, got shape {seen.frame_shape} and {weight.dtype}{remedy}.")
    inner = plan.cls(seen.frame_shape, dtype=weight.dtype, device=weight.device, **plan.options)
    scaled = inner if plan.gain == 1 and not isinstance(plan.gain, bool) else Scaled(inner, plan.gain, seen.blocks)
    return scaled if seen.is_plain else Viewed(scaled, seen)
