"""The Cayley transform of a packed tangent vector, its exact backward and its inverse.

Square (Helfrich, Willmott, Ye 2018; Maduranga, Helfrich, Ye 2019): W = (I + A)^-1 (I - A) = 2 M - I, M = (I + A)^-1.
Tall: the first p columns of the n x n transform of A = [[A11, -A21^H], [A21, 0]] need a p x p inverse only,
X = (I + A11 + A21^H A21)^-1, W = [2 X - I; -2 A21 X].
"""

from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._diagonal import diagonal
from stiefelkit.functional._function import Function
from stiefelkit.functional._packing import pack_skew, pack_skew_gradient, unpack_skew
from stiefelkit.functional._polish import polish

__all__ = ["cayley", "cayley_inverse"]


def cayley(v: Tensor, n: int, p: int, *, signs: Tensor | None = None, phase: Tensor | None = None) -> Tensor:
    """Scaled Cayley transform of packed coordinates, in float64.

    Differentiable any number of times in reverse mode; composes with vmap, compile and export. Costs one p x p inverse
    and, for a tall frame, one QR factor and one product of (n - p) x p; backward two p x p products and, for a tall
    frame, three of (n - p) x p. The diagonal costs nothing: it is folded into p x p factors. Exact for coordinates up
    to about 1e6; beyond 1e8 a frame of odd size loses digits.

    Args:
        v: packed coordinates (see `unpack_skew`), shape (*, skew_size(n, p, phase is not None)), float32 or float64.
        n: rows of the frame.
        p: columns of the frame, p <= n.
        signs: real frames: fixed diagonal D, shape (*, p), any dtype; all ones when None.
        phase: complex frames: angles of D in radians, shape (*, p); the frame is complex if they are given.

    Returns:
        Frames of shape (*, n, p), float64 or complex128, tall ones in column-major order; a square W has no
        eigenvalue -1 in W D^H.
    """
    return _Cayley.apply(v, phase, signs, n, p)  # type: ignore[return-value]


