"""The first values of a weight's coordinates: the weight itself, the frame nearest to it, or a draw."""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from stiefelkit.contract.param import OrthogonalParam, each_frame, title
from stiefelkit.contract.protocols import frames_in, nearest_weight, projected, takes_nearest
from stiefelkit.errors import ImageError, NonFiniteError, NotAFrameError, OptionError, RankError, did_you_mean, shown
from stiefelkit.metrics import frame_tolerance, orthogonality_error
from stiefelkit.numbers import one_of
from stiefelkit.tensors import coarser, working_dtype
from stiefelkit.weights.coordinate_list import CoordinateList

__all__ = ["Start", "check_scheme", "start_"]


_log = logging.getLogger("stiefelkit")


class Start(NamedTuple):
    """The start of a weight: `init` and `generator` of `stiefelkit.orthogonal`."""

    init: str | Tensor | None
    generator: torch.Generator | None


def start_(coordinate_list: CoordinateList, weight: Tensor, start: Start, title: str) -> None:
    """Fills the coordinates of what was a weight, and logs once, by its title, if they are not the weight's own.

    Raises:
        NonFiniteError, NotAFrameError, RankError, ImageError: as `stiefelkit.orthogonal`.
    """
    init, param = start.init, coordinate_list.param
    if isinstance(init, Tensor):
        coordinate_list.right_inverse(init)
    elif init == "project":
        if not torch.isfinite(weight).all():
            raise NonFiniteError('init="project" needs a finite weight, got one with NaN or infinity.')
        coordinate_list.right_inverse(projected(param, weight))
    elif init is not None:
        coordinate_list.draw_(init, start.generator)
    elif not _is_kept(coordinate_list, weight):
        _replace(coordinate_list, weight, start.generator, title)


def check_scheme(param: OrthogonalParam, init: object) -> None:
    """Raises OptionError unless the map has the scheme."""
    if not one_of(*param.schemes).holds(init):
        raise OptionError(f"{title(param)} has no init {shown(init)}{did_you_mean(init, param.schemes)}")


def _is_kept(coordinate_list: CoordinateList, weight: Tensor) -> bool:
    """Keeps a weight that is a frame; raises ImageError if the map does not reach it."""
    param = coordinate_list.param
    if not (hasattr(type(param), "solve") or _is_frame(param, weight)):
        return False
    try:
        coordinate_list.right_inverse(_mended(param, weight))
    except (NotAFrameError, NonFiniteError):
        return False
    except ImageError as error:
        if not _is_frame(param, weight):
            return False
        reason = str(error).removesuffix(".")
        raise ImageError(f"{reason}; init={param.schemes[0]!r} draws another in its place.") from error
    return True


def _replace(coordinate_list: CoordinateList, weight: Tensor, generator: torch.Generator | None, title: str) -> None:
    """Takes the nearest frame if the map may and can, or else draws."""
    param = coordinate_list.param
    why = "its map is drawn unless the weight fits"
    if takes_nearest(param):
        try:
            coordinate_list.take_nearest(weight)
        except (ImageError, NonFiniteError, RankError) as error:
            why = str(error).removesuffix(".")
        else:
            _log_change(coordinate_list, weight, f"{title}, which was no frame, is the nearest one now", "")
            return
    coordinate_list.draw_(None, generator)
    if torch.isfinite(weight).all() and bool((weight != 0).any()):
        drawn = f"{title}, which was no frame, is drawn anew by {param.schemes[0]!r}"
        _log_change(coordinate_list, weight, drawn, f": {why}")


def _log_change(coordinate_list: CoordinateList, weight: Tensor, text: str, end: str) -> None:
    """Logs that a weight has become another, and how far away it is, if anybody listens."""
    if _log.isEnabledFor(logging.INFO):
        away = torch.linalg.vector_norm((coordinate_list.evaluate_whole() - weight).to(working_dtype(weight.dtype)))
        _log.info("%s, %.3g away%s.", text, away.item(), end)


def _is_frame(param: OrthogonalParam, weight: Tensor) -> bool:
    """Returns whether a finite weight is a frame in its own dtype, or to float32 and cast up from there."""
    return all(
        orthogonality_error(q).max().item() <= frame_tolerance(q.shape[-1], coarser(q.dtype, torch.float32))
        for q in each_frame(frames_in(param, weight))
    )


def _mended(param: OrthogonalParam, weight: Tensor) -> Tensor:
    """Returns a float64 weight that is a frame to float32, cast up from there, is taken for one: its nearest."""
    if weight.dtype not in (torch.float64, torch.complex128) or not torch.isfinite(weight).all():
        return weight
    return nearest_weight(param, weight) if _is_frame(param, weight) else weight
