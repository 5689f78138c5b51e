"""How wide weights, convolutions and other tensors are read as frames."""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from stiefelkit.errors import OptionError, ShapeError, did_you_mean

__all__ = ["VIEWS", "View"]

VIEWS = {
    "matrix": "the last two dimensions are the matrix, those before are a batch",
    "out_by_rest": "one matrix, output channels by all other dimensions",
    "in_by_rest": "one matrix, input channels by all other dimensions",
    "per_tap": "one matrix, output by input channels, for each position of the kernel",
    "group_out_by_rest": "as out_by_rest, one matrix for each group of a convolution",
    "group_in_by_rest": "as in_by_rest, one matrix for each group",
    "group_per_tap": "as per_tap, one matrix for each group and position",
}
"""Name to words of the ways in which a weight is read as frames, `view=` of `sk.orthogonal`."""

_GROUPED = "group_"


@dataclass(frozen=True)
class View:
    """How a weight is read as frames: dimensions moved, flattened and, if the matrix is wide, its adjoint taken.

    Args:
        name: one of `VIEWS`.
        shape: shape of the weight.
        out_dim: the dimension of output channels, 0 for linear layers and convolutions, 1 for transposed ones.
        groups: how many groups the first dimension is made of, for the views of groups: that of output channels, or,
            transposed, of input channels.

    Raises:
        OptionError: no view has this name.
        ShapeError: the weight has too few dimensions for it, or is not made of so many groups.
    """

    name: str
    shape: tuple[int, ...]
    out_dim: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in VIEWS:
            raise OptionError(f"No view is named {self.name!r}{did_you_mean(self.name, VIEWS)}")
        if len(self.shape) < 2:
            raise ShapeError(f"View needs a weight of two dimensions or more, got shape {self.shape}.")
        if self.is_grouped and (self.groups < 1 or self.shape[0] % self.groups):
            raise ShapeError(f"View needs a weight of {self.groups} groups of equal size, got shape {self.shape}.")
        _ = self.is_wide, self._back  # computed here: torch.compile does not trace a cached_property

    @property
    def is_grouped(self) -> bool:
        """Whether there is a matrix for each group."""
        return self.name.startswith(_GROUPED)

    @cached_property
    def split_shape(self) -> tuple[int, ...]:
        """Shape of the weight with a dimension of its own, the first, for the groups of a view of groups."""
        return (self.groups, self.shape[0] // self.groups, *self.shape[1:]) if self.is_grouped else self.shape

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Dimensions of `split_shape` in the order in which the matrix has them."""
        every = list(range(len(self.split_shape)))
        batch, rest = (every[:1], every[1:]) if self.is_grouped else ([], every)
        out, into = rest[self.out_dim], rest[1 - self.out_dim]
        kind = self.name.removeprefix(_GROUPED)
        if kind == "matrix":
            return tuple(every)
        if kind == "per_tap":
            return (*batch, *rest[2:], out, into)
        first = out if kind == "out_by_rest" else into
        return (*batch, first, *(d for d in rest if d != first))

    @cached_property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape of the matrices before the adjoint."""
        moved = self._moved_shape
        if self.name.removeprefix(_GROUPED) in ("matrix", "per_tap"):
            return moved
        *batch, first = moved[: 1 + self.is_grouped]
        return (*batch, first, math.prod(moved[1 + self.is_grouped :]))

    @cached_property
    def is_wide(self) -> bool:
        """Whether the frame is the adjoint of the matrix."""
        return self.matrix_shape[-2] < self.matrix_shape[-1]

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of the frames, (*, n, p) with n >= p."""
        *batch, rows, columns = self.matrix_shape
        return (*batch, columns, rows) if self.is_wide else (*batch, rows, columns)

    @property
    def is_plain(self) -> bool:
        """Whether the weight is the frame as it stands."""
        return self.frame_shape == self.shape and self.order == tuple(range(len(self.split_shape)))

    def to_frame(self, w: Tensor) -> Tensor:
        """Turns a weight into frames."""
        m = w.reshape(self.split_shape).permute(self.order).reshape(self.matrix_shape)
        return m.mH if self.is_wide else m

    def from_frame(self, q: Tensor) -> Tensor:
        """Turns frames into the weight, or a stack of them, (k, *frame_shape), into k weights."""
        m = q.mH if self.is_wide else q
        if m.dim() > len(self.matrix_shape):
            m = m.reshape(-1, *self._moved_shape).permute(0, *(1 + d for d in self._back))
            return m.reshape(-1, *self.shape)
        return m.reshape(self._moved_shape).permute(self._back).reshape(self.shape)

    @cached_property
    def _moved_shape(self) -> tuple[int, ...]:
        """The dimensions of `split_shape`, in order."""
        return tuple(self.split_shape[d] for d in self.order)

    @cached_property
    def _back(self) -> tuple[int, ...]:
        """The permutation that takes `order` back."""
        return tuple(self.order.index(d) for d in range(len(self.order)))
