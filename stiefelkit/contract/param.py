"""The contract that every parametrization keeps: `OrthogonalParam` and its `Traits`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit import init
from stiefelkit.errors import DtypeError, ImageError, NonFiniteError, NotAFrameError, OptionError, ShapeError, shown
from stiefelkit.functional import nearest_frame
from stiefelkit.metrics import frame_tolerance, orthogonality_error, permitted_error, permitted_return, scale_of
from stiefelkit.numbers import one_of, sizes
from stiefelkit.tensors import (
    check_dtype,
    coarser,
    computing_dtype,
    coordinate_dtype,
    followed,
    keep_precision,
    working_dtype,
)

__all__ = ["OrthogonalParam", "Parametrization", "Position", "Traits", "each_frame", "rows_of"]


Position = tuple[tuple[Tensor, ...], dict[str, Tensor]]
"""Where a frame is: its coordinates, in order, and the whole chart by name."""


Component = Literal["connected", "rotations", "chart", "coordinates"]


@dataclass(frozen=True)
class Traits:
    """Promises of one instance of a parametrization, by which the laws that apply are chosen.

    Attributes:
        onto: every frame is in the image.
        invertible: `right_inverse` works on the image.
        exact: frames are within 1.2 times the rounding limit.
        component: which part of O(n) the coordinates reach: "connected" where there is only one part (complex or
            tall frames), "rotations" for det +1 only, "chart" where a chart fixed at assignment decides,
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


