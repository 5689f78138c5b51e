r"""Retractions on the Stiefel manifold, and what each of them carries tangent vectors along with.

Each is a function `(w, u, *vectors) -> (w_new, *carried)` of frames and tangent vectors of shape (*, n, p) in float64
or complex128. Of U only the tangent part counts. Work is n p^2, and p x p systems; nothing of n x n is formed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stiefelkit.errors import RankError
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

        Q W = W - 2 W K^-1 (O + C) - 2 P K^-1,
        Q Z = Z + 2 W (X - W^H Z) - 2 P X,    K X = (W + P)^H Z.

    The Hermitian part of K is at least I, and no term grows with U: for n >= 2p, where P has independent columns, steps
    may have any length. Where it has not, K holds 1 beside the square of the length, and loses it beyond 1e7 or so.

    References:
        Wen, Yin, A feasible method for optimization with orthogonality constraints, Math. Program. 142, 2013.
    """
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
    carried = []
    for z in vectors:
        s = w.mH @ z
        x = _solve(k, s + p.mH @ z)
        carried.append(z + 2 * (w @ (x - s) - p @ x))
    return w - 2 * (w @ y + p @ inverse), *carried


def _solve(k: Tensor, b: Tensor) -> Tensor:
    try:
        return torch.linalg.solve(k, b)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        raise RankError(
            'Stiefel(retraction="cayley") needs a step shorter than 1e7 where n < 2p, got one beside whose square 1 '
            "vanishes."
        ) from None


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
