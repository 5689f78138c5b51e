"""The contract that every parametrization keeps: `OrthogonalParam` and its `Traits`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit import init, tensors
from stiefelkit.errors import (
    DtypeError,
    ImageError,
    NonFiniteError,
    NotAFrameError,
    OptionError,
    ShapeError,
    did_you_mean,
    shown,
)
from stiefelkit.functional import nearest_frame
from stiefelkit.functional._polar import nearest, polished
from stiefelkit.metrics import frame_tolerance, orthogonality_error, permitted_error, permitted_return, scale_of
from stiefelkit.numbers import sizes

Position = tuple[tuple[Tensor, ...], dict[str, Tensor]]
"""A point of a map: its coordinates, in order, and the whole chart by name."""
Frames = Tensor | tuple[Tensor, ...]
"""The type of the matrices in a weight that must have orthonormal columns: a tuple where their sizes differ."""

Component = Literal["connected", "rotations", "chart", "coordinates"]


@dataclass(frozen=True)
class Traits:
    """Promises of one instance of a parametrization, by which the laws that apply are chosen.

    Attributes:
        onto: every frame is in the image.
        invertible: `right_inverse` works on the image.
        exact: frames are within 1.2 times the rounding limit.
        component: which part of :math:`O(n)` the coordinates reach: "connected" where there is only one part (complex
            or tall frames), "rotations" for det +1 only, "chart" where a chart fixed at assignment decides,
            "coordinates" where they decide themselves, as those of a free matrix do.
        twice_differentiable: second derivatives are right; a parametrization without them raises.
        cost_exponent: time of a square map grows as n to this power.
    """

    onto: bool
    invertible: bool
    exact: bool
    component: Component
    twice_differentiable: bool = True
    cost_exponent: float = 3.0


class OrthogonalParam(ABC, nn.Module):
    """A map from coordinates to frames W, :math:`W^H W = I`, of shape (*, n, p) with :math:`n ≥ p`.

    A subclass implements `traits`, `coordinates`, `forward`, `examples` and `invert`, or `initial` where it has no
    right inverse; it may add a chart (buffers that stay fixed while training), reject shapes or dtypes in `supports`
    and apply W without forming it in `linear`. What stands after `linear` only few maps override: those whose weights
    are no frames, or come back less near, or that a recurrence applies in factors. A map holds no trainable tensor:
    those belong to the module that carries it, which hands them to `forward`.

    Laws, checked by `stiefelkit.testing`: `forward` is pure (same coordinates and chart, same bits) and never
    branches on values; its frames are exact in their dtype; its gradients are; `invert` is a right inverse.

    Args:
        shape: shape of the frame, (*, n, p).
        dtype: dtype of the frame; coordinates are kept in float32 or better.
        device: where the chart lives.
        precision: "exact", the default: within 1.2 rounding limits of a frame. "fast", where there is such: without
            what that takes, within `error_bound`.

    """

    version: ClassVar[int] = 1
    """Raised when the meaning of coordinates or chart changes, so that old checkpoints are refused."""
    precisions: ClassVar[tuple[str, ...]] = ("exact",)
    coordinate_names: ClassVar[tuple[str, ...]]
    """Every name that `coordinates` may hold, over all fields and options."""
    stacks: ClassVar[bool] = False
    """True if `forward` takes one dimension more in front of coordinates and chart, and gives a stack of weights.

    It holds for the class whose `forward` it is; a subclass with a `forward` of its own says it again. Weights of other
    maps are grouped (`sk.grouped`) by `torch.vmap`.
    """
    frame_buffers: ClassVar[tuple[str, ...]] = ()
    """Names of own buffers that hold frames, [Re, Im] last if complex: averaged and projected as frames are."""
    are_frames: ClassVar[bool] = True
    """True if the weights are frames themselves, neither scaled nor seen through a view: without an own `solve`."""
    dtype: torch.dtype
    is_attached: bool = False
    """True once a module carries the map."""

    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        precision: str = "exact",
    ):
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        name = type(self).__name__
        frame = sizes(shape)
        if frame is None or len(frame) < 2:
            raise ShapeError(f"{name} needs a matrix or a batch of matrices (*, n, p), got shape {shown(shape)}.")
        if frame[-2] < frame[-1] or min(frame) < 1:
            raise ShapeError(f"{name} needs a shape (*, n, p) with n >= p >= 1, got {shown(frame)}.")
        tensors.check_dtype(name, dtype)
        if dtype == torch.complex32:
            raise DtypeError(f"{name} needs a complex dtype of complex64 at least, got {dtype}.")
        if precision not in self.precisions:
            raise OptionError(f"{name} needs a precision in {self.precisions}, got {shown(precision)}.")
        self.shape = frame
        self.dtype = dtype
        self.precision = precision

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.are_frames = cls.solve is OrthogonalParam.solve

    @property
    def is_complex(self) -> bool:
        """True if the frame is complex."""
        return self.dtype.is_complex

    @classmethod
    def supports(cls, shape: Sequence[int], dtype: torch.dtype, **options: Any) -> str | None:
        """Returns None if the map does this shape, dtype and options, else the reason why it does not."""
        return None

    @classmethod
    @abstractmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """Shapes and options that the laws are run on; cover every branch."""

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """The promises of this instance."""

    @property
    @abstractmethod
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of each coordinate, in the order that `forward` takes them."""

    @property
    def manifolds(self) -> dict[str, str]:
        """Name to manifold ("stiefel:canonical") of the coordinates that must stay on one; the others are free.

        Such a coordinate is a frame, in the field of the weight, and only an optimizer that moves along the manifold
        may train it.
        """
        return {}

    @property
    def chart(self) -> dict[str, Tensor]:
        """Name to tensor of the choices that stay fixed while training."""
        return dict(self.named_buffers())

    @property
    def schemes(self) -> tuple[str, ...]:
        """Names that `initial` takes; the first is the default."""
        return tuple(init.SCHEMES)

    def check_scheme(self, scheme: str) -> str:
        """Returns the name of a scheme; raises OptionError unless the map has it."""
        if scheme not in self.schemes:
            raise OptionError(f"{self.title} has no init {shown(scheme)}{did_you_mean(scheme, self.schemes)}")
        return scheme

    def options(self) -> dict[str, Any]:
        """Returns JSON-able options that change what the coordinates mean; a checkpoint with others is refused."""
        return {}

    @abstractmethod
    def forward(self, *coordinates: Tensor) -> Tensor:
        """Maps coordinates to the frame, shape `self.shape`, dtype `self.dtype`."""

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        """Draws coordinates and the whole chart by one of `schemes`: those of a frame drawn by `stiefelkit.init`.

        A map with schemes of its own, or without `invert`, overrides it.
        """
        if type(self).invert is OrthogonalParam.invert:
            raise OptionError(f"{self.title} needs a method initial(scheme, generator), since it has no invert.")
        return self.invert(init.draw(scheme, self.shape, tensors.working_dtype(self.dtype), generator))

    def invert(self, w: Tensor) -> Position:
        """Finds coordinates and a chart whose image is W, exact to rounding in float64 or complex128; writes nothing.

        Raises ImageError where W is outside the image, and where the map has no right inverse.
        """
        wanted = "an init scheme (sk.reset_), since it has no right inverse"
        if self.traits.invertible:
            wanted = "a method invert(w), since its traits say invertible=True"
        raise ImageError(f"{self.title} needs {wanted}, got a frame to assign.")

    def error_bound(self, *coordinates: Tensor) -> float:
        """Returns the largest :math:`‖W^H W - I‖_F` that the map promises here, of each matrix of a batch.

        That of an exact frame. A parametrization with precision "fast", or whose weights are no frames, states its own,
        which may grow with the coordinates.
        """
        return permitted_error(self.shape[-1], self.dtype)

    def linear(self, x: Tensor, *coordinates: Tensor) -> Tensor:
        """Returns x @ W.mT for x of shape (*, p), overridden where W need not be formed."""
        return F.linear(x, self(*coordinates))

    @property
    def title(self) -> str:
        """The map's name in messages; a wrapper has that of the map inside."""
        return type(self).__name__

    @property
    def takes_nearest(self) -> bool:
        """True if `sk.orthogonal` takes the weight nearest to the present one, instead of drawing.

        Where the default scheme is "haar"; a map with an option that fixes the chart overrides that.
        """
        return self.schemes[0] == "haar"

    @property
    def return_bound(self) -> float:
        """The largest Frobenius norm of `forward(right_inverse(W)) - W`, of a W that is a frame to rounding."""
        return permitted_return(self.shape, self.dtype)

    @property
    def structure(self) -> str | None:
        """The name in `stiefelkit.scan.structures` of what applies W from `factors`; None if there is none."""
        return None

    def factors(self, *coordinates: Tensor) -> Tensor:
        """Returns the factors of W as the structure has them, in the dtype of W, each rounded once."""
        raise OptionError(f"{self.title} needs a structure of the scan to have factors, got none.")

    def prefers_factors(self, rows: int) -> bool:
        """Returns whether a recurrence over so many rows a step is faster with factors than with W, on a CPU."""
        return False

    def nearest(self, weight: Tensor) -> Tensor:
        """Returns the weight nearest to a given one whose frames are exact, in float64 or complex128."""
        return nearest(weight.to(tensors.working_dtype(self.dtype)).resolve_conj()).contiguous()

    def project(self, weight: Tensor) -> Tensor:
        """Returns the nearest weight that the map can have, in float64 or complex128."""
        return self.nearest(weight)

    def frames(self, weight: Tensor) -> Frames:
        """Returns the matrices in a weight that must have orthonormal columns; a tuple where their sizes differ."""
        return weight

    def bare(self, *coordinates: Tensor) -> Frames:
        """Returns these frames at coordinates, without view and gain: what `sk.drift` measures."""
        return self.frames(self(*coordinates))

    def solve(self, w: Tensor) -> Position:
        """Checks a weight and returns its coordinates and chart, as `right_inverse` does; writes nothing."""
        coordinates, chart = self.invert(check_frame(self, w))
        return rounded(self, coordinates), chart

    def solve_nearest(self, weight: Tensor) -> Position:
        """Returns coordinates, not rounded yet, and chart of the `nearest` weight; writes nothing."""
        q = self.nearest(weight)
        if self.are_frames and type(self).nearest is OrthogonalParam.nearest:
            return self.invert(polished(q))  # as `check_frame` would have it
        return self.solve(q)

    def right_inverse(self, w: Tensor) -> tuple[Tensor, ...]:
        """Finds coordinates whose image is W; checks W first, then writes the chart and nothing else.

        Args:
            w: a frame of shape `self.shape` of the map's field, :math:`‖W^H W - I‖_F ≤ 100` times the rounding limit.

        Returns:
            Coordinates in float32 or better, with :math:`‖W' - W‖_F` at most `return_bound` + :math:`‖W^H W - I‖_F`, W'
            the frame that they give.
        """
        if self.is_attached:
            raise OptionError(f"{self.title} needs to be assigned through the module that has it, got a direct call.")
        coordinates, chart = self.solve(w)
        load_chart_(self, chart)
        return coordinates

    def check_chart(self, chart: Mapping[str, Tensor]) -> str | None:
        """Returns None if the chart is one that this map can have, else what it needs; for checkpoints."""
        return None

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Takes the chart; raises OptionError for what tools would add to it once there is a weight."""
        if self.is_attached and name not in self._buffers:
            raise OptionError(
                f"{self.title} needs its buffers to be its chart, got another, {name}; give tools that register some "
                "on every module sk.bake(copy.deepcopy(model))."
            )
        super().register_buffer(name, tensor, persistent)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "OrthogonalParam":
        """Follows `.to(dtype)` in the frame's dtype, while chart tensors keep float32 or better."""
        dtype = tensors.followed(fn, self.dtype)
        if dtype.is_complex and not self.is_complex:
            raise DtypeError(f"{self.title} needs a real dtype for its {self.dtype} weight, got {dtype}.")
        if recurse:
            for child in self.children():
                child._apply(fn)
        self.dtype = dtype
        super()._apply(tensors.keep_precision(fn, dtype), recurse=False)
        return self

    def extra_repr(self) -> str:
        """Returns shape, dtype and coordinate count."""
        size = sum(math.prod(shape) for shape in self.coordinates.values())
        return f"shape={self.shape}, dtype={self.dtype}, coordinates={size}"


