r"""Tangent vectors of the Stiefel manifold: their parts, their two inner products, gradients and Hessians.

With b = 1 for the canonical and b = 2 for the Euclidean metric, inner(Z, Z) = (b / 2) ||W^H Z||_F^2 + ||V||_F^2 for
Z = W Y + V, W^H V = 0. The geodesic that leaves W in the direction Z has the acceleration
W (Y^2 - V^H V) + (2 - b) V Y, so that, S = W^H G,

    inner(Z, Hess Z) = Re tr(Z^H E) + Re tr(G^H (W (Y^2 - V^H V) + (2 - b) V Y)),    E the Euclidean Hessian along Z.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stiefelkit.errors import ShapeError, needs
from stiefelkit.functional._arithmetic.devices import may_sync_host
from stiefelkit.functional._arithmetic.norms import Norms, norms_of
from stiefelkit.functional._arithmetic.product import plus_product
from stiefelkit.functional._packing import SMALLEST_COPIED, check_alike, minus_adjoint
from stiefelkit.numbers import one_of
from stiefelkit.tensors import check_tensors

METRICS = {"canonical": 1, "euclidean": 2}
"""The α of each: :math:`W Ω + V`, :math:`W^H V = 0`, has the squared length :math:`α / 2 ‖Ω‖_F^2 + ‖V‖_F^2`."""
_CANCELLED = 0.25  # share of the gradient below which the rest after one projection is projected again


def alpha_of(who: str, metric: str) -> int:
    """Returns the alpha of a metric; raises OptionError if none has that name."""
    return METRICS[one_of(*METRICS).require(who, "metric", metric)]


def tangent_parts(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Splits the tangent part of U into W A + V with A skew, (*, p, p), and W^H V = 0."""
    s = w.mH @ u
    return skew_part(s), u - w @ s


def skew_part(s: Tensor) -> Tensor:
    return (s - s.mH) / 2


def tangent_part(w: Tensor, u: Tensor) -> Tensor:
    """Projects matrices u on the tangent space at frames w, both (*, n, p): :math:`U - W (W^H U + U^H W) / 2`.

    It is the orthogonal projection in the Euclidean metric.
    """
    check_tensors("tangent_part", w, u)
    s = w.mH @ u
    return u - w @ (s + s.mH) / 2


def inner_product(w: Tensor, u: Tensor, v: Tensor, metric: str = "canonical", *, keepdim: bool = False) -> Tensor:
    """Returns the inner product of tangent vectors u and v at frames w, (*, n, p), in a metric of `METRICS`.

    Euclidean: :math:`Re tr(U^H V)`; canonical: :math:`Re tr(U^H (I - W W^H / 2) V)`. Of shape (*), with `keepdim`
    (*, 1, 1).
    """
    check_tensors("inner_product", w, u, v)
    euclidean = (u.conj() * v).real.sum(dim=(-2, -1), keepdim=keepdim)
    if alpha_of("inner_product", metric) == 2:
        return euclidean
    return euclidean - ((w.mH @ u).conj() * (w.mH @ v)).real.sum(dim=(-2, -1), keepdim=keepdim) / 2


@dataclass
class Tangent:
    """A tangent vector :math:`R = W Ω + P`, with its norms.

    Attributes:
        rotation: Ω, skew, shape (*, p, p).
        rest: P, :math:`W^H P = 0`, shape (*, n, p); None where it is 0.
        rotation_norms: :math:`‖Ω‖_F` of each matrix of the batch, as `norms_of` gives them.
        rest_norms: :math:`‖P‖_F` of each.
        along_norms: :math:`‖S‖_F` of each, if :math:`P = G - W S` was projected once: P then has the errors of
            :math:`W S`, and :math:`-(W^H W - I) S` along W. Empty if it was projected twice, or is None.
        units: numbers by which all were divided, one for each; empty if by nothing.
    """

    rotation: Tensor
    rest: Tensor | None
    rotation_norms: Norms
    rest_norms: Norms
    along_norms: Norms = field(default_factory=list)
    units: Norms = field(default_factory=list)

    def norms(self, metric: str) -> Norms:
        """Returns the lengths of R: :math:`√{a ‖Ω‖^2 + ‖P‖^2}` with :math:`a = 1/2` (canonical) or 1 (euclidean)."""
        share = (METRICS[metric] / 2) ** 0.5
        return _together(self.rotation_norms, self.rest_norms, share, 1.0)

    def vector(self, w: Tensor) -> Tensor:
        """Returns R itself."""
        return self.covector(w, "euclidean")

    def covector(self, w: Tensor, metric: str) -> Tensor:
        """Returns the tangent vector whose Riemannian gradient R is: :math:`W Ω / 2 + P` or R itself."""
        along = times(w, self.rotation, METRICS[metric] / 2)
        return along if self.rest is None else along.add_(self.rest)

    def generator_norms(self) -> Norms:
        """Returns the norms of the n x n skew generators that map W to R: :math:`√{‖Ω‖^2 + 2 ‖P‖^2}`."""
        return _together(self.rotation_norms, self.rest_norms, 1.0, 2**0.5)


def times(a: Tensor, b: Tensor, share: float) -> Tensor:
    """Returns share A B, by one launch."""
    if a.dim() > 3 or share == 1:
        return a @ (b if share == 1 else b * share)
    return (torch.addmm if a.dim() == 2 else torch.baddbmm)(a, a, b, beta=0, alpha=share)


