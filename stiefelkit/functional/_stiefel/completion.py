r"""Completions of a frame to a unitary matrix with the shortest logarithm, in float64 or complex128.

V = [Y, Z] is unitary, Y its first p columns, and L = log V is skew with eigenvalues in i [-pi, pi]. All completions
are V diag(I, Phi), with det V = 1 where real. The function F = ||L||_F^2 / 2 of the completion has the gradient C, the
lower right block of L, and the Hessian X -> P h(ad_L) X, h(i t) = (t / 2) cot(t / 2) <= 1, where P takes the lower
right block. At a minimum C = 0, and exp(t L) takes the first p columns of the identity to Y along a geodesic of the
canonical metric, of length sqrt(F); the least of the minima is a shortest one.
"""

import cmath
import math

import torch
from torch import Tensor

from stiefelkit.functional._exponential.logarithm import skew_logarithm
from stiefelkit.functional._exponential.taylor import exponential
from stiefelkit.functional._polish import polished
from stiefelkit.functional._stiefel.tangents import skew_part

_MOST_STEPS = 200
_MOST_INNER = 60
_DIRECTION = 0.7390851
"""An angle without a meaning: cos(t - _DIRECTION) parts eigenvalues e^{it} of real and of structured matrices."""


def nearest_completion(y: Tensor) -> Tensor:
    """Completes frames (*, m, p), m > p, so that Re tr V is largest, to unitary V (*, m, m), det V = 1 where real."""
    p = y.shape[-1]
    rest = torch.linalg.qr(y, mode="complete")[0][..., p:]
    left, _, right = torch.linalg.svd(rest[..., p:, :])
    z = rest @ right.mH @ left.mH
    v = torch.cat([y, z], dim=-1)
    if y.is_complex():
        return v
    wrong = torch.linalg.det(v) < 0
    weakest = z @ left[..., -1:] @ left[..., -1:].mH
    return torch.cat([y, z - 2 * wrong[..., None, None] * weakest], dim=-1)