def coordinate_dtypes(param: OrthogonalParam, names: Iterable[str] | None = None) -> dict[str, torch.dtype]:
    """Returns name to dtype of each coordinate: real, float32 or better; on a manifold, of the weight's field."""
    dtypes = dict.fromkeys(param.coordinates if names is None else names, tensors.coordinate_dtype(param.dtype))
    bound = param.manifolds
    return dtypes | dict.fromkeys(bound, tensors.computing_dtype(param.dtype)) if bound else dtypes


def rounded(param: OrthogonalParam, coordinates: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns coordinates in their `coordinate_dtypes`."""
    return tuple([c.to(dtype) for c, dtype in zip(coordinates, coordinate_dtypes(param).values(), strict=True)])


@torch.no_grad()
def load_chart_(param: OrthogonalParam, chart: Mapping[str, Tensor]) -> None:
    """Copies choices into the buffers of a map's chart."""
    held = param.chart
    for name, value in chart.items():
        held[name].copy_(value)


def check_tensor(param: OrthogonalParam, w: Tensor) -> None:
    """Raises unless W is a tensor with the shape and field of a map and finite entries."""
    tensors.check_tensors(param.title, w)
    if tuple(w.shape) != param.shape:
        raise ShapeError(f"{param.title} needs a weight of shape {param.shape}, got {tuple(w.shape)}.")
    if not (w.is_floating_point() or w.is_complex()) or (w.is_complex() and not param.is_complex):
        raise DtypeError(f"{param.title} needs a frame that converts to {param.dtype}, got {w.dtype}.")
    if not torch.isfinite(w).all():
        raise NonFiniteError(f"{param.title} needs finite entries, got a matrix with NaN or infinity.")


@torch.no_grad()
def check_frame(param: OrthogonalParam, w: Tensor) -> Tensor:
    """Returns the nearest exact frame in float64 or complex128; raises an error where W is none."""
    check_tensor(param, w)
    dtype = tensors.coarser(param.dtype, w.dtype)
    error, permitted = orthogonality_error(w).max().item(), frame_tolerance(param.shape[-1], dtype)
    if not error <= permitted:
        scale = scale_of(w, dtype)
        hint = "" if scale is None else f", and gain={scale:.7g} of sk.orthogonal makes weights of this scale"
        raise NotAFrameError(
            f"{param.title} needs orthonormal columns (rows, if wide), ||W^H W - I||_F <= {permitted:.2g}, got "
            f"{error:.2g}; sk.functional.nearest_frame gives the nearest{hint}."
        )
    return nearest_frame(w.to(tensors.working_dtype(param.dtype)))


Parametrization = str | type[OrthogonalParam]  # the type of `parametrization=`: a registered name, or a class


def each_frame(frames: Frames) -> tuple[Tensor, ...]:
    """Returns what `frames` and `bare` of a map give, as a tuple."""
    return frames if isinstance(frames, tuple) else (frames,)


def rows_of(x: Tensor) -> int:
    """Returns how many vectors `linear` is given; 32 while tracing, which must not depend on it."""
    return 32 if torch.compiler.is_compiling() else x.numel() // max(1, x.shape[-1])
