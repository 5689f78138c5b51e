r"""Retractions on the Stiefel manifold, and what each of them carries tangent vectors along with.

Each is a function `(w, u, *vectors) -> (w_new, *carried)` of frames and tangent vectors of shape (*, n, p) in float64
or complex128. Of U only the tangent part counts. Work is n p^2, and p x p systems; nothing of n x n is formed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stiefelkit.functional import polar_factor

__all__ = ["RETRACTIONS", "cayley", "polar", "qr", "skew_part", "tangent", "tangent_parts"]


def tangent_parts(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Splits the tangent part of U into W A + V with A skew and W^H V = 0.

    Returns:
        A of shape (*, p, p) and V of shape (*, n, p).
    """
    s = w.mH @ u
    return skew_part(s), u - w @ s


def skew_part(s: Tensor) -> Tensor:
    """(S - S^H) / 2."""
    return (s - s.mH) / 2


def tangent(w: Tensor, u: Tensor) -> Tensor:
    """Projects U orthogonally on the tangent space at W: U - W (W^H U + U^H W) / 2."""
    s = w.mH @ u
    return u - w @ (s + s.mH) / 2


def cayley(w: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    r"""Moves by Q = (I - A/2)^-1 (I + A/2), A = W Om W^H + V W^H - W V^H, the skew matrix with A W = U = W Om + V.

    Q is unitary and carries tangent vectors to tangent vectors, without changing an inner product of either metric. Of
    second order for the canonical metric, and for square frames. With O = -Om/2, P = -V/2, C = P^H P, K = I + O + C:

        Q W = W - 2 P - 2 (W - P) (O + C) K^-1,
        Q Z = Z + 2 W (P^H Z - (O + C) X) - 2 P X,    K X = (W + P)^H Z.

    The Hermitian part of K is at least I, so it can be inverted at any U.

    References:
        Wen, Yin, A feasible method for optimization with orthogonality constraints, Math. Program. 142, 2013.
    """
    eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    if w.shape[-2] == w.shape[-1]:
        om = skew_part(w.mH @ u)
        k = eye - om / 2
        moved = w + w @ torch.linalg.solve(k, om)
        return moved, *(z + w @ (om @ torch.linalg.solve(k, w.mH @ z)) for z in vectors)
    om, v = tangent_parts(w, u)
    p = -v / 2
    inner = p.mH @ p - om / 2
    k = eye + inner
    # K commutes with O + C = K - I.
    y = torch.linalg.solve(k, inner)
    carried = []
    for z in vectors:
        across = p.mH @ z
        x = torch.linalg.solve(k, w.mH @ z + across)
        carried.append(z + 2 * (w @ (across - inner @ x) - p @ x))
    return w - 2 * p - 2 * (w - p) @ y, *carried


def polar(w: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """The frame nearest to W + U; carries by projection. Of second order for the Euclidean metric.

    References:
        Absil, Malick, Projection-like retractions on matrix manifolds, SIAM J. Optim. 22, 2012.
    """
    moved = polar_factor(w + tangent(w, u), well_conditioned=True)
    return moved, *(tangent(moved, z) for z in vectors)


def qr(w: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """The Q factor of W + U, with R's diagonal positive; carries by projection. Of first order.

    References:
        Absil, Mahony, Sepulchre, Optimization algorithms on matrix manifolds, 2008, section 4.1.
    """
    q, r = torch.linalg.qr(w + tangent(w, u))
    # The diagonal is real, so its signs are constants, and the Q factor of the positive R is W itself at U = 0.
    moved = q * torch.sgn(r.detach().diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)
    return moved, *(tangent(moved, z) for z in vectors)


RETRACTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {"cayley": cayley, "polar": polar, "qr": qr}
