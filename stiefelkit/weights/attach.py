"""Putting a parametrization on a weight, and the first values of its coordinates."""

import inspect
import logging
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from stiefelkit.contract import table
from stiefelkit.contract.composite import SideBySide
from stiefelkit.contract.param import OrthogonalParam, Parametrization
from stiefelkit.contract.scaled import Scaled
from stiefelkit.contract.table import check_options, find_parametrization, option_names
from stiefelkit.contract.view import View, Viewed, axis_of
from stiefelkit.errors import (
    DtypeError,
    ImageError,
    NonFiniteError,
    NotAFrameError,
    OptionError,
    RankError,
    did_you_mean,
    needs,
    shown,
)
from stiefelkit.metrics import frame_tolerance, orthogonality_error
from stiefelkit.numbers import as_python_number, sizes
from stiefelkit.tensors import coarser, working_dtype
from stiefelkit.weights import find
from stiefelkit.weights.coordinate_list import CoordinateList
from stiefelkit.weights.find import WeightPath, Where
from stiefelkit.weights.modules import attach_coordinate_list, check_loading_of

__all__ = ["available", "orthogonal", "register"]


M = TypeVar("M", bound=nn.Module)
_log = logging.getLogger("stiefelkit")


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
    gain: float | str | None = 1.0,
    precision: str = "exact",
    generator: torch.Generator | None = None,
    **options: Any,
) -> M:
    """Makes weights orthogonal (unitary, if complex) for good, each the frame nearest to what it was if the map can.

    A weight that is a frame stays as it is. Any other finite one of full rank becomes the frame nearest to it, its
    polar factor, if the map's image holds that; else (the map cannot invert, or reaches too few frames; a chart fixed
    by an option, as `negative=`; a default scheme that is not Haar; zeros, dependent columns, NaN) it is drawn. Of
    a finite, nonzero weight without `init=` the logger "stiefelkit" reports either, once, as information. For a layer
    fresh from torch the nearest frame is much like a Haar draw; `init="haar"` draws one.

    From then on `module.name` is a frame, computed from coordinates in `module.parametrizations.name`, which any
    torch optimizer trains. Create the optimizer afterwards. A wide matrix gets orthonormal rows; dimensions before
    the last two are a batch. A weight that another module holds, too, is one and the same for both only if both are
    chosen by `where`. A frozen weight becomes a frozen frame, with a warning.

    Args:
        module: the module that owns the weight, or a model that contains it.
        name: the parameter's name, "weight", or, as `sk.drift` prints it, "encoder.0.weight"; or what `where` takes.
        parametrization: a registered name (`sk.available()`) or a class.
        where: in place of a name, which weights of two dimensions or more: a pattern of names, "encoder.*.weight" (*
            stands for any characters, dots too), a class of modules, as `nn.Linear`, a sequence of such, or a function
            (name, module that owns it) -> bool. Either all are made orthogonal or, on an error, none.
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
            weight, or of each block; None is 1.
        precision: "exact", the default, rounds once.
        generator: source of randomness for a drawn init.
        **options: the parametrization's own (`negative=` for "cayley").

    Returns:
        The same module.

    >>> layer = orthogonal(nn.Linear(8, 4, bias=False), "weight", "cayley")
    >>> torch.dist(layer.weight @ layer.weight.mT, torch.eye(4)).item() < 1e-6
    True
    """
    if not isinstance(module, nn.Module):
        find.check_module(module, "orthogonal")
    if (name is None) is (where is None):
        got = "neither" if name is None else f"name={shown(name)} and where={shown(where)}"
        known = did_you_mean("", [place.qualified for place in find.matrices_of(module)])
        raise OptionError(f"orthogonal needs a weight's name or where=, one of both, got {got}{known}")
    if isinstance(name, str) and {*name}.isdisjoint(find.WILDCARDS):
        chosen = [find.find_path(module, name)]
    else:
        chosen = find.choose(module, where if name is None else name)  # type: ignore[arg-type]
    tied: dict[nn.Parameter, list[WeightPath]] = {}
    for place in chosen:
        tied.setdefault(find.plain_weight(place), []).append(place)
    if len(tied) > 1 and isinstance(init, Tensor):
        raise OptionError(f"orthogonal needs init= as a name for {len(tied)} weights, got a tensor.")
    cls = table.registered.find(parametrization)
    if blocks is not None or dim is not None:
        taken = option_names(cls)
        if blocks is not None and "blocks" in taken:
            options["blocks"], blocks = blocks, None
        if dim is not None and "dim" in taken:
            options["dim"], dim = dim, None
        needs(dim is None or blocks is not None, OptionError, "orthogonal", "blocks= of its own beside dim=", dim)
        blocks, dim = sizes(blocks) or as_python_number(blocks), as_python_number(dim)
    options = {"precision": precision, **(as_python_number(options) if options else {})}
    scale: float | str = 1.0 if gain is None else as_python_number(gain)
    asked = _AttachOptions(cls, view, blocks, dim or 0, scale, options, init, generator)
    made = []
    for weight, paths in tied.items():
        made.append((paths, _make_coordinate_list(asked, paths, weight)))
    notes = find.notes_on(module, tied.values(), view, cls if blocks is None else None)
    for paths, coordinate_list in made:
        attach_coordinate_list(paths, coordinate_list)
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
    """
    if not isinstance(parametrization, str):
        find_parametrization(parametrization)
    table.registered.register(name, parametrization)


class _AttachOptions(NamedTuple):
    """The map of each weight, and its first values: what `orthogonal` was given."""

    cls: type[OrthogonalParam]
    view: str | None
    blocks: int | Sequence[int] | None
    dim: int
    gain: float | str
    options: dict[str, Any]
    init: str | Tensor | None
    generator: torch.Generator | None


def _make_coordinate_list(asked: _AttachOptions, places: Sequence[WeightPath], weight: nn.Parameter) -> CoordinateList:
    """Makes what will carry a weight, filled; the weight may stand in several places."""
    first, *others = places
    read_as = (asked.cls.__name__, asked.view, asked.blocks, asked.dim, asked.gain == "rms")
    views = find.views_of(first, weight, *read_as)
    for other in others:
        if find.views_of(other, weight, *read_as) != views:
            raise OptionError(
                f"orthogonal needs modules that read a weight in one way, got {first.title} and {other.title}, one "
                "parameter whose outputs are rows in one and columns in the other; choose one, and tie the other to it."
            )
    param = _make_map(asked, first, weight, views[0])
    if len(views) > 1:
        parts = [param, *(_make_map(asked, first, weight, view) for view in views[1:])]
        axis = axis_of(views[0].name, weight.shape, asked.dim) - weight.dim()
        param = SideBySide(parts, asked.blocks, asked.dim, axis)  # type: ignore[arg-type]
    coordinate_list, init = CoordinateList(param, weight.device, weight.requires_grad), asked.init
    is_scheme = not (init is None or isinstance(init, Tensor) or init == "project")
    if is_scheme:
        coordinate_list.scheme = param.check_scheme(init)  # type: ignore[arg-type]
    if not weight.is_meta:
        _fill(coordinate_list, param, weight.detach(), asked, first)
    elif not (init is None or is_scheme):
        raise OptionError(f"{param.title} on the meta device needs an init scheme or None, got {shown(init, 40)}.")
    return coordinate_list


def attach_map(
    module: nn.Module, name: str, param: OrthogonalParam, init: str | None, generator: torch.Generator | None
) -> None:
    """Puts a map on a weight of its shape, drawn by one of its schemes; for layers that make the map themselves."""
    weight = module.get_parameter(name)
    coordinate_list = CoordinateList(param, weight.device, weight.requires_grad)
    if init is not None:
        coordinate_list.scheme = param.check_scheme(init)
    if not weight.is_meta:
        coordinate_list.draw_(None, generator)
    attach_coordinate_list([WeightPath(name, module, name)], coordinate_list)


_WORDS = tuple(inspect.signature(orthogonal).parameters)


def _make_map(asked: _AttachOptions, place: WeightPath, weight: Tensor, view: View) -> OrthogonalParam:
    cls, shape = asked.cls, view.frame_shape
    check_options(cls, asked.options, near=_WORDS)
    reason = cls.supports(shape, weight.dtype, **asked.options)
    if reason is not None:
        takes_complex = cls.supports(shape, torch.complex64, **asked.options) is None
        words = 'field="complex"' if hasattr(place.host, "field") else "dtype=torch.complex64"
        remedy = f"; make the layer with {words}" if takes_complex else ""
        raise DtypeError(
            f"{cls.__name__} on {place.title} needs {reason}, got shape {shape} and {weight.dtype}{remedy}."
        )
    param = cls(shape, dtype=weight.dtype, device=weight.device, **asked.options)
    gain = view.rms_gain if asked.gain == "rms" else asked.gain
    if type(gain) not in (int, float) or gain != 1:
        param = Scaled(param, gain, view.blocks)
    return param if view.is_plain else Viewed(param, view)


def _fill(
    coordinate_list: CoordinateList, param: OrthogonalParam, weight: Tensor, asked: _AttachOptions, place: WeightPath
) -> None:
    """Fills the coordinates of what was a weight, and logs once if they are not the weight's own."""
    init = asked.init
    if isinstance(init, Tensor):
        coordinate_list.right_inverse(init)
    elif init == "project":
        if not torch.isfinite(weight).all():
            raise NonFiniteError('init="project" needs a finite weight, got one with NaN or infinity.')
        coordinate_list.right_inverse(param.project(weight))
    elif init is not None:
        coordinate_list.draw_(init, asked.generator)
    elif not _takes_itself(coordinate_list, param, weight):
        why = "its map is drawn unless the weight fits"
        if param.takes_nearest:
            try:
                coordinate_list.take_position(param.solve_nearest(weight))
            except (ImageError, NonFiniteError, RankError) as error:
                why = str(error).removesuffix(".")
            else:
                return _log_change(coordinate_list, weight, place, "is the nearest one now", "")
        coordinate_list.draw_(None, asked.generator)
        if torch.isfinite(weight).all() and bool((weight != 0).any()):
            _log_change(coordinate_list, weight, place, f"is drawn anew by {param.schemes[0]!r}", f": {why}")


