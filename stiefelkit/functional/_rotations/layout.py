"""Cuts a brick-pattern mesh of rotations into diamonds, and orders its rotations and wires.

The rotation of wires (q, q + 1) in layer l sits at (u, v) = ((l + q) / 2, (l - q) / 2 - 1) of a lattice in which each
feeds (u + 1, v) and (u, v + 1), so that an m x m square of the lattice, a diamond of the mesh, turns 2m wires.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from stiefelkit.functional._packing import check_size, remembered
from stiefelkit.numbers import check_counts


def mesh_size(n: int, layers: int) -> int:
    """Returns the number of rotations in `layers` layers of a brick pattern on n wires.

    >>> mesh_size(6, 6), mesh_size(7, 7), mesh_size(7, 3)
    (15, 21, 9)
    """
    check_counts("mesh_size", n=n, layers=layers)
    return (layers + 1) // 2 * (n // 2) + layers // 2 * ((n - 1) // 2)


def check_angles(who: str, angle: Tensor, phase: Tensor | None, size: int) -> None:
    """Raises ShapeError unless there are so many angles, and as many phases where there are phases."""
    check_size(who, "angles", angle, size)
    if phase is not None:
        check_size(who, "phases", phase, size)


@dataclass(frozen=True)
class MeshLayout:
    """Cuts a mesh into rows of diamonds.

    Rows t = 0, 1, ... of diamonds of size m are centred on the layers tm; even rows cut the wires at multiples of 2m,
    odd ones m further on, where the last diamond wraps around (the rotation at the seam is the identity).
    """

    n: int
    layers: int
    m: int

    @classmethod
    @functools.lru_cache(maxsize=None, typed=True)  # 8.0 is equal to 8, and no number of wires
    def of(cls, n: int, layers: int) -> "MeshLayout":
        """Returns the layout of a mesh."""
        m = 1
        while 4 * m <= layers and 8 * m <= n and 32 * m <= n + 64:
            m *= 2
        return cls(n, layers, m)

    @property
    def wires(self) -> int:
        """Number of wires, with idle ones, a multiple of 2m."""
        return -(-self.n // (2 * self.m)) * 2 * self.m

    @property
    def across(self) -> int:
        """Diamonds in a row."""
        return self.wires // (2 * self.m)

    @property
    def rows(self) -> int:
        """Rows of diamonds."""
        return (self.layers - 2) // self.m + 2

    @property
    def sizes(self) -> list[int]:
        """1, 2, 4, ..., m."""
        return [1 << i for i in range(self.m.bit_length())]

    def rows_of(self, d: Tensor) -> Sequence[Tensor]:
        """Returns the diamonds of each row, for matrices of a batch in turn, (batch * across, 2m, 2m)."""
        return d.contiguous().unflatten(0, (self.rows, -1)).unbind()

    def pad(self, x: Tensor) -> Tensor:
        """Flattens the batch and adds the idle wires."""
        x = x.reshape(-1, *x.shape[-2:])
        return F.pad(x, (0, 0, 0, self.wires - self.n)) if self.wires > self.n else x

    def cut(self, z: Tensor) -> Tensor:
        """Returns the rows of Z for each diamond of a row, (batch * across, 2m, p)."""
        return z.reshape(-1, 2 * self.m, z.shape[-1])

    def diagonal(self, k: Tensor) -> Tensor:
        """Returns the diagonal blocks of K, (batch * across, 2m, 2m)."""
        k = k.unflatten(-1, (-1, 2 * self.m)).unflatten(-3, (-1, 2 * self.m))
        return self.cut(k.diagonal(dim1=-4, dim2=-2).movedim(-1, 1))

    def roll(self, z: Tensor, t: int) -> Tensor:
        """Moves the wires so that the diamonds of row t begin at the first."""
        return z.roll(self.m, -2) if t % 2 else z

    def unroll(self, z: Tensor, t: int) -> Tensor:
        """Undoes `cut` and `roll`."""
        z = z.reshape(-1, self.wires, z.shape[-1])
        return z.roll(-self.m, -2) if t % 2 else z

    def scatter(self, v: Tensor) -> Tensor:
        """Orders coordinates (*, d) as the smallest diamonds, with zeros where there is no rotation."""
        count = self.m * self.m * self.rows * self.across
        v = v.reshape(v.shape[:-1].numel(), v.shape[-1])
        full = v.new_zeros(len(v), count).index_copy(1, _index(self, v.device), v)
        return full.unflatten(1, (-1, self.across)).transpose(0, 1).reshape(-1)

    def gather(self, full: Tensor, like: Tensor) -> Tensor:
        """Applies the adjoint of `scatter`, in the shape and dtype of the coordinates."""
        batch = like.shape[:-1].numel()
        full = full.reshape(-1, batch, self.across).transpose(0, 1).reshape(batch, -1)
        return full.index_select(1, _index(self, full.device)).reshape(like.shape).to(like.dtype)


@remembered
def _index(mesh: MeshLayout, device: torch.device) -> Tensor:
    # In numpy: while tracing with fake tensors a mask would give one of unknown size.
    there = numpy.add.outer(numpy.arange(mesh.layers), numpy.arange(max(mesh.n - 1, 0))) % 2 == 0
    layer, q = numpy.nonzero(there)
    u, v = (layer + q) // 2, (layer - q) // 2 - 1
    du, dv = u // mesh.m, v // mesh.m
    row, centre = du + dv + 1, (du - dv) % (2 * mesh.across)
    place = row * mesh.across + centre // 2
    u, v = u % mesh.m, v % mesh.m
    total = mesh.rows * mesh.across
    for size in reversed(mesh.sizes[:-1]):
        place = place + (2 * (u // size % 2) + v // size % 2) * total
        total *= 4
    return torch.tensor(place, device=device)
