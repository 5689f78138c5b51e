"""Steps along the Stiefel manifold by the Cayley transform, as increments that lose no digits.

A tangent vector at W is R = W Omega + P with Omega skew (p x p) and W^H P = 0. With O = t Omega / 2, V = t P / 2,
Q = O + V^H V and Y = Q (I + Q)^-1 the Cayley transform of the generator that maps W to R moves W along -R to

    W+ = W - 2 V - 2 (W - V) Y,

so that everything but four n x p x p products is p x p, and nothing is ever n x n for a tall frame. The increment is as
small as the step, whence its rounding is, too; that of Omega does no harm, since the difference of a matrix and its
adjoint is skew to the last bit.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stiefelkit.errors import OptionError, ShapeError
from stiefelkit.functional._block_inverse import inverse_of_accretive
from stiefelkit.functional._packing import minus_adjoint

__all__ = ["METRICS", "Tangent", "cayley_increment", "norms_of", "riemannian_gradient"]

METRICS = ("canonical", "euclidean")
SIDES = ("left", "right")

_TOLERANCE = 16.0
"""Relative error of Y in eps, about that of the products which make Omega."""
_DEFECT = 1 / 48
"""What the truncation of a series may add to ||W^H W - I||_F, in eps sqrt(p): 7 % of a rounding limit."""
_SMALLEST_BLOCKED = 512
"""From here on a block of A^2 is large enough to be multiplied by itself."""
_CONTRACTS = 0.25
"""||Q||_2^2 below which Y = Q - Q Y is worth a turn; beyond, a polish follows the step anyway."""
_CANCELLED = 0.25
"""Share of the gradient below which what is left of it after one projection is projected again."""


@dataclass
class Tangent:
    """A tangent vector R = W Omega + P, and what was learned on the way.

    Attributes:
        rotation: Omega, skew, shape (*, p, p).
        rest: P, W^H P = 0, shape (*, n, p); None where it is 0.
        rotation_norms: ||Omega||_F of each matrix of the batch, as numbers.
        rest_norms: ||P||_F of each.
        along_norms: ||S||_F of each, where P = G - W S is what one projection has left: P then has errors as large as
            those of W S, and -(W^H W - I) S along W. Zeros where it was projected twice, or is None.
    """

    rotation: Tensor
    rest: Tensor | None
    rotation_norms: list[float]
    rest_norms: list[float]
    along_norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Fills what was left out."""
        self.along_norms = self.along_norms or [0.0] * len(self.rotation_norms)

    def norms(self, metric: str) -> list[float]:
        """Length of R in a metric: sqrt(a ||Omega||^2 + ||P||^2), a = 1/2 (canonical) or 1 (euclidean)."""
        share = 0.5 if metric == "canonical" else 1.0
        return [math.sqrt(share * o * o + r * r) for o, r in zip(self.rotation_norms, self.rest_norms, strict=True)]

    def vector(self, w: Tensor) -> Tensor:
        """R itself."""
        along = w @ self.rotation
        return along if self.rest is None else along.add_(self.rest)

    def covector(self, w: Tensor, metric: str) -> Tensor:
        """The tangent vector whose Riemannian gradient R is: W Omega / 2 + P (canonical) or R itself (euclidean)."""
        if metric == "canonical":
            return Tangent(self.rotation * 0.5, self.rest, self.rotation_norms, self.rest_norms).vector(w)
        return self.vector(w)

    def generator_norms(self) -> list[float]:
        """Frobenius norm of the n x n skew generator that maps W to R: sqrt(||Omega||^2 + 2 ||P||^2)."""
        return [math.sqrt(o * o + 2 * r * r) for o, r in zip(self.rotation_norms, self.rest_norms, strict=True)]


