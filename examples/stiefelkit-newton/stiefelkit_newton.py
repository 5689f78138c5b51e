"""Orthogonal and unitary weights as polar factors of free matrices, by Newton-Schulz."""

import torch

from stiefelkit import OrthogonalParam, Traits

__all__ = ["Newton"]

STEPS = 48
"""Each takes the smallest singular value, as long as it is small, to 1.5 times itself: from 1e-7 to 1."""


class Newton(OrthogonalParam):
    """W = X (X^H X)^(-1/2), the orthogonal polar factor of the free matrix X = I + M, by products alone.

    X is scaled to norm 1, then X <- X (3 I - X^H X) / 2, 48 times in float64, and rounded once: with no inverse and no
    value read, on a device as on a CPU. I is n x p with ones on the diagonal, so M = 0 is the identity, and weight
    decay of M goes there.

    Image: every frame, real and complex. A real square frame crosses from determinant 1 to -1 where X is singular,
    which W is not continuous at; a step of an optimizer goes past. Cost: 96 products of n x p with p x p, and as many
    matrices kept for the backward pass; `cayley` takes one solve.

    Args:
        shape, dtype, device, precision: as in `OrthogonalParam`.

    References:
        Higham, Functions of matrices, 2008, chapter 8.

    >>> Newton((2, 2), dtype=torch.float32)(torch.tensor([[1.0, 0.0], [0.0, -3.0]]))
    tensor([[ 1.,  0.],
            [ 0., -1.]])
    """

    coordinate_names = ("free",)

    @classmethod
    def examples(cls):
        """One entry, square, odd, tall, one column, batched."""
        return [(shape, {}) for shape in ((1, 1), (4, 4), (7, 3), (5, 1), (2, 5, 5))]

    @property
    def traits(self):
        """Onto; the coordinates decide on the determinant."""
        *_, n, p = self.shape
        component = "connected" if self.is_complex or n > p else "coordinates"
        return Traits(onto=True, invertible=True, exact=True, component=component, cost_exponent=3)

    @property
    def coordinates(self):
        """`free`: M, with [Re, Im] last if complex."""
        return {"free": (*self.shape, 2) if self.is_complex else self.shape}

    def forward(self, free):
        """Maps coordinates to frames of shape (*, n, p)."""
        x = self._identity(free.device) + (torch.view_as_complex(free.double()) if self.is_complex else free.double())
        x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        for _ in range(STEPS):
            x = 1.5 * x - 0.5 * x @ (x.mH @ x)
        return x.to(self.dtype)  # one rounding, at the end

    def invert(self, w):
        """A frame is its own polar factor."""
        m = w - self._identity(w.device)
        return (torch.view_as_real(m) if self.is_complex else m,), {}

    def _identity(self, device):
        return torch.eye(*self.shape[-2:], dtype=torch.float64, device=device)
