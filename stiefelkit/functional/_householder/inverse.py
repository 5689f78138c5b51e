"""The reflectors of a frame: the inverse of `stiefelkit.functional.householder`."""

import torch
from torch import Tensor

from stiefelkit.functional._packing import check_tall, pack_trapezoid
from stiefelkit.numbers import check_counts


def householder_inverse(q: Tensor, k: int, signs: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Reduces a frame by k reflectors, column by column: Q = householder(v) R with R = H_k ... H_1 Q.

    Each reflector v_j = x + sgn(x_j) |x| e_j sends column j to a multiple of e_j without cancellation. If k = p, R is
    diagonal, [D; 0]. With prescribed signs, for real frames, v_j = x - d_j |x| e_j instead; if k < p that is done in
    the column space of Q D - I, where k columns tell all of Q: from the first k columns of Q alone a short x would tell
    where its reflector points to no more than eps / |x|.

    Args:
        q: frames of shape (*, n, p), exact to rounding in float64 or complex128.
        k: number of reflectors, k <= p.
        signs: prescribed diagonal D of real frames, shape (*, p); the stable choice when None.

    Returns:
        Packed reflectors of shape (*, d) in float64; the diagonal of R's top block, (*, p); and what is left of Q off
        that diagonal, the norm of R - [D; 0] in the shape (*).
    """
    check_tall("householder_inverse", q)
    check_counts("householder_inverse", k=k)
    n, p = q.shape[-2:]
    r = q.reshape(-1, n, p)
    if signs is None or k == p:
        u, r = _reduce(r, k, None if signs is None else signs.reshape(-1, p).to(r))
    else:
        d = signs.reshape(-1, 1, p).to(r)
        moved = r * d - torch.eye(n, p, dtype=r.dtype, device=r.device)
        basis = torch.linalg.svd(moved, full_matrices=False)[0][..., :k]
        basis = (basis @ torch.linalg.qr(basis[:, :k].mT)[0]).tril()
        for j in reversed(range(k)):  # orthonormal again, from the last column so that the zeros stay
            column, later = basis[:, :, j : j + 1], basis[:, :, j + 1 :]
            column = column - later @ (later.mT @ column)
            basis[:, :, j : j + 1] = column / torch.linalg.vector_norm(column, dim=-2, keepdim=True)
        inside = torch.linalg.lstsq(basis[:, :p], (basis.mT @ moved).mT).solution.mT
        small, _ = _reduce(inside + torch.eye(k, dtype=r.dtype, device=r.device), k, r.new_ones(len(r), k))
        u = basis @ small
        for j in range(k):
            r = _reflect_columns(r, u[:, :, j])
    d = r.diagonal(dim1=-2, dim2=-1)
    batch = q.shape[:-2]
    left = torch.linalg.matrix_norm(torch.diagonal_scatter(r, torch.zeros_like(d), dim1=-2, dim2=-1))
    return pack_trapezoid(u).reshape(*batch, -1), d.reshape(*batch, p), left.reshape(batch)


def _reduce(r: Tensor, k: int, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Reflectors (b, n, k) that reduce the first k columns of a batch, to prescribed signs if any, and what is left."""
    u = r.new_zeros(*r.shape[:2], k)
    for j in range(k):
        x = r[:, j:, j]
        head = x[:, 0]
        sign = torch.where(head == 0, torch.ones_like(head), torch.sgn(head))
        length = torch.linalg.vector_norm(x, dim=-1)
        u[:, j:, j] = x
        u[:, j, j] = head + sign * length
        if signs is not None:
            # x_j - d |x|, without cancellation where x_j and d have the same sign.
            d, rest = signs[:, j], x[:, 1:].square().sum(-1)
            u[:, j, j] = torch.where(head * d > 0, -d * rest / (head.abs() + length), head - d * length)
        r = _reflect_columns(r, u[:, :, j])
    return u, r


def _reflect_columns(r: Tensor, u: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    unit = u / torch.where(norm == 0, 1.0, norm)
    return r - 2 * unit[:, :, None] * (unit[:, None, :].conj() @ r)