class _Cayley(Function):
    """Saves the coordinates and W itself, from which M = (W D^H + I) / 2.

    A saved output keeps second derivatives right where a further saved tensor would not.
    """

    @staticmethod
    def forward(v: Tensor, phase: Tensor | None, signs: Tensor | None, n: int, p: int) -> Tensor:  # type: ignore[override]
        a11, a21 = unpack_skew(v.double(), n, p, phase is not None)
        doubled = 2 * _resolvent(a11, a21)
        d = _diagonal(phase, signs)
        top = doubled - torch.eye(p, dtype=doubled.dtype, device=doubled.device)
        if n == p:
            w = _scale(top, d)
        else:
            w = torch.cat([_scale(top, d).mT, _scale(-doubled, d).mT @ a21.mT], dim=-1).mT
        return polish(w) if v.dtype == torch.float64 else w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        v, phase, signs, ctx.n, ctx.p = inputs
        ctx.save_for_backward(v, phase, signs, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        v, phase, signs, w = ctx.saved_tensors
        n, p = ctx.n, ctx.p
        d = _diagonal(phase, signs)
        dh = None if d is None else d.conj()
        adjoint = (_scale(w[..., :p, :], dh) + torch.eye(p, dtype=w.dtype, device=w.device)).mH
        if n == p:
            g11 = adjoint @ _scale(g, dh) @ adjoint / -2
            gv = pack_skew_gradient(g11, g11[..., :0, :])
        else:
            _, a21 = unpack_skew(v.double(), n, p, phase is not None)
            g1, g2 = g[..., :p, :], g[..., p:, :]
            g11 = adjoint @ _scale(g1 - a21.mH @ g2, dh) @ adjoint / -2
            right = adjoint if dh is None else dh.unsqueeze(-1) * adjoint
            g21 = _difference((g11 + g11.mH).mT, a21.mT, right.mT, g2.mT).mT
            gv = pack_skew_gradient(g11, g21)
        g_phase = None if phase is None else (w.conj() * g).sum(-2).imag.to(phase.dtype)
        return gv.to(v.dtype), g_phase, None, None, None


def _resolvent(a11: Tensor, a21: Tensor) -> Tensor:
    """(I + A11 + A21^H A21)^-1, accurate also where A21 is large in some directions and vanishes in others.

    With [I; A21] = Q R it is Q1 (I + Q1^H A11 Q1)^-1 Q1^H, Q1 = R^-1: the Gram matrix, whose rounding would swamp the
    identity, is never formed.
    """
    eye = torch.eye(a11.shape[-1], dtype=a11.dtype, device=a11.device)
    if a21.shape[-2] == 0:
        return torch.linalg.inv(eye + a11)
    r = torch.linalg.qr(a21, mode="r")[1]
    r = torch.linalg.qr(torch.cat([eye.expand_as(a11), r], dim=-2), mode="r")[1]
    q1 = torch.linalg.solve_triangular(r, eye.expand_as(a11), upper=True)
    return q1 @ torch.linalg.inv(eye + q1.mH @ a11 @ q1) @ q1.mH


def _diagonal(phase: Tensor | None, signs: Tensor | None) -> Tensor | None:
    return None if phase is None and signs is None else diagonal(signs=signs, phase=phase)


def _scale(m: Tensor, d: Tensor | None) -> Tensor:
    return m if d is None else m * d.unsqueeze(-2)


def _difference(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Returns a b - c d."""
    return torch.addmm(a @ b, c, d, alpha=-1) if a.dim() == 2 else a @ b - c @ d


def cayley_inverse(q: Tensor, d: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Finds coordinates and a diagonal D with Q = cayley(v) D, for any frame Q.

    D is found by Gaussian elimination on I + Q1 E that picks each e_j so that its pivot has modulus >= 1 (the Schur
    complements stay contractions), so that every frame, eigenvalue -1 included, has a well-conditioned preimage; for
    real frames pairs of signs are then flipped until every |a_ij| <= 1 (square: O'Dorney 2014; Kahan 2006) and every
    column of A21 has norm <= 1.

    Args:
        q: frames of shape (*, n, p), exact to rounding in float64 or complex128.
        d: prescribed diagonal of shape (p,) or (*, p); chosen as above when None.

    Returns:
        Packed coordinates of shape (*, d) in float64 and the diagonal of shape (*, p) in the dtype of q. With a
        prescribed diagonal the coordinates are not finite, or large, where I + Q1 D^H is singular or nearly so.
    """
    n, p = q.shape[-2:]
    frames = q.reshape(-1, n, p)
    if d is None:
        d = _choose_diagonal(frames)
        if not q.is_complex():
            d = torch.stack([_flip(frame, signs) for frame, signs in zip(frames, d, strict=True)])
    else:
        d = d.to(q.dtype).expand(*q.shape[:-2], p).reshape(-1, p)
    a11, a21 = _tangent(frames, d)
    return pack_skew(a11, a21).reshape(*q.shape[:-2], -1), d.reshape(*q.shape[:-2], p)


def _tangent(q: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """A11 = 2 (I + B1)^-1 - I - A21^H A21 and A21 = -B2 (I + B1)^-1 with B = Q D^H, for a batch (b, n, p)."""
    p = q.shape[-1]
    b = q * d.conj()[:, None, :]
    eye = torch.eye(p, dtype=q.dtype, device=q.device)
    inverse, _ = torch.linalg.inv_ex(eye + b[:, :p])
    inverse = inverse + inverse @ (eye - (eye + b[:, :p]) @ inverse)
    a21 = -b[:, p:] @ inverse
    a11 = 2 * inverse - eye - a21.mH @ a21
    return (a11 - a11.mH) / 2, a21


def _choose_diagonal(q: Tensor) -> Tensor:
    """Eliminates on I + Q1 E block by block with |pivot| >= 1; returns D = conj(E), shape (b, p)."""
    p = q.shape[-1]
    t = q[:, :p].clone()
    d = torch.ones(q.shape[0], p, dtype=q.dtype, device=q.device)
    for start in range(0, p, 64):
        block, rest = slice(start, min(start + 64, p)), slice(min(start + 64, p), p)
        d[:, block] = _pivot_phases(t[:, block, block].clone())
        scaled = d[:, block].conj()[:, :, None] * t[:, block, rest]
        eye = torch.eye(t[:, block].shape[1], dtype=t.dtype, device=t.device)
        # E (I + T E)^-1 = (I + E T)^-1 E
        right = torch.linalg.solve(eye + d[:, block].conj()[:, :, None] * t[:, block, block], scaled)
        t[:, rest, rest] -= t[:, rest, block] @ right
    return d


def _pivot_phases(t: Tensor) -> Tensor:
    """The unblocked elimination on a batch of blocks, which it overwrites."""
    d = torch.ones(t.shape[:2], dtype=t.dtype, device=t.device)
    for j in range(t.shape[1]):
        pivot = t[:, j, j]
        d[:, j] = torch.where(pivot == 0, torch.ones_like(pivot), torch.sgn(pivot))
        e = d[:, j].conj()
        row = t[:, j, j + 1 :] * (e / (1 + pivot * e))[:, None]
        t[:, j + 1 :, j + 1 :] -= t[:, j + 1 :, j, None] * row[:, None, :]
    return d


def _flip(q: Tensor, d: Tensor, tolerance: float = 1e-6) -> Tensor:
    """Flips signs of a real diagonal while a principal minor (order 1 or 2) of M = A11 + A21^T A21 exceeds 1.

    Flipping the set S multiplies |det(I + B1)|, which is bounded by 2^p, by |det M_SS|, so this ends. Each flip is a
    principal pivot of [M; A21], O(np).
    """
    p = q.shape[-1]
    a11, a21 = (block[0] for block in _tangent(q[None], d[None]))
    table = torch.cat([a11 + a21.mT @ a21, a21])
    d = d.clone()
    while True:
        m = table[:p]
        diagonal = m.diagonal()
        value, single = diagonal.max(dim=0)
        if value > 1 + tolerance:
            chosen = single[None]
        else:
            minors = diagonal[:, None] * diagonal - m * m.mT
            value, flat = minors.flatten().max(dim=0)
            if value <= (1 + tolerance) ** 2:
                return d
            chosen = torch.stack([flat // p, flat % p])
        inverse = torch.linalg.inv(m[chosen][:, chosen])
        across = inverse @ m[chosen]
        columns = table[:, chosen]
        table = table - columns @ across
        table[:, chosen] = -columns @ inverse
        table[chosen] = across
        table[chosen[:, None], chosen] = inverse
        d[chosen] *= -1