def riemannian_gradient(w: Tensor, g: Tensor, metric: str = "canonical", *, side: str = "left") -> Tangent:
    """Splits the Riemannian gradient of a Euclidean one.

    Canonical: R = G - W G^H W, Omega = W^H G - G^H W. Euclidean: R = G - W sym(W^H G), half that Omega. P = G - W W^H G
    in both; where little is left of G it is projected twice, since the first time leaves eps ||G|| along W.

    Args:
        w: frames, shape (*, n, p).
        g: dL/dW as torch's `.grad` has it, same shape and dtype.
        metric: one of `METRICS`.
        side: "left"; or "right" for the part within the span of W's columns only, P = 0.

    Raises:
        OptionError: the metric or the side is not known.
        ShapeError: G has another shape, or W more columns than rows.

    References:
        Edelman, Arias, Smith, The geometry of algorithms with orthogonality constraints, 1998, eq. 2.53.
    """
    if metric not in METRICS or side not in SIDES:
        raise OptionError(
            f"riemannian_gradient needs a metric in {METRICS} and a side in {SIDES}, got {metric!r}, {side!r}."
        )
    if w.shape != g.shape or w.dim() < 2 or w.shape[-2] < w.shape[-1]:
        raise ShapeError(
            f"riemannian_gradient needs frames and gradients of one shape (*, n, p), n >= p, got {tuple(w.shape)} and "
            f"{tuple(g.shape)}."
        )
    s = w.mH @ g
    rotation = minus_adjoint(s)
    if metric == "euclidean":
        rotation *= 0.5
    if w.shape[-1] == w.shape[-2] or side == "right":
        (norms,) = norms_of(rotation)
        return Tangent(rotation, None, norms, [0.0] * len(norms))
    rest = _minus_product(g, w, s)
    norms, rest_norms, along = norms_of(rotation, rest, s)
    left = [math.hypot(o, r) < _CANCELLED * math.hypot(a, r) for o, r, a in zip(norms, rest_norms, along, strict=True)]
    if any(left):
        rest, along = _minus_product(rest, w, w.mH @ rest), []
        (rest_norms,) = norms_of(rest)
    return Tangent(rotation, rest, norms, rest_norms, along)


def cayley_increment(
    w: Tensor, direction: Tangent, step: float | Tensor, *, defect: Tensor | None = None, tolerance: float | None = None
) -> Tensor:
    """What is to be added to W to move it by -step along a tangent vector.

    Args:
        w: frames, shape (*, n, p).
        direction: tangent vector at W.
        step: length t, or one for each matrix, shape (*, 1, 1).
        defect: M^H M - I of what W is the rounding of, shape (*, p, p): the increment then takes it away as well, which
            costs nothing besides for square frames, and one product for tall ones, for what it has put into W^H P.
        tolerance: relative error that the transform of square frames may have, as far as they stay frames; 16 eps when
            None, and for tall ones, whose p x p part costs little.

    Returns:
        Tensor of the shape and dtype of W.
    """
    default = _TOLERANCE * torch.finfo(w.dtype).eps
    scale, q, size = 0.5, direction.rotation, direction.rotation_norms
    if isinstance(step, Tensor):
        q, size = q * step, []
    else:
        scale *= step
    if direction.rest is None:
        y = _of_skew(q, scale, size, default if tolerance is None else tolerance)
        return w @ (y if defect is None else y.add_(defect, alpha=-0.5))
    rest = direction.rest * (0.5 * step)
    y = _of_accretive(_plus_product(q * scale, rest.mH, rest), default)
    if defect is not None:
        y.add_(defect, alpha=-0.5).add_(w.mH @ rest, alpha=2)
    return _plus_product(rest.mul(-2), w - rest, y)


def _of_skew(a: Tensor, scale: float, norms: list[float], tolerance: float) -> Tensor:
    """-2 Q (I + Q)^-1 for Q = scale A, A skew with the given norms, to a relative error.

    While Q is small by (Q - Q^2) (I - Q^2)^-1 with a polynomial in Q^2 for the last factor, else by an inverse.
    """
    square = _square_of_hermitian(a)
    (fourths,) = norms_of(square)
    size, total = scale**2 * _largest(fourths, a), scale**2 * max(fourths)
    permitted = _permitted(tolerance, total, a)
    c = _coefficients(size, permitted)
    if c is None:
        # A better bound takes a product, and is seldom below twice a mean of the squares weighted with themselves.
        seconds = norms or norms_of(a)[0]
        mean = scale**2 * max((f * f / (x * x) for f, x in zip(fourths, seconds, strict=True) if x), default=0.0)
        if _coefficients_of_degree_2(2 * mean, permitted) is None:
            return _by_inverse(a * scale, size)
        fourth = _square_of_hermitian(square)
        size = scale**2 * _largest(norms_of(fourth)[0], a) ** 0.5
        c = _coefficients_of_degree_2(size, permitted)
        if c is None:
            return _by_inverse(a * scale, size)
        powers = fourth.mul_(scale**4 * c[2]).add_(square, alpha=scale**2 * c[1])
        return _combination(torch.sub(a, square, alpha=scale), -2 * scale * c[0], powers, -2 * scale)
    first = torch.sub(a, square, alpha=scale)
    if len(c) == 1:
        return first.mul_(-2 * scale)
    return _combination(first, -2 * scale * c[0], square, -2 * scale**3 * c[1])


