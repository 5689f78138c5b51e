"""Reflectors in lower-trapezoidal form: another product of as many for any product of reflectors."""

import torch
from torch import Tensor

from stiefelkit.errors import NonFiniteError, RankError

_MOVED = 1e-8
"""Axes that a rotation moves by less than this stay where they are: below the rounding of float32."""
_INDEPENDENT = 1e-10
"""The least singular value of unit vectors that span a dimension."""


def trapezoidal_reflectors(u: Tensor, orthogonal: bool = False) -> Tensor:
    r"""Finds reflectors v_j, zero above row j, with the product of those of any nonzero vectors u_j, in their order.

    Fix(R) is the complement of a space S of dimension d <= k. Let t_1, ..., t_d be an orthonormal basis of S with t_j
    zero above row j. The reflector v = R t - t takes R t back to t, and t joins the fixed vectors, since v in S is
    normal to them: after d steps the identity is left. Where R fixes t already, there is no reflector; an even number
    is left over then, by the determinant, and is filled with equal pairs.

    Args:
        u: the vectors, of shape (n, k), k <= n.
        orthogonal: whether the vectors are made orthonormal first, by Gram-Schmidt.

    Returns:
        Tensor of shape (n, k), in the dtype of u if it is trapezoidal already, else in float64.

    Raises:
        NonFiniteError, RankError: a vector is zero or not finite; or they are dependent and to be made orthonormal.
    """
    wide, k = u.double(), u.shape[1]
    norms = torch.linalg.vector_norm(wide, dim=0)
    if not (norms.isfinite() & (norms > 0)).all():
        raise NonFiniteError("trapezoidal_reflectors needs finite vectors that are not zero, got another.")
    if not orthogonal and not u.triu(1).any():
        return u
    wide = wide / norms
    if orthogonal:
        wide, r = torch.linalg.qr(wide)
        if r.diagonal().abs().min() < 1e-6:
            raise RankError(
                "trapezoidal_reflectors needs independent vectors to make them orthonormal, got dependent ones."
            )
    basis, s, _ = torch.linalg.svd(wide, full_matrices=False)
    basis = basis[:, s > _INDEPENDENT]
    d = basis.shape[1]
    t = basis @ torch.linalg.qr(basis[:d].mT)[0]
    m = t  # R t, then its entries in the basis
    for x in wide.unbind(1)[::-1]:
        m = m - 2 * torch.outer(x, x @ m)
    m = t.mT @ m
    found = []
    for j in range(d):
        v = m[:, j] - torch.eye(d, dtype=m.dtype, device=m.device)[j]
        v[:j] = 0
        length = torch.linalg.vector_norm(v)
        if length > _MOVED:
            v = v / length
            m = m - 2 * torch.outer(v, v @ m)
            found.append(t @ v)
    pairs = torch.randn(u.shape, generator=torch.Generator().manual_seed(0), dtype=m.dtype, device="cpu").to(m.device)
    pairs = pairs[:, len(found) + 1 :: 2].repeat_interleave(2, dim=1)
    columns = torch.stack([*found, *pairs.unbind(1)], dim=1)
    rows = torch.arange(u.shape[0], device=m.device).unsqueeze(1)
    least = torch.arange(k, device=m.device)
    least[len(found) :: 2] += 1  # the vector of a pair stands in both of its columns
    return columns.where(rows >= least, 0.0)
