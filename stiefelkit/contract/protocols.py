"""Protocols for the few parametrizations that need more than the contract, and the defaults of all others."""

from typing import ClassVar, Protocol, cast

from torch import Tensor

from stiefelkit.contract.param import Frames, OrthogonalParam, Position, solve
from stiefelkit.functional._polar import nearest
from stiefelkit.functional._polish import polished
from stiefelkit.metrics import permitted_return
from stiefelkit.tensors import working_dtype

__all__ = [
    "Bounds",
    "Factors",
    "Nearest",
    "Stacks",
    "Weights",
    "bare_frames",
    "frames_in",
    "nearest_weight",
    "prefers_factors",
    "projected",
    "return_bound",
    "solve_nearest",
    "structure_of",
    "takes_nearest",
]


class Stacks(Protocol):
    """A map whose `forward` takes one dimension more in front of coordinates and chart, and gives a stack of weights.

    It holds for the class whose `forward` it is; a subclass with a `forward` of its own says it again. Weights of other
    maps are grouped (`sk.grouped`) by `torch.vmap`.
    """

    stacks: ClassVar[bool]


class Factors(Protocol):
    """A map with factors by which a recurrence applies W without forming it."""

    @property
    def structure(self) -> str | None:
        """The name in `stiefelkit.scan.structures` of what applies W from its factors; None if there is none."""

    def factors(self, *coordinates: Tensor) -> Tensor:
        """Returns the factors of W as the structure has them, in the dtype of W, each rounded once."""
        ...

    def prefers_factors(self, rows: int) -> bool:
        """Returns whether a recurrence over so many rows a step is faster with factors than with W, on a CPU."""
        ...


class Nearest(Protocol):
    """A map whose nearest weight is not the polar factor, or that `sk.orthogonal` shall not ask for it."""

    @property
    def takes_nearest(self) -> bool:
        """True if `sk.orthogonal` takes the weight nearest to the present one, instead of drawing.

        Without it, where the default scheme is "haar"; a map with an option that fixes the chart overrides that.
        """
        ...

    def nearest(self, weight: Tensor) -> Tensor:
        """Returns the weight nearest to a given one whose frames are exact, in float64 or complex128."""
        ...

    def project(self, weight: Tensor) -> Tensor:
        """Returns the nearest weight that the map can have, in float64 or complex128; `nearest`, if left out."""
        ...


class Bounds(Protocol):
    """A map whose weights come back from their coordinates less near than `permitted_return` says."""

    @property
    def return_bound(self) -> float:
        """The largest Frobenius norm of `forward(right_inverse(W)) - W`, of a W that is a frame to rounding."""
        ...


class Weights(Protocol):
    """A map whose weights are no frames of its own: it is around others, or scales, or has a chart of frames."""

    frame_buffers: ClassVar[tuple[str, ...]]
    """Names of own buffers that hold frames, [Re, Im] last if complex: averaged and mended as frames are."""
    title: str
    """The map's name in messages."""

    def solve(self, w: Tensor) -> Position:
        """Checks a weight and returns its coordinates and chart; writes nothing."""
        ...

    def frames(self, weight: Tensor) -> Frames:
        """Returns the matrices in a weight that must have orthonormal columns; a tuple where their sizes differ."""
        ...

    def bare(self, *coordinates: Tensor) -> Frames:
        """Returns these frames at coordinates, without view and gain: what `sk.drift` measures."""
        ...


def return_bound(param: OrthogonalParam) -> float:
    """Returns the largest Frobenius norm of `forward(right_inverse(W)) - W`, W a frame to rounding; see `Bounds`."""
    if hasattr(type(param), "return_bound"):
        return cast(Bounds, param).return_bound
    return permitted_return(param.shape, param.dtype)


def structure_of(param: OrthogonalParam) -> str | None:
    """Returns which structure of the scan applies W from factors, None if none does; see `Factors`."""
    return cast(Factors, param).structure if hasattr(type(param), "structure") else None


def prefers_factors(param: OrthogonalParam, rows: int) -> bool:
    """Returns whether a recurrence over so many rows is faster with the factors of a map that has them."""
    return hasattr(type(param), "prefers_factors") and cast(Factors, param).prefers_factors(rows)


def takes_nearest(param: OrthogonalParam) -> bool:
    """Returns whether `sk.orthogonal`, unless told otherwise, takes the nearest weight; see `Nearest`."""
    return cast(Nearest, param).takes_nearest if hasattr(type(param), "takes_nearest") else param.schemes[0] == "haar"


def nearest_weight(param: OrthogonalParam, weight: Tensor) -> Tensor:
    """Returns the weight of a map's shape nearest to a given one whose frames are exact; see `Nearest`."""
    if hasattr(type(param), "nearest"):
        return cast(Nearest, param).nearest(weight)
    return nearest(weight.to(working_dtype(param.dtype)).resolve_conj()).contiguous()


def solve_nearest(param: OrthogonalParam, weight: Tensor) -> Position:
    """Returns coordinates, not rounded yet, and chart of `nearest_weight`; writes nothing."""
    q = nearest_weight(param, weight)
    if hasattr(type(param), "solve") or hasattr(type(param), "nearest"):
        return solve(param, q)
    return param.invert(polished(q))  # as `check_frame` would have it


def projected(param: OrthogonalParam, weight: Tensor) -> Tensor:
    """Returns the nearest weight that a map can have; see `Nearest`."""
    return cast(Nearest, param).project(weight) if hasattr(type(param), "project") else nearest_weight(param, weight)


def frames_in(param: OrthogonalParam, weight: Tensor) -> Frames:
    """Returns the matrices in a weight that must have orthonormal columns; see `Weights`."""
    return cast(Weights, param).frames(weight) if hasattr(type(param), "frames") else weight


def bare_frames(param: OrthogonalParam, *coordinates: Tensor) -> Frames:
    """Returns the frames at coordinates, without view and gain; see `Weights`."""
    if hasattr(type(param), "bare"):
        return cast(Weights, param).bare(*coordinates)
    return frames_in(param, param(*coordinates))
