"""Coordinates of the scaled Cayley transform: the inverse of `stiefelkit.functional.cayley`."""

import torch
from torch import Tensor

from stiefelkit.functional._packing import check_tall, pack_skew

_SLACK = 1e-6
"""Excess over 1 that entries of A may have."""
_ROUNDING = 1e-10
"""Moves that gain so little more than another are no better, and the phase of so small a pivot means nothing."""


def cayley_inverse(q: Tensor, d: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Finds coordinates and a diagonal D with :math:`Q = cayley(v) D`, for any frame Q.

    D is found by Gaussian elimination on :math:`I + Q_1 E` that picks each :math:`e_j` so that its pivot has modulus
    :math:`≥ 1` (the Schur complements stay contractions), so that every frame, eigenvalue -1 included, has a
    well-conditioned preimage. Then entries of D change, one or two at a time, until every :math:`|a_{ij}| ≤ 1` and
    every column of :math:`A_{21}` has norm :math:`≤ 1`, up to 1e-6. For square frames 1 is the least bound: two
    exchanged columns have :math:`|a_{12}| ≥ 1` for every D.

    Why this ends, with :math:`B = Q D^H` and :math:`X = (I + B_1)^{-1}`: :math:`A_{11}` is the skew part of
    :math:`2X - I`, and :math:`I + A_{21}^H A_{21} = X + X^H`. Multiplying entries S of :math:`D^H` by a diagonal U
    multiplies :math:`det(I + B_1)` by :math:`det(X_{SS} + U (I - X_{SS}))`. In modulus it grows

    * by :math:`|x_{jj}| + |1 - x_{jj}|` where entry j is turned to the best u; this is at least :math:`‖A_{21} e_j‖^2`,
      and at least :math:`(1 + |a_{jj}|^2)^{1/2}`;
    * by :math:`|det(I - 2 X_{SS})| ≥ |a_{ij}|^2 - |a_{ii} a_{jj}|` where entries i and j are negated.

    If no such move gains more than g, then :math:`|a_{ij}|^2 ≤ g^2 + g - 1`. So all are :math:`≤ 1` where
    :math:`|det(I + B_1)|` is largest; and an entry above :math:`1 + s` leaves a move that gains more than
    :math:`1 + 2s/3`, of which there are finitely many, since :math:`|det(I + B_1)|` is at least 1 after elimination and
    at most :math:`2^p`. Square real frames, whose :math:`a_{jj}` are 0, need pairs alone: the theorem of O'Dorney
    (2014; Kahan 2006), which Maduranga, Helfrich and Ye (2019) state for phases.

    Args:
        q: frames of shape (*, n, p), exact to rounding in float64 or complex128.
        d: prescribed diagonal of shape (p,) or (*, p); chosen as above when None.

    Returns:
        Packed coordinates of shape (*, d) in float64 and the diagonal of shape (*, p) in the dtype of q. With a
        prescribed diagonal the coordinates are not finite, or large, where :math:`I + Q_1 D^H` is singular or nearly
        so.
    """
    check_tall("cayley_inverse", q)
    n, p = q.shape[-2:]
    frames, is_free = q.reshape(-1, n, p), d is None
    d = _eliminate(frames) if d is None else d.to(q.dtype).expand(*q.shape[:-2], p).reshape(-1, p)
    eye = torch.eye(p, dtype=q.dtype, device=q.device)
    b = frames * d.conj()[:, None, :]
    inverse, _ = torch.linalg.inv_ex(eye + b[:, :p])
    if is_free:
        inverse, d = _bound(inverse, d)
        b = frames * d.conj()[:, None, :]
    inverse = inverse + inverse @ (eye - (eye + b[:, :p]) @ inverse)
    a21 = -b[:, p:] @ inverse
    a11 = 2 * inverse - eye - a21.mH @ a21
    v = pack_skew((a11 - a11.mH) / 2, a21)
    return v.reshape(*q.shape[:-2], v.shape[-1]), d.reshape(*q.shape[:-2], p)


def _eliminate(q: Tensor) -> Tensor:
    """Eliminates on I + Q1 E with |pivot| >= 1; returns D = conj(E), shape (b, p).

    LAPACK's QR factorization by reflectors does that for real frames: R is -D, but where a column needed no reflector.
    Pivots that are zero, whose sign is one of rounding, and phases, which it keeps real, take a loop.
    """
    if not q.is_complex():
        r, tau = torch.geqrf(q)
        if ((1 - tau).abs() >= _ROUNDING).all():  # the moduli of the pivots
            return torch.where(tau == 0, 1.0, -1.0) * torch.sgn(r.diagonal(dim1=-2, dim2=-1))
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
        d[:, j] = torch.where(pivot.abs() < _ROUNDING, torch.ones_like(pivot), torch.sgn(pivot))
        e = d[:, j].conj()
        row = t[:, j, j + 1 :] * (e / (1 + pivot * e))[:, None]
        t[:, j + 1 :, j + 1 :] -= t[:, j + 1 :, j, None] * row[:, None, :]
    return d


def _bound(x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Makes the moves that `cayley_inverse` tells of, for the largest entry each time; overwrites X and D."""
    p, y = x.shape[-1], x
    left, both = torch.arange(len(x), device=x.device), torch.arange(2, device=x.device)
    while True:
        size = (y - y.mH).abs()
        on = size.diagonal(dim1=-2, dim2=-1)
        on.copy_(on.maximum(2 * y.diagonal(dim1=-2, dim2=-1).real - 1))
        far = size.amax((-2, -1)) > 1 + _SLACK
        if not far.any():
            return x, d
        left, y, size = left[far], y[far], size[far].flatten(1)
        place = (size >= (1 - _ROUNDING) * size.amax(1, keepdim=True)).byte().argmax(1)  # the first of the largest
        each, pair = torch.arange(len(left), device=x.device)[:, None], torch.stack([place // p, place % p], dim=1)
        columns, rows = -y.mT[each, pair].mT, y[each, pair]
        columns[each, pair, both] += 1
        block = rows.mT[each, pair].mT
        ends = block.diagonal(dim1=-2, dim2=-1)
        flip = ((1 - 2 * ends).prod(1) - 4 * block[:, 0, 1] * block[:, 1, 0]).abs() * (pair[:, 0] != pair[:, 1])
        gains = torch.cat([flip[:, None], ends.abs() + (1 - ends).abs()], dim=1)
        move = (gains >= (1 - _ROUNDING) * gains.amax(1, keepdim=True)).byte().argmax(1, keepdim=True)
        u = torch.where(move == 1 + both, torch.sgn(ends * (1 - ends).conj()), 1)
        u = torch.where(move == 0, -1, u)
        for k in range(2):
            d[left, pair[:, k]] *= u[:, k].conj()
        # X <- X - (I - X) E V (I + E^T (I - X) E V)^-1 E^T X, with V = U - I and columns E of I.
        v = (u - 1)[:, None, :]
        inner = torch.eye(2, dtype=x.dtype, device=x.device) + columns[each, pair] * v
        y = y - columns * v @ torch.linalg.solve(inner, rows)
        x[left] = y