def _together(rotations: Norms, rests: Norms, a: float, b: float) -> Norms:
    """Returns the roots of (a o)^2 + (b r)^2."""
    if rotations and isinstance(rotations[0], Tensor):
        o, r = rotations[0] if a == 1 else rotations[0] * a, rests[0]
        return [torch.hypot(o, r * b) if isinstance(r, Tensor) else o]
    together = []
    for o, r in zip(rotations, rests, strict=True):  # a comprehension is a call of its own in Python 3.11
        together.append(math.hypot(a * o, b * r))
    return together


def riemannian_gradient(w: Tensor, g: Tensor, metric: str = "canonical") -> Tangent:
    """Returns the Riemannian gradient of a Euclidean one in its parts.

    Canonical: :math:`R = G - W G^H W`, :math:`Ω = W^H G - G^H W`. Euclidean: :math:`R = G - W sym(W^H G)`, half that Ω.
    :math:`P = G - W W^H G` in both, projected twice where little is left of G, and always without host syncs, since one
    projection leaves :math:`eps ‖G‖` along W.

    Args:
        w: frames, shape (*, n, p).
        g: :math:`∂L/∂W` as torch's `.grad` has it, same shape and dtype.
        metric: one of `METRICS`.

    References:
        Edelman, Arias, Smith, The geometry of algorithms with orthogonality constraints, 1998, eq. 2.53.
    """
    if not (isinstance(metric, str) and metric in METRICS):
        alpha_of("riemannian_gradient", metric)
    if not (isinstance(w, Tensor) and isinstance(g, Tensor)):
        check_tensors("riemannian_gradient", w, g)
    if w.shape != g.shape or w.dim() < 2 or not 0 < w.shape[-1] <= w.shape[-2]:
        got, one_shape = f"{tuple(w.shape)} and {tuple(g.shape)}", "frames and gradients of one shape (*, n, p)"
        needs(False, ShapeError, "riemannian_gradient", f"{one_shape}, n >= p >= 1", got)
    s = w.mH @ g
    rotation = s - s.mH if s.shape[-1] < SMALLEST_COPIED else minus_adjoint(s)
    if metric == "euclidean":
        rotation *= 0.5
    if w.shape[-1] == w.shape[-2]:
        (norms,) = norms_of(rotation)
        return Tangent(rotation, None, norms, [0.0] * len(norms))
    rest = plus_product(g, w, s, -1)
    if not may_sync_host(w):
        rest = plus_product(rest, w, w.mH @ rest, -1)
        return Tangent(rotation, rest, *norms_of(rotation, rest))
    rest_norms, along, *turning = norms_of(rest, s, *([rotation] if w.shape[-1] > 1 or w.is_complex() else []))
    norms = turning[0] if turning else [0.0] * len(along)  # one real column does not turn
    left = [math.hypot(o, r) < _CANCELLED * math.hypot(a, r) for o, r, a in zip(norms, rest_norms, along, strict=True)]
    if any(left):
        rest, along = plus_product(rest, w, w.mH @ rest, -1), []
        (rest_norms,) = norms_of(rest)
    return Tangent(rotation, rest, norms, rest_norms, along)


def riemannian_hessian(w: Tensor, g: Tensor, h: Tensor, u: Tensor, metric: str = "canonical") -> Tensor:
    r"""Turns the Euclidean Hessian of a function along U into the Riemannian one.

    With :math:`U = W Y + V`, :math:`W^H V = 0`, :math:`S = W^H G`, :math:`G' = G - W S`, :math:`a = 1 - α / 2`, and P
    the orthogonal projection on the tangent space:

        :math:`Hess U = T + a / (1 - a) W W^H T`,
        :math:`T = P(H - W (S Y + Y S) / 2 - V (S + S^H) / 2 - a G' Y + a W V^H G)`.

    For :math:`α = 2` that is :math:`P(H - U (S + S^H) / 2)`, as the Weingarten map has it. Costs some eight products of
    :math:`n p^2`. Returns tangent vectors.

    Args:
        w: frames, shape (*, n, p), float64 or complex128.
        g: Euclidean gradients there, same shape.
        h: derivatives of the Euclidean gradient in the direction U, same shape.
        u: tangent vectors, same shape.
        metric: "canonical" (:math:`α = 1`) or "euclidean" (:math:`α = 2`).

    References:
        Edelman, Arias, Smith, The geometry of algorithms with orthogonality constraints, SIAM J. Matrix Anal. 20, 1998:
        Hessians are second derivatives along geodesics.
        Absil, Mahony, Trumpf, An extrinsic look at the Riemannian Hessian, Geometric Science of Information, 2013:
        alpha = 2.
    """
    check_alike("riemannian_hessian", w, g, h, u)
    alpha = alpha_of("riemannian_hessian", metric)
    return hessian_at(w, g, alpha, 1 / alpha)(u, h)


def hessian_at(w: Tensor, g: Tensor, alpha: int, share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns `riemannian_hessian` of U and H, alpha times share as long within the columns of W."""
    s, a = w.mH @ g, 1 - alpha / 2
    normal = (s + s.mH) / 2
    beside = g - w @ s

    def along(u: Tensor, h: Tensor) -> Tensor:
        if a == 0:
            e = h - u @ normal
            c = w.mH @ e
            return e - w @ ((c + c.mH) / 2)
        y = w.mH @ u
        inside = w.mH @ h
        e = h - u @ normal - beside @ (a * y)
        c = inside + a * (u.mH @ beside) - (s @ y + y @ s) / 2
        # E is W (inside - Y normal) within the columns of W, and shall be W (C - C^H) share there.
        return e + w @ (share * (c - c.mH) - inside + y @ normal)

    return along
