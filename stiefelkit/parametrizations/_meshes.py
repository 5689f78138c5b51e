"""Layouts of plane rotations: how many there are, what they make of rows, and how angles are read off a frame."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stiefelkit.functional import (
    brickwall,
    brickwall_inverse,
    butterfly,
    butterfly_inverse,
    haar_indices,
    layer_inverse,
    mesh_size,
    rotate_butterfly,
)
from stiefelkit.tensors import dtype_of_parts

Angles = tuple[Tensor, Tensor | None, Tensor]
"""Angles and phases of all rotations, the latter None for real frames, and the entries of D."""


@dataclass(frozen=True)
class BrickWall:
    """Layers that rotate rows (0, 1), (2, 3), ... and (1, 2), (3, 4), ... by turns."""

    n: int
    layers: int
    cost_exponent = 3.0

    @property
    def rotations(self) -> int:
        return mesh_size(self.n, self.layers)

    @property
    def is_full(self) -> bool:
        """True if the mesh makes every frame."""
        return self.n <= 2 or self.layers >= self.n

    def haar_indices(self) -> Tensor:
        """Returns which of the Haar densities each angle has, for the rotations that count."""
        return haar_indices(self.n, min(self.n, self.layers))

    def frame(self, angle: Tensor, phase: Tensor | None, d: Tensor, p: int, rounded: torch.dtype | None) -> Tensor:
        """Returns the first p columns of the product, in the angles' precision, or rounded on the way if cheaper."""
        dtype = dtype_of_parts(angle.dtype, phase is not None)
        w = brickwall(torch.eye(self.n, p, dtype=dtype, device=angle.device), angle, phase, layers=self.layers)
        return w * d.to(w.dtype).unsqueeze(-1)

    def rotate(self, x: Tensor, angle: Tensor, phase: Tensor | None) -> Tensor:
        """Rotates the entries of each row of x, shape (m, n)."""
        return brickwall(x.T, angle, phase, layers=self.layers).T

    def readings(self, w: Tensor) -> Iterator[Angles]:
        """Yields what the angles of a frame may be; what they are, if the mesh is full."""
        yield _placed(*(brickwall_inverse(w) if self.is_full else layer_inverse(w)), self.rotations, 0)


@dataclass(frozen=True)
class Fft:
    """Layers that rotate rows n/2, n/4, ..., 1 apart, n a power of two; in all else as `BrickWall`."""

    n: int
    cost_exponent = 2.0

    @property
    def layers(self) -> int:
        return self.n.bit_length() - 1

    @property
    def rotations(self) -> int:
        return self.n // 2 * self.layers

    @property
    def is_full(self) -> bool:
        return self.n <= 2

    def haar_indices(self) -> Tensor:
        return torch.ones(self.rotations, device="cpu")

    def frame(self, angle: Tensor, phase: Tensor | None, d: Tensor, p: int, rounded: torch.dtype | None) -> Tensor:
        return butterfly(angle, d, phase, n=self.n, dtype=rounded)[..., :p]

    def rotate(self, x: Tensor, angle: Tensor, phase: Tensor | None) -> Tensor:
        return rotate_butterfly(x, angle, phase)

    def readings(self, w: Tensor) -> Iterator[Angles]:
        if self.is_full:
            yield _placed(*brickwall_inverse(w), self.rotations, 0)
            return
        yield _placed(*layer_inverse(w), self.rotations, self.rotations - self.n // 2)
        if w.shape[-1] == w.shape[-2]:
            yield butterfly_inverse(w)


def _placed(angle: Tensor, phase: Tensor | None, d: Tensor, size: int, start: int) -> Angles:
    """Puts the angles and phases of a part of the rotations, from a given one on, among zeros."""
    ends = (start, size - start - angle.shape[-1])
    return F.pad(angle, ends), None if phase is None else F.pad(phase, ends), d
