r"""The curve that a Cayley transform draws on the Stiefel manifold: its points, its slopes, and what it carries along.

With U = W Om + V, W^H V = 0, and K(t) = I - t Om / 2 + t^2 V^H V / 4, `cayley_retraction` takes t U to

    c(t) = (2 W + t V) K^-1 - W,    c'(t) = (V - (c + W) K') K^-1,

so that a line search pays one product of n p^2 for a point and two for a slope.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stiefelkit.functional._packing import check_alike
from stiefelkit.functional._stiefel.tangents import skew_part


@dataclass(frozen=True)
class CayleyCurve:
    """Where a curve begins and where it goes.

    Attributes:
        w: frames, shape (*, n, p).
        rotation: Om, skew, shape (*, p, p).
        rest: V, shape (*, n, p); None for square frames.
        gram: V^H V, shape (*, p, p), or None.
    """

    w: Tensor
    rotation: Tensor
    rest: Tensor | None
    gram: Tensor | None

    def at(self, t: float) -> "CayleyPoint":
        """Returns the point that is reached at t. Costs one product of n p^2 and a p x p inverse."""
        k = self.rotation * (-0.5 * t)
        if self.gram is not None:
            k.add_(self.gram, alpha=0.25 * t * t)
        k.diagonal(dim1=-2, dim2=-1).add_(1)
        inverse = torch.linalg.inv_ex(k).inverse
        doubled = 2 * self.w if self.rest is None else torch.add(2 * self.w, self.rest, alpha=t)
        return CayleyPoint(self, t, inverse, (doubled @ inverse).sub_(self.w))


@dataclass(frozen=True)
class CayleyPoint:
    """A point of a curve.

    Attributes:
        curve: the curve.
        t: where it is.
        inverse: K(t)^-1, shape (*, p, p).
        frame: c(t), shape (*, n, p).
    """

    curve: CayleyCurve
    t: float
    inverse: Tensor
    frame: Tensor

    def slope(self, g: Tensor) -> Tensor:
        """Returns Re tr(G^H c'(t)), shape (*), of a Euclidean gradient at c(t)."""
        curve = self.curve
        along = g.mH @ (self.frame + curve.w)
        if curve.rest is None or curve.gram is None:
            y = along @ (0.5 * curve.rotation)
        else:
            y = g.mH @ curve.rest + along @ (0.5 * curve.rotation - 0.5 * self.t * curve.gram)
        return (y * self.inverse.mT).sum(dim=(-2, -1)).real

    def carry(self, z: Tensor) -> Tensor:
        """Brings tangent vectors along, isometrically in either metric: shape (*, n, p), or a stack (k, *, n, p)."""
        curve = self.curve
        s = curve.w.mH @ z
        if curve.rest is None:
            return self.frame @ s
        x = self.inverse @ torch.sub(s, curve.rest.mH @ z, alpha=0.5 * self.t)
        return z + curve.w @ (2 * (x - s)) + curve.rest @ (self.t * x)


def cayley_curve(w: Tensor, u: Tensor) -> CayleyCurve:
    """Begins the curve that `cayley_retraction` draws from frames W in the direction of the tangent part of U.

    Args:
        w: frames, shape (*, n, p), float64 or complex128.
        u: tangent vectors at W, same shape.

    Raises:
        ShapeError: W has more columns than rows, or U another shape.

    References:
        Wen, Yin, A feasible method for optimization with orthogonality constraints, Math. Program. 142, 2013.

    >>> w, u = torch.eye(3, 1, dtype=torch.float64), torch.tensor([[0.0], [1.0], [0.0]], dtype=torch.float64)
    >>> cayley_curve(w, u).at(2.0).frame.mT
    tensor([[0., 1., 0.]], dtype=torch.float64)
    """
    check_alike("cayley_curve", w, u)
    s = w.mH @ u
    if w.shape[-2] == w.shape[-1]:
        return CayleyCurve(w, skew_part(s), None, None)
    rest = u - w @ s
    return CayleyCurve(w, skew_part(s), rest, rest.mH @ rest)
