"""Rotations of consecutive pairs of axes: a parametrization to begin with."""

import torch

from stiefelkit import OrthogonalParam, Traits
from stiefelkit.errors import ImageError


class Skeleton(OrthogonalParam):
    """W rotates consecutive pairs of axes, by one angle a pair.

    Image: block-diagonal rotations, real and square with n even. Cost: n^2.

    Args:
        shape, dtype, device, precision: as in `OrthogonalParam`.

    >>> Skeleton((2, 2), dtype=torch.float32)(torch.zeros(1)).diagonal()
    tensor([1., 1.])
    """

    coordinate_names = ("angle",)

    @classmethod
    def supports(cls, shape, dtype, **options):
        """Square, real, and pairs."""
        if dtype.is_complex:
            return "a real dtype"
        return None if shape[-2] == shape[-1] and shape[-1] % 2 == 0 else "a square shape with n even"

    @classmethod
    def examples(cls):
        """One pair, several, a batch: what the laws run on."""
        return [((2, 2), {}), ((6, 6), {}), ((3, 4, 4), {})]

    @property
    def traits(self):
        """What the laws hold it to."""
        return Traits(onto=False, invertible=True, exact=True, component="rotations", cost_exponent=2)

    @property
    def schemes(self):
        """Ways to draw: the first is the default."""
        return ("henaff", "identity")

    @property
    def coordinates(self):
        """`angle`, one a pair."""
        *batch, n, _ = self.shape
        return {"angle": (*batch, n // 2)}

    def forward(self, angle):
        """Maps coordinates to frames: pure, in float64, rounded once."""
        t = angle.double()
        cosine = t.cos().repeat_interleave(2, -1)
        sine = torch.stack([t.sin(), torch.zeros_like(t)], -1).flatten(-2)[..., :-1]
        w = torch.diag_embed(cosine) + torch.diag_embed(sine, -1) - torch.diag_embed(sine, 1)
        return w.to(self.dtype)

    def invert(self, w):
        """Reads the angles of an exact frame, and writes nothing."""
        pairs = torch.arange(0, self.shape[-1], 2, device=w.device)
        angle = torch.atan2(w[..., pairs + 1, pairs], w[..., pairs, pairs])
        if not torch.allclose(self(angle).double(), w, atol=1e-6):
            raise ImageError("Skeleton needs rotations of consecutive pairs, got another frame; cayley takes it.")
        return (angle,), {}