def shorten(v: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """Turns the last columns of unitary matrices until the logarithm is shortest.

    Newton's method with trust regions, its equations solved by conjugate gradients. As h <= 1, the step -C alone would
    shorten always, but slowly; where the curvature is negative a step goes along it.

    Args:
        v: unitary matrices of shape (b, m, m), det V = 1 where real.
        p: how many columns stay.

    Returns:
        L of shape (b, m, m), and ||C||_F, shape (b).

    References:
        Steihaug, The conjugate gradient method and trust regions in large scale optimization, SIAM J. Numer. Anal. 20,
        1983.
    """
    m = v.shape[-1]
    v, (t, q) = v.clone(), spectrum(v)
    c = skew_from(t, q[..., p:, :], v.dtype)
    size, radius = torch.linalg.matrix_norm(c), torch.ones_like(t[..., 0])
    previous = torch.full_like(size, torch.inf)
    for _ in range(_MOST_STEPS):
        active = ((size > 1e-15 * m) & ~((size < 1e-12) & (previous < 1e-12))).nonzero().squeeze(-1)
        if not len(active):
            break
        step, promised = _newton_step(t[active], q[active], c[active], radius[active])
        turned = torch.cat([v[active, :, :p], v[active, :, p:] @ exponential(step, skew=True)], dim=-1)
        turned = polished(turned)
        t_new, q_new = spectrum(turned)
        old, new = t[active].square().sum(-1) / 2, t_new.square().sum(-1) / 2
        # Near the end both differences are rounding.
        slack = 1e-13 * (1 + old)
        quality = (old - new + slack) / (promised + slack)
        length = torch.linalg.matrix_norm(step)
        wider = torch.where((quality > 0.75) & (length > 0.99 * radius[active]), 2 * radius[active], radius[active])
        radius[active] = torch.where(quality < 0.25, length / 4, wider)
        previous[active] = size[active]
        taken = quality > 0.05
        where = active[taken]
        v[where], t[where], q[where] = turned[taken], t_new[taken], q_new[taken]
        c[where] = skew_from(t[where], q[where, p:], v.dtype)
        size[where] = torch.linalg.matrix_norm(c[where])
    return skew_from(t, q, v.dtype), size


def _newton_step(t: Tensor, q: Tensor, c: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Steihaug's conjugate gradients: a step within the radius, and by how much F should fall."""
    low = q[..., -c.shape[-1] :, :]
    curvature = _curvature(t)

    def bent(x: Tensor) -> Tensor:
        y = low @ (curvature * (low.mH @ x.to(low.dtype) @ low)) @ low.mH
        # Rounding's Hermitian part would grow: the curvature says nothing of it.
        return skew_part(y if c.is_complex() else y.real)

    x, r, d = torch.zeros_like(c), c, -c
    going = torch.ones_like(radius, dtype=torch.bool)
    square = start = _inner(r, r)
    enough = start * start.clamp(1e-12, 1e-2)
    for _ in range(_MOST_INNER):
        hd = bent(d)
        bend, dd, xd, xx = _inner(d, hd), _inner(d, d), _inner(x, d), _inner(x, x)
        alpha = square / bend
        over = (bend <= 0) | (xx + 2 * alpha * xd + alpha * alpha * dd >= radius * radius)
        to_edge = ((xd * xd + dd * (radius * radius - xx)).clamp(min=0).sqrt() - xd) / dd
        alpha = torch.where(going, torch.where(over, to_edge, alpha), 0.0)
        x = x + _times(alpha, d)
        r = torch.where(going[..., None, None], r + _times(alpha, hd), r)
        before, square = square, _inner(r, r)
        going = going & ~over & (square > enough)
        if not going.any():
            break
        d = torch.where(going[..., None, None], _times(square / before, d) - r, d)
    return x, -_inner(c, x) - _inner(x, bent(x)) / 2


def _curvature(t: Tensor) -> Tensor:
    """Takes h of all differences, x / 2 cot(x / 2), which falls to minus infinity at 2 pi."""
    x = (t.unsqueeze(-1) - t.unsqueeze(-2)) / 2
    small = x.abs() < 1e-4
    return torch.where(small, 1 - x * x / 3, x / torch.where(small, 1.0, x).tan()).clamp(min=-1e6)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a.conj() * b).real.sum((-2, -1))


def _times(a: Tensor, x: Tensor) -> Tensor:
    return a[..., None, None] * x


def spectrum(v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns eigenvalues and orthonormal eigenvectors of unitary matrices, V = Q diag(e^{it}) Q^H.

    Those of Re(e^{-is} V), s any angle, corrected once: eigenvalues that lie symmetric to e^{is} mix a little. Where
    that is not enough, or a real matrix has eigenvalues -1, those of `skew_logarithm`.
    """
    turn, wide = cmath.exp(-1j * _DIRECTION), v.to(torch.complex128)
    q = torch.linalg.eigh(turn * wide + turn.conjugate() * wide.mH)[1]
    inner = q.mH @ wide @ q
    values = inner.diagonal(dim1=-2, dim2=-1)
    gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
    mixed = inner - torch.diag_embed(values)
    q = polished(q + q @ (mixed * gaps.conj() / (gaps.abs().square() + 1e-24)))
    values = (q.conj() * (wide @ q)).sum(-2)
    t = values.angle()
    off = torch.linalg.matrix_norm(wide @ q - q * values.unsqueeze(-2))
    bad = ~(off <= 1e-14 * v.shape[-1])
    if not v.is_complex():
        bad = bad | (t.abs().amax(-1) > math.pi - 1e-6)
    if bad.any():
        t[bad], q[bad] = torch.linalg.eigh(-1j * skew_logarithm(v[bad])[0].to(wide.dtype))
    return t, q


def skew_from(t: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the skew part of Q diag(it) Q^H, real if the dtype is."""
    a = (q * (1j * t).unsqueeze(-2)) @ q.mH
    return skew_part(a if dtype.is_complex else a.real)
