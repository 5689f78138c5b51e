"""Putting a parametrization on a weight, and what one does with such a weight afterwards."""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from stiefelkit.contract import table
from stiefelkit.contract.composite import SideBySide
from stiefelkit.contract.param import OrthogonalParam, Parametrization, coordinate_dtypes, title
from stiefelkit.contract.scaled import Scaled
from stiefelkit.contract.table import check_options, find_parametrization, option_names
from stiefelkit.contract.view import VIEWS, View, axis_of, view_of, views_of_blocks
from stiefelkit.contract.viewed import Viewed
from stiefelkit.errors import DtypeError, OptionError, ShapeError, shown
from stiefelkit.numbers import one_of, plain, sizes
from stiefelkit.weights.coordinate_list import CoordinateList
from stiefelkit.weights.find import (
    Place,
    Where,
    check_module,
    choose,
    find_place,
    groups_of,
    is_convolution,
    is_pattern,
    notes_on,
    plain_weight,
)
from stiefelkit.weights.loading import check_loading_of
from stiefelkit.weights.modules import share_coordinate_list
from stiefelkit.weights.start import Start, check_scheme, start_

__all__ = ["available", "orthogonal", "register"]


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
        gain: the weight is this times a frame: a positive number, as of `torch.nn.init.calculate_gain`; "rms", the root
            of outputs over inputs, with which a layer keeps the root mean square of what passes, as far as its shape
            lets it; or "learned", a coordinate more, "gain", 1 after a draw, and else the mean singular value of the
            weight, or of each block.
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
            f"orthogonal needs a weight's name or where=, one of both, got name={shown(name)} and where={shown(where)}."
        )
    where = name if is_pattern(name) else where
    chosen = [find_place(module, name, "orthogonal")] if where is None else choose(module, where)  # type: ignore[arg-type]
    if len(chosen) > 1 and isinstance(init, Tensor):
        raise OptionError(f"orthogonal needs init= as a name for {len(chosen)} weights, got a tensor.")
    tied: dict[int, list[Place]] = {}
    for place in chosen:
        tied.setdefault(id(plain_weight(place)), []).append(place)
    cls = find_parametrization(parametrization)
    if blocks is not None or dim is not None:
        given = {key: value for key, value in (("blocks", blocks), ("dim", dim)) if value is not None}
        own = {key: value for key, value in given.items() if key in option_names(cls)}
        options, blocks, dim = options | own, None if "blocks" in own else blocks, None if "dim" in own else dim
        if dim is not None and blocks is None:
            raise OptionError(
                f"orthogonal needs blocks= of its own beside dim=, got dim={shown(dim)} with {cls.__name__}."
            )
        blocks, dim = sizes(blocks) or plain(blocks), plain(dim)
    plan = _Plan(cls, view, blocks, 0 if dim is None else dim, plain(gain), {"precision": precision, **plain(options)})
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


def available() -> dict[str, type[OrthogonalParam]]:
    """Returns name to class of every parametrization: built-ins, installed plugins and registered ones.

    A plugin that does not import, or is no `OrthogonalParam`, is warned about and left out.
    """
    return table.registered.available()


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
    table.registered.register(name, parametrization)


class _Plan(NamedTuple):
    """The map of each weight: its class, view, blocks, gain and options."""

    cls: type[OrthogonalParam]
    view: str | None
    blocks: int | Sequence[int] | None
    dim: int
    gain: float | str
    options: dict[str, Any]


def _carry(plan: _Plan, places: Sequence[Place], start: Start) -> CoordinateList:
    """Makes what will carry a weight, filled; the weight may stand in several places."""
    first, *others = places
    weight = plain_weight(first)
    seen = _seen(plan, first, weight)
    for other in others:
        if _seen(plan, other, weight) != seen:
            raise OptionError(
                f"orthogonal needs modules that read a weight in one way, got {first.title} and {other.title}, one "
                "parameter in a convolution and in a transposed one; choose one of them, and tie the other to it."
            )
    parts = [_build(plan, first, weight, view) for view in seen]
    axis = axis_of(seen[0].name, weight.shape, plan.dim) - weight.dim()
    param = parts[0] if len(parts) == 1 else SideBySide(parts, plan.blocks, plan.dim, axis)  # type: ignore[arg-type]
    device, pairs = weight.device, zip(param.coordinates.values(), coordinate_dtypes(param).values(), strict=True)
    blank = [torch.empty(shape, device=device, dtype=dtype) for shape, dtype in pairs]
    coordinate_list = CoordinateList(param, blank, weight.requires_grad)
    init = start.init
    if not (init is None or isinstance(init, Tensor) or one_of("project").holds(init)):
        check_scheme(param, init)
        coordinate_list.scheme = init
    if device.type != "meta":
        start_(coordinate_list, weight.detach(), start, first.title)
    elif isinstance(init, Tensor) or one_of("project").holds(init):
        raise OptionError(f"{title(param)} on the meta device needs an init scheme or None, got {shown(init, 40)}.")
    return coordinate_list


_WORDS = tuple(inspect.signature(orthogonal).parameters)


def _seen(plan: _Plan, place: Place, weight: Tensor) -> tuple[View, ...]:
    """Returns how a weight is read, run by run of its blocks; checks that it is a matrix, or kernel, that can be."""
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
    try:
        view = view_of("matrix" if plan.view is None else plan.view, tuple(weight.shape), int(transposed), groups)
    except TypeError:  # not hashable, so no name of a view
        view = View(plan.view, tuple(weight.shape), int(transposed), groups)  # type: ignore[arg-type]
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
    gain = seen.rms_gain if one_of("rms").holds(plan.gain) else plan.gain
    scaled = inner if one_of(1, 1.0).holds(gain) else Scaled(inner, gain, seen.blocks)
    return scaled if seen.is_plain else Viewed(scaled, seen)
