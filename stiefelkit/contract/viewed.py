"""Parametrizations seen through a view: wide weights, convolutions and other tensors that are read as frames."""

from typing import Any, ClassVar

from torch import Tensor

from stiefelkit.contract.composite import Wrapper
from stiefelkit.contract.param import OrthogonalParam, Position, check_tensor, solve
from stiefelkit.contract.protocols import bare_frames, frames_in, nearest_weight, projected
from stiefelkit.contract.view import View
from stiefelkit.errors import ShapeError

__all__ = ["Viewed"]


class Viewed(Wrapper):
    """A parametrization seen through a view: the weight is `view.from_frame(inner(...))`.

    Wide weights are adjoints of tall frames, W = Q^H, so that their rows are orthonormal. Coordinates, chart and
    traits are those of the inner map, of shape `view.frame_shape`.

    Args:
        inner: the map of the frames.
        view: which matrix of the weight is the frame.

    Raises:
        ShapeError: the map is of another shape than the view's frames.
    """

    coordinate_names: ClassVar[tuple[str, ...]] = ()
    stacks: ClassVar[bool] = True

    def __init__(self, inner: OrthogonalParam, view: View):
        super().__init__(inner, view.shape)
        if inner.shape != view.frame_shape:
            raise ShapeError(f"Viewed needs an inner map of shape {view.frame_shape}, got {inner.shape}.")
        self.view = view

    def options(self) -> dict[str, Any]:
        """Returns the inner map's, and the view with how many groups or blocks there are."""
        return {**self.inner.options(), **self.view.options()}

    def forward(self, *coordinates: Tensor) -> Tensor:
        """Maps coordinates to the weight."""
        return self.view.from_frame(self.inner(*coordinates))

    def solve(self, w: Tensor) -> Position:
        """Hands the frames in the weight to the inner map; see `OrthogonalParam.right_inverse`."""
        check_tensor(self, w)
        return solve(self.inner, self.view.to_frame(w))

    def nearest(self, weight: Tensor) -> Tensor:
        """Returns the nearest weight whose frames are orthonormal."""
        return self.view.from_frame(nearest_weight(self.inner, self.view.to_frame(weight)))

    def project(self, weight: Tensor) -> Tensor:
        """Returns the nearest weight that the inner map may have."""
        return self.view.from_frame(projected(self.inner, self.view.to_frame(weight)))

    def frames(self, weight: Tensor) -> Tensor:
        """Returns the weight read as the inner map's."""
        return frames_in(self.inner, self.view.to_frame(weight))

    def bare(self, *coordinates: Tensor) -> Tensor:
        """Returns those of the inner map."""
        return bare_frames(self.inner, *coordinates)

    def extra_repr(self) -> str:
        """Returns the view and the weight's shape."""
        return f"view={self.view.name!r}, shape={self.shape}"
