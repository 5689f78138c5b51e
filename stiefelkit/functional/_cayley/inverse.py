"""Coordinates of the scaled Cayley transform: the inverse of `stiefelkit.functional.cayley`."""

import torch
from torch import Tensor

from stiefelkit.functional._packing import check_tall, pack_skew

__all__ = ["cayley_inverse"]


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
    check_tall("cayley_inverse", q)
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
    """Returns the unblocked elimination on a batch of blocks, which it overwrites."""
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
