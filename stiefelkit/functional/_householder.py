"""Products of Householder reflectors in compact WY form, their exact backward and their inverse.

H_1 H_2 ... H_k = I - U T^-1 U^H with H_j = I - 2 u_j u_j^H / |u_j|^2 and T = striu(U^H U) + diag(U^H U) / 2
(Joffrain et al. 2006); the first p columns need U and its first p rows only.
"""

from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._function import Function
from stiefelkit.functional._packing import pack_trapezoid, unpack_trapezoid
from stiefelkit.functional._polish import polish

__all__ = ["householder", "householder_inverse"]


def householder(v: Tensor, n: int, k: int, p: int, is_complex: bool) -> Tensor:
    """First p columns of a product of k reflectors, in float64.

    Differentiable any number of times; composes with vmap, compile and export. Does not depend on the scale of a
    reflector (1e-30 to 1e30 is safe), and a zero reflector is the identity, with gradient zero.

    Args:
        v: packed reflectors, the columns of a lower-trapezoidal U (n x k) (see `unpack_trapezoid`), float32 or float64.
        n: rows of the frame.
        k: number of reflectors, k <= n.
        p: columns of the frame, p <= n.
        is_complex: whether the reflectors are complex.

    Returns:
        Frames of shape (*, n, p), float64 or complex128.
    """
    return _Householder.apply(v, n, k, p, is_complex)  # type: ignore[return-value]


def _normalised(v: Tensor, n: int, k: int, is_complex: bool) -> tuple[Tensor, Tensor]:
    """Unit reflectors and their norms; a zero reflector stays zero, by an infinite norm, and so does its gradient."""
    u = unpack_trapezoid(v.double(), n, k, is_complex)
    largest = u.detach().abs().amax(-2, keepdim=True)
    largest = torch.where(largest == 0, 1.0, largest)
    norm = torch.linalg.vector_norm(u / largest, dim=-2, keepdim=True)
    norm = torch.where(norm == 0, torch.inf, norm * largest)
    return u / norm, norm


class _Householder(Function):
    """Saves the packed reflectors alone and builds U and T again: a tenth of the work, and right second derivatives."""

    @staticmethod
    def forward(v: Tensor, n: int, k: int, p: int, is_complex: bool) -> Tensor:  # type: ignore[override]
        u, _ = _normalised(v, n, k, is_complex)
        w = torch.eye(n, p, dtype=u.dtype, device=u.device) - u @ _solve(u, u[..., :p, :].mH)
        return polish(w) if v.dtype == torch.float64 else w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        v, ctx.n, ctx.k, ctx.p, ctx.is_complex = inputs
        ctx.save_for_backward(v)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (v,) = ctx.saved_tensors
        u, norm = _normalised(v, ctx.n, ctx.k, ctx.is_complex)
        t = _triangle(u)
        y = torch.linalg.solve_triangular(t, u, upper=True, left=False)
        z = torch.linalg.solve_triangular(t.mH, u[..., : ctx.p, :], upper=False, left=False)
        gz = g @ z
        inner = y.mH @ gz
        inner = inner.triu(1) + torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1)) / 2
        gu = u @ (inner + inner.mH) - gz
        top = g.mH @ y
        gu = gu - torch.cat([top, top.new_zeros(*top.shape[:-2], ctx.n - ctx.p, ctx.k)], dim=-2)
        return pack_trapezoid(gu / norm).to(v.dtype), None, None, None, None


def _triangle(u: Tensor) -> Tensor:
    """T for unit or zero columns: its diagonal is 1/2 in either case, since a zero column adds nothing."""
    gram = u.mH @ u
    half = torch.full(gram.shape[-1:], 0.5, dtype=gram.dtype, device=gram.device)
    return gram.triu(1) + torch.diag_embed(half)


def _solve(u: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(_triangle(u), b, upper=True)


def householder_inverse(q: Tensor, k: int, signs: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Reduces a frame by k reflectors, column by column: Q = householder(v) R with R = H_k ... H_1 Q.

    Each reflector v_j = x + sgn(x_j) |x| e_j sends column j to a multiple of e_j without cancellation. If k = p, R is
    diagonal, [D; 0]. With prescribed signs, for real frames, v_j = x - d_j |x| e_j instead.

    Args:
        q: frames of shape (*, n, p), exact to rounding in float64 or complex128.
        k: number of reflectors, k <= p.
        signs: prescribed diagonal D of real frames, shape (*, p); the stable choice when None.

    Returns:
        Packed reflectors of shape (*, d) in float64; the diagonal of R's top block, (*, p); and what is left of Q off
        that diagonal, the norm of R - [D; 0] in the shape (*).
    """
    n, p = q.shape[-2:]
    r = q.reshape(-1, n, p).clone()
    u = r.new_zeros(len(r), n, k)
    for j in range(k):
        x = r[:, j:, j]
        head = x[:, 0]
        sign = torch.where(head == 0, torch.ones_like(head), torch.sgn(head))
        length = torch.linalg.vector_norm(x, dim=-1)
        u[:, j:, j] = x
        u[:, j, j] = head + sign * length
        if signs is not None:
            # x_j - d |x|, without cancellation where x_j and d have the same sign.
            d, rest = signs.reshape(-1, p)[:, j].to(r), x[:, 1:].square().sum(-1)
            u[:, j, j] = torch.where(head * d > 0, -d * rest / (head.abs() + length), head - d * length)
        norm = torch.linalg.vector_norm(u[:, :, j], dim=-1, keepdim=True)
        unit = u[:, :, j] / torch.where(norm == 0, 1.0, norm)
        r -= 2 * unit[:, :, None] * (unit[:, None, :].conj() @ r)
    d = r.diagonal(dim1=-2, dim2=-1).clone()
    r.diagonal(dim1=-2, dim2=-1).zero_()
    batch = q.shape[:-2]
    left = torch.linalg.matrix_norm(r)
    return pack_trapezoid(u).reshape(*batch, -1), d.reshape(*batch, p), left.reshape(batch)