class OrthogonalParam(nn.Module, ABC):
    """A map from coordinates to frames W, W^H W = I, of shape (*, n, p) with n >= p.

    A subclass implements `traits`, `coordinates`, `forward`, `initial`, `examples` and, where it can, `invert`; it may
    add a chart (buffers that stay fixed while training), reject shapes or dtypes in `supports` and apply W without
    forming it in `linear`. It holds no trainable tensor: those belong to the module that carries it, which hands
    them to `forward`.

    Laws, checked by `stiefelkit.testing`: `forward` is pure (same coordinates and chart, same bits) and never
    branches on values; its frames are exact in their dtype; its gradients are; `invert` is a right inverse.

    Args:
        shape: shape of the frame, (*, n, p).
        dtype: dtype of the frame; coordinates are kept in float32 or better (`coordinate_dtypes`).
        device: where the chart lives.
        precision: "exact", the default: within 1.2 rounding limits of a frame. "fast", where there is such: without
            what that takes, within `error_bound`.

    Raises:
        ShapeError: the shape is no frame's.
        DtypeError: the dtype is neither floating nor complex, or the map does not do its field.
        OptionError: an option is out of range.
    """

    version: ClassVar[int] = 1
    """Raised when the meaning of coordinates or chart changes, so that old checkpoints are refused."""
    precisions: ClassVar[tuple[str, ...]] = ("exact",)
    coordinate_names: ClassVar[tuple[str, ...]]
    """Every name that `coordinates` may hold, over all fields and options."""
    further_schemes: ClassVar[tuple[str, ...]] = ()
    """Names that `initial` takes beside those of `stiefelkit.init`."""
    frame_buffers: ClassVar[tuple[str, ...]] = ()
    """Names of own buffers that hold frames, [Re, Im] last if complex: averaged and mended as frames are."""
    stacks: ClassVar[bool] = False
    """Whether `forward` takes one dimension more in front of coordinates and chart, and gives a stack of weights.

    It holds for the class whose `forward` it is; a subclass with a `forward` of its own says it again. Weights whose
    class does not say it are grouped (`sk.grouped`) by `torch.vmap`.
    """
    is_attached: bool = False
    """Whether a weight has this map, and its chart with it."""

    dtype: torch.dtype

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
        check_dtype(name, dtype)
        if dtype == torch.complex32:
            raise DtypeError(f"{name} needs a complex dtype of complex64 at least, got {dtype}.")
        if not one_of(*self.precisions).holds(precision):
            raise OptionError(f"{name} needs a precision in {self.precisions}, got {shown(precision)}.")
        self.shape = frame
        self.dtype = dtype
        self.precision = precision

    @property
    def title(self) -> str:
        """The map's name in messages; a wrapper gives that of the map inside."""
        return type(self).__name__

    @property
    def is_complex(self) -> bool:
        """Whether the frame is complex."""
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
        """What this instance promises."""

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
    def coordinate_dtypes(self) -> dict[str, torch.dtype]:
        """Name to dtype of each coordinate: real and in float32 or better; on a manifold, of the weight's field."""
        free, bound = coordinate_dtype(self.dtype), computing_dtype(self.dtype)
        return {name: bound if name in self.manifolds else free for name in self.coordinates}

    @property
    def chart(self) -> dict[str, Tensor]:
        """Name to tensor of the choices that stay fixed while training."""
        return dict(self.named_buffers())

    @property
    def schemes(self) -> tuple[str, ...]:
        """Names that `initial` takes; the first is the default."""
        return (*init.SCHEMES, *self.further_schemes)

    def options(self) -> dict[str, Any]:
        """JSON-able options that change what the coordinates mean; a checkpoint with others is refused."""
        return {}

    @abstractmethod
    def forward(self, *coordinates: Tensor) -> Tensor:
        """Maps coordinates to the frame, shape `self.shape`, dtype `self.dtype`."""

    @abstractmethod
    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        """Draws coordinates and the whole chart by one of `schemes`; `initial_frame` does it if there is `invert`."""

    def invert(self, w: Tensor) -> Position:
        """Finds coordinates and a chart whose image is W, exact to rounding in float64 or complex128; writes nothing.

        Raises:
            ImageError: W is outside the image, or the map has no right inverse.
        """
        raise ImageError(
            f"{self.title} needs an init scheme (sk.reset_), since it has no right inverse, got a frame to assign."
        )

    def error_bound(self, *coordinates: Tensor) -> float:
        """Returns the largest ||W^H W - I||_F that the map promises here, of each matrix of a batch.

        That of an exact frame. A parametrization with precision "fast", or whose weights are no frames, states its own,
        which may grow with the coordinates.
        """
        return permitted_error(self.shape[-1], self.dtype)

    @property
    def return_bound(self) -> float:
        """The largest ||forward(right_inverse(W)) - W||_F of a W that is a frame to rounding."""
        return permitted_return(self.shape, self.dtype)

    def linear(self, x: Tensor, *coordinates: Tensor) -> Tensor:
        """Returns x @ W.mT for x of shape (*, p), overridden where W need not be formed."""
        return F.linear(x, self(*coordinates))

    @property
    def structure(self) -> str | None:
        """Which of `stiefelkit.scan.structures` applies W from its `factors`; None if none does."""
        return None

    def factors(self, *coordinates: Tensor) -> Tensor:
        """Returns the factors of W as `structure` has them, in the dtype of W, each rounded once."""
        raise NotImplementedError

    def prefers_factors(self, rows: int) -> bool:
        """Returns whether a recurrence over so many rows a step is faster with factors than with W, on a CPU."""
        return False

    def frames(self, weight: Tensor) -> Tensor:
        """Returns the matrices in a weight that must have orthonormal columns: itself, but for views and gains."""
        return weight

    def bare(self, *coordinates: Tensor) -> Tensor:
        """Returns the frames at these coordinates, without view and gain: what `sk.drift` measures."""
        return self.frames(self(*coordinates))

    def right_inverse(self, w: Tensor) -> tuple[Tensor, ...]:
        """Finds coordinates whose image is W; checks W first, then writes the chart and nothing else.

        Args:
            w: a frame of shape `self.shape` of the map's field, ||W^H W - I||_F <= 100 times the rounding limit.

        Returns:
            Coordinates in their `coordinate_dtypes`, with ||forward(.) - W||_F <= `return_bound` + ||W^H W - I||_F.

        Raises:
            ShapeError: wrong shape.
            DtypeError: complex W for a real map, or no floating dtype.
            NonFiniteError: W holds NaN or infinity.
            NotAFrameError: the columns of W are not orthonormal.
            ImageError: W is outside the image, or the map has no right inverse.
        """
        coordinates, chart = self.solve(w)
        self.load_chart_(chart)
        return coordinates

    def solve(self, w: Tensor) -> Position:
        """Returns what `right_inverse` returns and what it writes into the chart; writes nothing itself.

        A wrapper, whose weights are no frames of its own, hands them on to the map inside.
        """
        coordinates, chart = self.invert(self.check_frame(w))
        return self.rounded(coordinates), chart

    def rounded(self, coordinates: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the same coordinates in their `coordinate_dtypes`."""
        return tuple(c.to(dtype) for c, dtype in zip(coordinates, self.coordinate_dtypes.values(), strict=True))

    def check_chart(self, chart: Mapping[str, Tensor]) -> str | None:
        """Returns None if the chart is one that this map can have, else what it needs; for checkpoints."""
        return None

    @property
    def takes_nearest(self) -> bool:
        """Whether `sk.orthogonal`, not told otherwise, takes the frame nearest to a weight, or else draws.

        True where the default scheme is "haar"; one with an option that fixes the chart overrides it.
        """
        return self.schemes[0] == "haar"

    def nearest(self, weight: Tensor) -> Tensor:
        """Returns the weight of this shape nearest to a given one whose frames are exact, in float64 or complex128."""
        return nearest_frame(weight.to(working_dtype(self.dtype)))

    def project(self, weight: Tensor) -> Tensor:
        """Returns the weight nearest to a given one, in float64 or complex128; `nearest`, if it is a frame."""
        return self.nearest(weight)

    @torch.no_grad()
    def load_chart_(self, chart: Mapping[str, Tensor]) -> None:
        """Copies the given choices into the chart's buffers."""
        for name, value in chart.items():
            self.chart[name].copy_(value)

    def check_tensor(self, w: Tensor) -> None:
        """Raises unless W has the shape and field of the map and finite entries."""
        name = self.title
        if not isinstance(w, Tensor):
            raise DtypeError(f"{name} needs a tensor, got {type(w).__name__}.")
        if tuple(w.shape) != self.shape:
            raise ShapeError(f"{name} needs a weight of shape {self.shape}, got {tuple(w.shape)}.")
        if not (w.is_floating_point() or w.is_complex()) or (w.is_complex() and not self.is_complex):
            raise DtypeError(f"{name} needs a frame that converts to {self.dtype}, got {w.dtype}.")
        if not torch.isfinite(w).all():
            raise NonFiniteError(f"{name} needs finite entries, got a matrix with NaN or infinity.")

    @torch.no_grad()
    def check_frame(self, w: Tensor) -> Tensor:
        """Returns the nearest exact frame in float64 or complex128, or raises what `right_inverse` lists."""
        self.check_tensor(w)
        error = orthogonality_error(w).max().item()
        permitted = frame_tolerance(self.shape[-1], coarser(self.dtype, w.dtype))
        if not error <= permitted:
            scale = scale_of(w, coarser(self.dtype, w.dtype))
            hint = "" if scale is None else f", and gain={scale:.7g} of sk.orthogonal makes weights of this scale"
            raise NotAFrameError(
                f"{self.title} needs orthonormal columns (rows, if wide), ||W^H W - I||_F <= {permitted:.2g}, got "
                f"{error:.2g}; sk.functional.nearest_frame gives the nearest{hint}."
            )
        return nearest_frame(w.to(working_dtype(self.dtype)))

    def initial_frame(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        """Draws a frame by one of the schemes of `stiefelkit.init` and inverts the map there."""
        return self.invert(init.draw(scheme, self.shape, working_dtype(self.dtype), generator))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "OrthogonalParam":
        """Follows `.to(dtype)` in the frame's dtype, while chart tensors keep float32 or better."""
        dtype = followed(fn, self.dtype)
        if dtype.is_complex and not self.is_complex:
            raise DtypeError(f"{self.title} needs a real dtype for its {self.dtype} weight, got {dtype}.")
        if recurse:
            for child in self.children():
                child._apply(fn)
        self.dtype = dtype
        super()._apply(keep_precision(fn, dtype), recurse=False)
        return self

    def extra_repr(self) -> str:
        """Shape, dtype and coordinate count."""
        size = sum(math.prod(shape) for shape in self.coordinates.values())
        return f"shape={self.shape}, dtype={self.dtype}, coordinates={size}"


Parametrization = str | type[OrthogonalParam]
"""What `parametrization=` takes: a registered name, or a class."""


def each_frame(frames: Any) -> tuple[Tensor, ...]:
    """Returns what `frames` and `bare` of a map give, as a tuple; several where they are of several sizes."""
    return frames if isinstance(frames, tuple) else (frames,)


def rows_of(x: Tensor) -> int:
    """Returns how many vectors `linear` is given; 32 while tracing, which must not depend on it."""
    return 32 if torch.compiler.is_compiling() else x.numel() // max(1, x.shape[-1])