def _takes_itself(coordinate_list: CoordinateList, param: OrthogonalParam, weight: Tensor) -> bool:
    """Takes a weight that is a frame as it is; raises ImageError if the map does not reach it."""
    if param.are_frames and not _is_frame(param, weight):
        return False
    try:
        is_double = weight.dtype == working_dtype(weight.dtype) and bool(torch.isfinite(weight).all())
        # One of float64 that is a frame to float32, and was cast up from there, is taken for one.
        start = param.nearest(weight) if is_double and _is_frame(param, weight) else weight
        coordinate_list.right_inverse(start)
    except (NotAFrameError, NonFiniteError):
        return False
    except ImageError as error:
        if not _is_frame(param, weight):
            return False
        reason = str(error).removesuffix(".")
        raise ImageError(f"{reason}; init={param.schemes[0]!r} draws another in its place.") from error
    return True


def _is_frame(param: OrthogonalParam, weight: Tensor) -> bool:
    """Returns whether a finite weight is a frame in its own dtype, or to float32 and cast up from there."""
    frames = param.frames(weight)
    for q in frames if isinstance(frames, tuple) else (frames,):
        tolerance = frame_tolerance(q.shape[-1], coarser(q.dtype, torch.float32))
        if not orthogonality_error(q).max().item() <= tolerance:
            return False
    return True


def _log_change(coordinate_list: CoordinateList, weight: Tensor, place: WeightPath, became: str, end: str) -> None:
    if _log.isEnabledFor(logging.INFO):
        now = coordinate_list.param(*coordinate_list.gathered())
        away = torch.linalg.vector_norm((now - weight).to(working_dtype(weight.dtype)))
        _log.info("%s, which was not a frame, %s, %.3g away%s.", place.title, became, away.item(), end)