def _of_accretive(q: Tensor, tolerance: float) -> Tensor:
    """-2 Q (I + Q)^-1 for Q whose Hermitian part is not negative, to a relative error."""
    square = q @ q
    size = max(norms_of(square)[0])
    first = q - square
    # What is left out is not skew: five times as much of it reaches W^H W.
    permitted = _permitted(tolerance, 5 * size, q)
    if size <= permitted:
        return first.mul_(-2)
    if size**2 <= permitted:
        return _combination(first, -2.0, square, -2.0)
    if size**3 <= permitted:
        return _combination(first, -2.0, _plus_product(square, square, square), -2.0)
    return _by_inverse(q, size)


def _permitted(tolerance: float, total: float, q: Tensor) -> float:
    """The relative error d of Y that also keeps I - 2 Y unitary: |1 - 2 y|^2 - 1 is 4 |q|^2 d.

    Over all singular values, of whose squares `total` is the root of the sum of squares, that is 4 d total at most.
    """
    share = _DEFECT * torch.finfo(q.dtype).eps * q.shape[-1] ** 0.5
    return min(tolerance, share / (4 * total)) if total > 0 else tolerance


def _by_inverse(q: Tensor, size: float) -> Tensor:
    shifted = q.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(1)
    doubled = q @ inverse_of_accretive(shifted).mul_(-2)
    # Y = Q - Q Y: as long as Q contracts, one more turn takes away most of the inverse's rounding.
    return torch.add(q @ doubled, q, alpha=2).neg_() if size < _CONTRACTS else doubled


def _coefficients(size: float, permitted: float) -> list[float] | None:
    """Those of the shortest q of degree 0 or 1 with |q(x) (1 - x) - 1| as small as permitted on -size <= x <= 0.

    That error is a Chebyshev polynomial, one degree higher, which is -1 at x = 1. None if there is no such q.
    """
    if size <= permitted:
        return [1.0]
    k = 2 / size
    error = 1 / (1 + 4 * k + 2 * k**2)
    return [1 - error, 2 * k**2 * error] if error <= permitted else None


def _coefficients_of_degree_2(size: float, permitted: float) -> list[float] | None:
    """The same for degree 2."""
    if size <= 0:
        return [1.0, 0.0, 0.0]
    k = 2 / size
    error = 1 / (1 + 9 * k + 12 * k**2 + 4 * k**3)
    return [1 - error, (4 * k**3 + 12 * k**2) * error, 4 * k**3 * error] if error <= permitted else None


def _square_of_hermitian(a: Tensor) -> Tensor:
    """A^2, Hermitian for a Hermitian or skew A: of large matrices only blocks on and above the diagonal are made."""
    n = a.shape[-1]
    if n < _SMALLEST_BLOCKED or a.is_cuda:
        return a @ a
    square, step = torch.empty_like(a), -(-n // 4)
    for start in range(0, n, step):
        here, after = slice(start, start + step), slice(start + step, n)
        square[..., here, start:] = a[..., here, :] @ a[..., start:]
        square[..., after, here] = square[..., here, after].mH
    return square


def _largest(norms: list[float], a: Tensor) -> float:
    """A bound of the largest singular value from Frobenius norms: those of a real skew matrix come in pairs."""
    return max(norms) * (1.0 if a.is_complex() else 0.5**0.5)


def norms_of(*matrices: Tensor) -> list[list[float]]:
    """Frobenius norms as numbers; reads the device once.

    Args:
        *matrices: tensors of one batch shape, (*, n, p) each.

    Returns:
        For each tensor a list, one number for each matrix of its batch.
    """
    if len(matrices) == 1 and matrices[0].dim() == 2:
        return [[torch.linalg.vector_norm(matrices[0]).item()]]
    norms = [torch.linalg.vector_norm(m, dim=(-2, -1)).reshape(-1) for m in matrices]
    return torch.stack(norms).tolist()


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
