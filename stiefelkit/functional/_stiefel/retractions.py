r"""Retractions on the Stiefel manifold, by name, and the Cayley step as an increment that loses no digits too.

A tangent vector at W is R = W Omega + P with Omega skew (p x p) and W^H P = 0. With O = t Omega / 2, V = t P / 2,
Q = O + V^H V, K = I + Q and Y = Q K^-1 the Cayley transform of the generator that maps W to R moves W along -R to

    W+ = W - 2 V - 2 (W - V) Y = W - 2 W Y - 2 V K^-1,

so that everything but four n x p x p products is p x p. The first increment is as small as the step, and so is its
rounding; that of Omega is harmless, since the difference of a matrix and its adjoint is skew to the last bit. In the
second, which is differentiated, no term grows with the step.

A line search follows the curve of the Cayley transform: with U = W Om + V, W^H V = 0, and
K(t) = I - t Om / 2 + t^2 V^H V / 4, `cayley_retraction` takes t U to

    c(t) = (2 W + t V) K^-1 - W,    c'(t) = (V - (c + W) K') K^-1,

so that a point takes one product of n p^2 and a slope two.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stiefelkit.errors import RankError
from stiefelkit.functional._arithmetic.devices import float64_is_weak
from stiefelkit.functional._arithmetic.product import plus_product
from stiefelkit.functional._cayley.quotient import quotient_of_accretive, quotient_of_skew, short_product
from stiefelkit.functional._packing import check_alike
from stiefelkit.functional._polar import polar_factor
from stiefelkit.functional._stiefel.tangents import Tangent, skew_part, tangent_part, tangent_parts
from stiefelkit.tensors import check_tensors, working_dtype

FEW = 32  # columns below which the Gram matrix of a step is made in float64


def cayley_increment(w: Tensor, direction: Tangent, step: float | Tensor, *, defect: Tensor | None = None) -> Tensor:
    """Returns the increment that moves W by :math:`-t` along a tangent vector, of its shape and dtype.

    Args:
        w: frames, shape (*, n, p).
        direction: tangent vector at W.
        step: length t, or one for each matrix, shape (*, 1, 1).
        defect: :math:`M^H M - I` of the M that W is the rounding of, shape (*, p, p): the increment then removes it,
            for nothing from square frames, and for one product from tall ones, where it enters :math:`W^H P`.
    """
    if not (isinstance(w, Tensor) and isinstance(direction, Tangent)):
        check_tensors("cayley_increment", w, direction)
    scale, q = 0.5, direction.rotation
    if isinstance(step, Tensor):
        q = q * step
    else:
        scale *= step
    if direction.rest is None:
        y = quotient_of_skew(q, scale)
        return short_product(w, y if defect is None else y.add_(defect, alpha=-0.5))
    rest = direction.rest * (0.5 * step)
    if q.shape[-1] < FEW and not float64_is_weak(q.device):
        # MKL makes so few columns of P^H P in one sum over all rows, which rounds three times as much and more.
        wide = rest.to(working_dtype(rest.dtype))
        y = quotient_of_accretive(plus_product(q.to(wide.dtype) * scale, wide.mH, wide)).to(q.dtype)
    else:
        y = quotient_of_accretive(plus_product(q * scale, rest.mH, rest))
    if defect is not None:
        y.add_(defect, alpha=-0.5).add_(w.mH @ rest, alpha=2)
    return short_product(w - rest, y, rest, -2)


def cayley_retraction(w: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    r"""Moves frames along a tangent vector by a Cayley transform: :math:`Q = (I - A/2)^{-1} (I + A/2)`.

    With :math:`U = W Ω + V` and :math:`W^H V = 0`, :math:`A = W Ω W^H + V W^H - W V^H`.

    Q is unitary and transports tangent vectors, without changing an inner product of either metric:
    :math:`Q Z = Z + 2 W (X - W^H Z) + V X` with :math:`K X = (W - V / 2)^H Z`. Of second order for the canonical
    metric, and for square frames. Differentiable any number of times. Costs :math:`n p^2` and p x p systems.

    The Hermitian part of K is at least I, and no term grows with U: for :math:`n ≥ 2p`, where V has independent
    columns, steps may have any length. Else K holds 1 beside the square of the length, and loses it beyond 1e7 or so.

    Args:
        w: frames, shape (*, n, p), float64 or complex128.
        u: tangent vectors at W, same shape; of other vectors the tangent part counts.
        vectors: tangent vectors to transport, same shape.

    Returns:
        A tuple of the frames, then of each of the vectors there.

    Raises:
        RankError: a step is too long for its arithmetic.

    References:
        Wen, Yin, A feasible method for optimization with orthogonality constraints, Math. Program. 142, 2013.
    """
    check_alike("cayley_retraction", w, u, *vectors)
    eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    if w.shape[-2] == w.shape[-1]:
        om = skew_part(w.mH @ u)
        k = eye - om / 2
        moved = w + w @ _solve(k, om)
        return moved, *(z + w @ (om @ _solve(k, w.mH @ z)) for z in vectors)
    om, v = tangent_parts(w, u)
    p = -v / 2
    inner = p.mH @ p - om / 2
    k = eye + inner
    y, inverse = _solve(k, torch.cat([inner, eye.expand_as(inner)], dim=-1)).split(w.shape[-1], dim=-1)
    transported = []
    for z in vectors:
        s = w.mH @ z
        x = _solve(k, s + p.mH @ z)
        transported.append(z + 2 * (w @ (x - s) - p @ x))
    return w - 2 * (w @ y + p @ inverse), *transported


@dataclass(frozen=True)
class CayleyCurve:
    """The start of a curve, frames W, and its direction, Om and V; V and V^H V are None for square frames."""

    w: Tensor
    rotation: Tensor
    rest: Tensor | None
    gram: Tensor | None

    def at(self, t: float) -> "CayleyPoint":
        """Returns the point at t. Costs one product of n p^2 and a p x p inverse."""
        k = self.rotation * (-0.5 * t)
        if self.gram is not None:
            k.add_(self.gram, alpha=0.25 * t * t)
        k.diagonal(dim1=-2, dim2=-1).add_(1)
        inverse = torch.linalg.inv_ex(k).inverse
        doubled = 2 * self.w if self.rest is None else torch.add(2 * self.w, self.rest, alpha=t)
        return CayleyPoint(self, t, inverse, (doubled @ inverse).sub_(self.w))


@dataclass(frozen=True)
class CayleyPoint:
    """A point c(t) of a curve, the frame, with K(t)^-1."""

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

    def transport(self, z: Tensor) -> Tensor:
        """Transports tangent vectors (*, n, p), or a stack (k, *, n, p), isometrically in either metric."""
        curve = self.curve
        s = curve.w.mH @ z
        if curve.rest is None:
            return self.frame @ s
        x = self.inverse @ torch.sub(s, curve.rest.mH @ z, alpha=0.5 * self.t)
        return z + curve.w @ (2 * (x - s)) + curve.rest @ (self.t * x)


def cayley_curve(w: Tensor, u: Tensor) -> CayleyCurve:
    """Returns the curve of `cayley_retraction` from frames W, (*, n, p), float64 or complex128, along U's tangent part.

    >>> w, u = torch.eye(3, dtype=torch.float64)[:, :2].split(1, dim=1)
    >>> cayley_curve(w, u).at(2.0).frame.mT
    tensor([[0., 1., 0.]], dtype=torch.float64)
    """
    check_alike("cayley_curve", w, u)
    s = w.mH @ u
    if w.shape[-2] == w.shape[-1]:
        return CayleyCurve(w, skew_part(s), None, None)
    rest = u - w @ s
    return CayleyCurve(w, skew_part(s), rest, rest.mH @ rest)


def _solve(k: Tensor, b: Tensor) -> Tensor:
    try:
        return torch.linalg.solve(k, b)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        raise RankError(
            'Stiefel(retraction="cayley") needs a step shorter than 1e7 where n < 2p, got a longer one.'
        ) from None


def polar_retraction(w: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Moves frames w to those nearest to :math:`W + U`; transports by projection. Of second order, Euclidean metric.

    Takes u and vectors, of shape (*, n, p), and returns a tuple, as `cayley_retraction`; for steps up to about 1e6.

    References:
        Absil, Malick, Projection-like retractions on matrix manifolds, SIAM J. Optim. 22, 2012.
    """
    check_alike("polar_retraction", w, u, *vectors)
    moved = polar_factor(w + tangent_part(w, u), well_conditioned=True)
    return moved, *(tangent_part(moved, z) for z in vectors)


def qr_retraction(w: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Moves frames w to the Q factor of :math:`W + U`, R's diagonal positive; transports by projection. Of first order.

    Takes u and vectors, of shape (*, n, p), and returns a tuple, as `cayley_retraction`. Every step ends in a frame;
    where U has dependent columns, one of length t rounds away t eps of W.

    References:
        Absil, Mahony, Sepulchre, Optimization algorithms on matrix manifolds, 2008, section 4.1.
    """
    check_alike("qr_retraction", w, u, *vectors)
    q, r = torch.linalg.qr(w + tangent_part(w, u))
    # The diagonal is real, so its signs are constants, and the Q factor of the positive R is W itself at U = 0.
    moved = q * torch.sgn(r.detach().diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)
    return moved, *(tangent_part(moved, z) for z in vectors)


RETRACTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "cayley": cayley_retraction,
    "polar": polar_retraction,
    "qr": qr_retraction,
}
"""Name to function of frames W, tangent vectors U and further ones to transport, as `cayley_retraction`."""
