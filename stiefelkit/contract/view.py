"""Views: wide weights, convolutions and other tensors read as frames, and maps seen through them."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from stiefelkit.contract.composite import Wrapper
from stiefelkit.contract.param import Frames, OrthogonalParam, Position, check_tensor
from stiefelkit.errors import OptionError, ShapeError, did_you_mean, needs, shown
from stiefelkit.numbers import validate_fields_

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


def kernel_views(groups: int) -> list[str]:
    """Returns the names of the views of a kernel with so many groups."""
    return [name for name in VIEWS if name != "matrix" and name.startswith(_GROUPED) == (groups > 1)]


@dataclass(frozen=True)
class View:
    """A way to read a weight as frames: dimensions are moved and flattened; a wide matrix is replaced by its adjoint.

    Args:
        name: one of `VIEWS`.
        shape: shape of the weight.
        out_dim: the dimension of outputs, 0 for linear layers and convolutions, 1 for transposed ones and embeddings.
        groups: how many groups the first dimension is made of, for the views of groups: that of output channels, or,
            transposed, of input channels.
        blocks: how many weights of one shape stand side by side in this one, each read by itself.
        dim: along which dimension of the matrix, or of the kernel, they do: 0 or 1.
    """

    name: str
    shape: tuple[int, ...]
    out_dim: int = 0
    groups: int = 1
    blocks: int = 1
    dim: int = 0

    split_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Shape of the weight with a dimension of its own for its parts, in front of the one that they are cut from."""
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Dimensions of `split_shape` in the order in which the matrix has them."""
    matrix_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Shape of the matrices before the adjoint."""
    frame_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Shape of the frames, (*, n, p) with :math:`n ≥ p`."""
    is_wide: bool = field(init=False, repr=False, compare=False)  # true if the frame is the adjoint of the matrix
    is_plain: bool = field(init=False, repr=False, compare=False)  # true if the weight itself is the frame
    _moved_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _back: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        validate_fields_(self)
        if not isinstance(self.name, str) or self.name not in VIEWS:
            raise OptionError(f"No view is named {shown(self.name)}{did_you_mean(self.name, VIEWS)}")
        shape, kind = self.shape, self.name.removeprefix(_GROUPED)
        if len(shape) < 2:
            raise ShapeError(f"View needs a weight of two dimensions or more, got shape {shape}.")
        cut = 0 if self.is_grouped else axis_of(self.name, shape, self.dim)
        parts = self.groups if self.is_grouped else self.blocks
        if parts < 1 or shape[cut] % parts:
            raise ShapeError(f"View needs a weight of {parts} equal groups or blocks, got shape {shape}.")
        split = (*shape[:cut], parts, shape[cut] // parts, *shape[cut + 1 :]) if self.is_split else shape
        rest = list(range(len(split)))
        batch = [rest.pop(cut)] if self.is_split else []
        out, into = rest[self.out_dim], rest[1 - self.out_dim]
        if kind == "matrix":
            order = (*batch, *rest)
        elif kind == "per_tap":
            order = (*batch, *rest[2:], out, into)
        else:
            first = into if kind == "in_by_rest" else out
            order = (*batch, first, *(d for d in rest if d != first))
        moved = matrix = tuple(map(split.__getitem__, order))
        if kind not in ("matrix", "per_tap"):
            matrix = (*moved[: 1 + self.is_split], math.prod(moved[1 + self.is_split :]))
        is_wide = matrix[-2] < matrix[-1]
        frame = (*matrix[:-2], *sorted(matrix[-2:], reverse=True))
        is_plain = frame == shape and order == tuple(range(len(split)))
        vars(self).update(split_shape=split, order=order, matrix_shape=matrix, frame_shape=frame, is_wide=is_wide)
        back = tuple(sorted(range(len(order)), key=order.__getitem__))
        vars(self).update(is_plain=is_plain, _moved_shape=moved, _back=back)

    @property
    def is_grouped(self) -> bool:
        """True if there is a matrix for each group."""
        return self.name.startswith(_GROUPED)

    @property
    def is_split(self) -> bool:
        """True if there is a matrix for each of several parts, groups or blocks."""
        return self.is_grouped or self.blocks > 1

    @property
    def rms_gain(self) -> float:
        """The root of outputs over inputs of a matrix: of its rows over its columns, unless rows are inputs."""
        *_, rows, columns = self.matrix_shape
        kind = "in_by_rest" if self.name == "matrix" and self.out_dim else self.name.removeprefix(_GROUPED)
        return math.sqrt(columns / rows if kind == "in_by_rest" else rows / columns)

    def options(self) -> dict[str, Any]:
        """Returns what a checkpoint says of the view."""
        groups = {"groups": self.groups} if self.is_grouped else {}
        return {"view": self.name, **groups, **({"blocks": self.blocks, "dim": self.dim} if self.blocks > 1 else {})}

    def to_frame(self, w: Tensor) -> Tensor:
        """Turns a weight into frames."""
        m = w.reshape(self.split_shape).permute(self.order).reshape(self.matrix_shape)
        return m.mH if self.is_wide else m

    def from_frame(self, q: Tensor) -> Tensor:
        """Turns frames into the weight, or a stack of them, (k, *frame_shape), into k weights."""
        # One row is contiguous as it is, and would stay a lazy conjugate, which NumPy does not take.
        m = q.mH.resolve_conj() if self.is_wide else q
        if m.dim() > len(self.matrix_shape):
            m = m.reshape(-1, *self._moved_shape).permute(0, *(1 + d for d in self._back))
            return m.reshape(-1, *self.shape)
        return m.reshape(self._moved_shape).permute(self._back).reshape(self.shape)


@functools.lru_cache(256)
def view_of(name: str, shape: tuple[int, ...], out_dim: int, groups: int) -> View:
    """Returns the view of a whole weight; the same object for the same arguments."""
    return View(name, shape, out_dim, groups)


def axis_of(name: str, shape: Sequence[int], dim: int) -> int:
    """Returns the dimension of a weight that is dimension 0 or 1 of its matrices or its kernel."""
    return len(shape) - 2 + dim if name == "matrix" else dim


def views_of_blocks(whole: View, blocks: int | Sequence[int], dim: int) -> tuple[View, ...]:
    """Returns a view for each run of blocks of one size: so many, or of these sizes, side by side in a weight."""
    needs(dim in (0, 1), OptionError, "blocks=", "dim=0 (rows, outputs) or dim=1 (columns, inputs)", dim)
    needs(not whole.is_grouped, OptionError, "blocks=", "a view without groups", whole.name)
    axis = axis_of(whole.name, whole.shape, dim)
    length = whole.shape[axis]
    if type(blocks) is int and blocks >= 1:
        sizes = () if length % blocks else (length // blocks,) * blocks
        wanted = f"that {shown(blocks)} divides"
    elif isinstance(blocks, Sequence) and blocks and all(type(size) is int and size >= 1 for size in blocks):
        sizes, wanted = tuple(blocks), f"of size {shown(sum(blocks))}, the sum of its blocks"
    else:
        raise OptionError(f"blocks= needs how many there are, or the size of each, got {shown(blocks)}.")
    needs(sum(sizes) == length, ShapeError, "blocks=", f"a dimension {dim} {wanted}", f"shape {whole.shape}")
    runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
    shapes = [(*whole.shape[:axis], size * count, *whole.shape[axis + 1 :]) for size, count in runs]
    return tuple(replace(whole, shape=s, blocks=run[1], dim=dim) for s, run in zip(shapes, runs, strict=True))


class Viewed(Wrapper):
    """A parametrization seen through a view: the weight is `view.from_frame(inner(...))`.

    Wide weights are adjoints of tall frames, :math:`W = Q^H`, so that their rows are orthonormal. Coordinates, chart
    and traits are those of the inner map, of shape `view.frame_shape`.

    Args:
        inner: the map of the frames.
        view: which matrix of the weight is the frame.
    """

    coordinate_names: ClassVar[tuple[str, ...]] = ()
    stacks: ClassVar[bool] = True

    def __init__(self, inner: OrthogonalParam, view: View):
        super().__init__(inner, view.shape)
        if inner.shape != view.frame_shape:
            raise ShapeError(f"Viewed needs an inner map of shape {view.frame_shape}, got {inner.shape}.")
        self.view = view

    def options(self) -> dict[str, Any]:
        return {**self.inner.options(), **self.view.options()}

    def forward(self, *coordinates: Tensor) -> Tensor:
        return self.view.from_frame(self.inner(*coordinates))

    def solve(self, w: Tensor) -> Position:
        check_tensor(self, w)
        return self.inner.solve(self.view.to_frame(w))

    def nearest(self, weight: Tensor) -> Tensor:
        return self.view.from_frame(self.inner.nearest(self.view.to_frame(weight)))

    def project(self, weight: Tensor) -> Tensor:
        return self.view.from_frame(self.inner.project(self.view.to_frame(weight)))

    def frames(self, weight: Tensor) -> Frames:
        return self.inner.frames(self.view.to_frame(weight))

    def bare(self, *coordinates: Tensor) -> Frames:
        return self.inner.bare(*coordinates)

    def extra_repr(self) -> str:
        return f"view={self.view.name!r}, shape={self.shape}"
