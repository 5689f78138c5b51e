"""Steps along the Stiefel manifold by the Cayley transform, as increments that lose no digits.

A tangent vector at W is R = W Omega + P with Omega skew (p x p) and W^H P = 0. With O = t Omega / 2, V = t P / 2,
Q = O + V^H V and Y = Q (I + Q)^-1 the Cayley transform of the generator that maps W to R moves W along -R to

    W+ = W - 2 V - 2 (W - V) Y,

so that everything but four n x p x p products is p x p, and nothing is ever n x n for a tall frame. The increment is as
small as the step, whence its rounding is, too; that of Omega does no harm, since the difference of a matrix and its
adjoint is skew to the last bit.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stiefelkit.functional._block_inverse import inverse_of_accretive

__all__ = ["METRICS", "Tangent", "cayley_increment", "norms_of", "riemannian_gradient"]

METRICS = ("canonical", "euclidean")

_TOLERANCE = 8.0
"""Relative error of Y in eps, that of the products which make Omega."""
_SMALLEST_PROBED = 129
"""Below, ||Q^2||_F says enough of ||Q||_2, and a product costs no more than asking."""
_CANCELLED = 0.1
"""Share of the gradient below which what is left of it after one projection is projected again."""


@dataclass
class Tangent:
    """A tangent vector R = W Omega + P, and what was learned on the way.

    Attributes:
        rotation: Omega, skew, shape (*, p, p).
        rest: P, W^H P = 0, shape (*, n, p); None for square frames.
        rotation_norms: ||Omega||_F of each matrix of the batch, as numbers.
        rest_norms: ||P||_F of each.
    """

    rotation: Tensor
    rest: Tensor | None
    rotation_norms: list[float]
    rest_norms: list[float]

    def norms(self, metric: str) -> list[float]:
        """Length of R in a metric: sqrt(a ||Omega||^2 + ||P||^2), a = 1/2 (canonical) or 1 (euclidean)."""
        share = 0.5 if metric == "canonical" else 1.0
        return [math.sqrt(share * o * o + r * r) for o, r in zip(self.rotation_norms, self.rest_norms, strict=True)]

    def generator_norms(self) -> list[float]:
        """Frobenius norm of the n x n skew generator that maps W to R: sqrt(||Omega||^2 + 2 ||P||^2)."""
        return [math.sqrt(o * o + 2 * r * r) for o, r in zip(self.rotation_norms, self.rest_norms, strict=True)]


def riemannian_gradient(w: Tensor, g: Tensor, metric: str = "canonical") -> Tangent:
    """Splits the Riemannian gradient of a Euclidean one.

    Canonical: R = G - W G^H W, Omega = W^H G - G^H W. Euclidean: R = G - W sym(W^H G), half that Omega. P = G - W W^H G
    in both; where little is left of G it is projected twice, since the first time leaves eps ||G|| along W.

    Args:
        w: frames, shape (*, n, p).
        g: dL/dW as torch's `.grad` has it, same shape and dtype.
        metric: one of `METRICS`.

    References:
        Edelman, Arias, Smith, The geometry of algorithms with orthogonality constraints, 1998, eq. 2.53.
    """
    s = w.mH @ g
    rotation = s - s.mH
    if metric == "euclidean":
        rotation *= 0.5
    if w.shape[-1] == w.shape[-2]:
        (norms,) = norms_of(rotation)
        return Tangent(rotation, None, norms, [0.0] * len(norms))
    rest = _minus_product(g, w, s)
    norms, rest_norms, along = norms_of(rotation, rest, s)
    left = [math.hypot(o, r) < _CANCELLED * math.hypot(a, r) for o, r, a in zip(norms, rest_norms, along, strict=True)]
    if any(left):
        rest = _minus_product(rest, w, w.mH @ rest)
        (rest_norms,) = norms_of(rest)
    return Tangent(rotation, rest, norms, rest_norms)


def cayley_increment(
    w: Tensor, direction: Tangent, step: float | Tensor, *, defect: Tensor | None = None, tolerance: float | None = None
) -> Tensor:
    """What is to be added to W to move it by -step along a tangent vector.

    Args:
        w: frames, shape (*, n, p).
        direction: tangent vector at W.
        step: length t, or one for each matrix, shape (*, 1, 1).
        defect: M^H M - I of what W is the rounding of, shape (*, p, p): the increment then takes it away as well, which
            costs nothing besides.
        tolerance: relative error that the transform may have; 8 eps when None.

    Returns:
        Tensor of the shape and dtype of W.
    """
    half = 0.5 * step
    q, shifted, rest = direction.rotation * half, w, None
    if direction.rest is not None:
        rest = direction.rest * half
        q = _plus_product(q, rest.mH, rest)
        shifted = w - rest
    y = _resolvent_increment(q, rest is None, _TOLERANCE * torch.finfo(w.dtype).eps if tolerance is None else tolerance)
    y *= 2
    if defect is not None:
        y.add_(defect, alpha=0.5)
    if rest is None:
        return torch.neg(w @ y)
    return _minus_product(rest.mul_(-2), shifted, y)


def _resolvent_increment(q: Tensor, skew: bool, tolerance: float) -> Tensor:
    """Q (I + Q)^-1 for Q with a Hermitian part that is not negative, to a relative error.

    While Q is small, by (Q - Q^2) (I - Q^2)^-1 with a polynomial in Q^2 for the last factor; else by an inverse.
    """
    square = q @ q
    size = _square_norm(square)
    first = q - square
    if size <= tolerance:
        return first
    if skew:
        constant, linear, error = _best_line(size)
        if error <= tolerance:
            return _combination(first, constant, square, linear)
    if size * size <= tolerance:
        return _combination(first, 1.0, square, 1.0)
    if size**3 <= tolerance:
        return _combination(first, 1.0, _plus_product(square, square, square), 1.0)
    shifted = q.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(1)
    return q @ inverse_of_accretive(shifted)


def _best_line(size: float) -> tuple[float, float, float]:
    """a, b and e with |(a + b x)(1 - x) - 1| <= e for -size <= x <= 0, e as small as can be.

    The error is a Chebyshev polynomial of second degree that vanishes at x = 1.
    """
    if size == 0:
        return 1.0, 1.0, 0.0
    error = 1 / (1 + 8 / size + 8 / size**2)
    return 1 - error, 8 * error / size**2, error


def _square_norm(square: Tensor) -> float:
    """About ||Q||_2^2, the largest of a batch, from Q^2: a bound or, for large matrices, a power estimate."""
    bound = max(norms_of(square)[0])
    if square.shape[-1] < _SMALLEST_PROBED or not 0 < bound < math.inf:
        return bound
    y = before = _probe(*square.shape[:-1], square.dtype, square.device)
    scale = 1 / bound
    for _ in range(3):
        before, y = y, (square @ y) * scale
    lengths = torch.linalg.vector_norm(torch.cat([before, y], dim=-1), dim=-2).view(-1, 2)
    ratios = (lengths[:, 1] / lengths[:, 0]).nan_to_num(0.0)
    return min(bound, 1.2 * bound * ratios.max().item())


@functools.lru_cache(maxsize=64)
def _probe(*sizes_dtype_device: object) -> Tensor:
    """Fixed unit vectors without a preferred direction, shape (*, n, 1)."""
    *batch, n, dtype, device = sizes_dtype_device
    with torch.inference_mode(False):
        y = (torch.arange(1, n + 1, device=device, dtype=torch.float64) ** 2).cos()  # type: ignore[operator, arg-type]
        return (y / y.norm()).to(dtype).unsqueeze(-1).expand(*batch, n, 1).contiguous()  # type: ignore[arg-type]


def norms_of(*matrices: Tensor) -> list[list[float]]:
    """Frobenius norms: a list of numbers for each tensor, one for each matrix of its batch; reads the device once."""
    norms = [torch.linalg.vector_norm(m, dim=(-2, -1)).reshape(-1) for m in matrices]
    return [norms[0].tolist()] if len(norms) == 1 else torch.stack(norms).tolist()


def _plus_product(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """C + A B."""
    return torch.addmm(c, a, b) if c.dim() == 2 else c + a @ b


def _minus_product(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """C - A B."""
    return torch.addmm(c, a, b, alpha=-1) if c.dim() == 2 else c - a @ b


def _combination(a: Tensor, constant: float, b: Tensor, linear: float) -> Tensor:
    """A (constant I + linear B)."""
    if a.dim() == 2:
        return torch.addmm(a, a, b, beta=constant, alpha=linear)
    return a * constant + (a @ b) * linear
