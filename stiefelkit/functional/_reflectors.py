"""Products of reflectors, panel by panel in compact WY form, on plain tensors, and the adjoint of that.

A panel of reflectors H_1 ... H_b, H_j = I - u_j u_j^H with |u_j|^2 = 2, is P = I - U T^-1 U^H, T = I + striu(U^H U)
(Joffrain et al. 2006). With U lower-trapezoidal the panel that starts at column j touches the rows from j on only,
and, where panels are applied last to first to the identity, the columns from j on: 4/3 n^3 flops for all n columns.

Backward undoes the panels, first to last: with Q = P Q' and G = dL/dQ, R = T^-H U^H Q and S = T^-H U^H G give

    Q' = Q - U R,  G' = G - U S,  dL/dU = G R^H - Q' S^H - U (N + N^H),  N = striu(S R^H) + diag(S R^H) / 2.
"""

import torch
from torch import Tensor

from stiefelkit.functional._packing import pack_trapezoid, unpack_trapezoid
from stiefelkit.functional._product import opaque
from stiefelkit.metrics import working_dtype

__all__ = ["form", "form_gradient", "reflect", "reflect_gradient", "solve_unit_triangular", "unit_reflectors"]

_PANEL = 64


def unit_reflectors(v: Tensor, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Reflectors of length sqrt 2 and what they were divided by.

    A zero reflector stays zero, by an infinite divisor, and so does its gradient. Float32 coordinates of any size can
    be squared in float64; float64 ones are scaled first.
    """
    u = unpack_trapezoid(v, n, k, dtype.is_complex)
    if v.dtype == torch.float64:
        largest = u.detach().abs().amax(-2, keepdim=True)
        largest = torch.where(largest == 0, 1.0, largest)
        length = torch.linalg.vector_norm(u / largest, dim=-2, keepdim=True) * largest
    else:
        length = torch.linalg.vector_norm(u, dim=-2, keepdim=True, dtype=working_dtype(dtype))
    divisor = torch.where(length == 0, torch.inf, length * 0.5**0.5)
    return (u / divisor).to(dtype), divisor


def solve_unit_triangular(t: Tensor, b: Tensor) -> Tensor:
    """T^-1 B for a unit upper triangular T, of which only what lies above the diagonal is read."""
    return torch.linalg.solve_triangular(t, b, upper=True, unitriangular=True)


@opaque(lambda v, d, n, k, p, dtype: v.new_empty(*v.shape[:-1], n, p, dtype=dtype))
def form(v: Tensor, d: Tensor | None, n: int, k: int, p: int, dtype: torch.dtype) -> Tensor:
    """First p columns of H_1 ... H_k D from packed reflectors, worked out in the given dtype."""
    u, _ = unit_reflectors(v, n, k, dtype)
    w = u.new_zeros(*u.shape[:-2], n, p)
    w.diagonal(dim1=-2, dim2=-1).fill_(1)
    _apply_(u, w, identity=True)
    return w if d is None else w.mul_(d.unsqueeze(-2))


@opaque(lambda v, d, w, g, n, k: torch.empty_like(v))
def form_gradient(v: Tensor, d: Tensor | None, w: Tensor, g: Tensor, n: int, k: int) -> Tensor:
    """dL/dv from W = form(v, ...), exact or rounded, and dL/dW; works in the dtype of W."""
    if n == 1:
        return torch.zeros_like(v)  # any reflector of one entry is -1
    u, divisor = unit_reflectors(v, n, k, w.dtype)
    g = _unscaled(g, d)
    w = _unscaled(w, d) if k > _PANEL else w
    return pack_trapezoid(_undo_(u, w, g, identity=True) / divisor.to(g.real.dtype)).to(v.dtype)


@opaque(lambda v, x, k, dtype: x.new_empty(x.shape, dtype=dtype))
def reflect(v: Tensor, x: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Rows (H_1 ... H_k x)^T for rows x, worked out in the given dtype."""
    u, _ = unit_reflectors(v, x.shape[-1], k, dtype)
    y = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    _apply_(u, y.mT, identity=False)
    return y


@opaque(lambda v, y, g, k: (torch.empty_like(v), g.new_empty(g.shape)))
def reflect_gradient(v: Tensor, y: Tensor, g: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """dL/dv and dL/dx from y = reflect(v, x, ...), exact or rounded, and dL/dy; works in the dtype of y."""
    u, divisor = unit_reflectors(v, y.shape[-1], k, y.dtype)
    y, g = (t.clone(memory_format=torch.contiguous_format) for t in (y, g))
    gu = _undo_(u, y.mT, g.mT, identity=False)
    return pack_trapezoid(gu / divisor.to(g.real.dtype)).to(v.dtype), g


def _unscaled(w: Tensor, d: Tensor | None) -> Tensor:
    """A copy of W D^H."""
    return w.clone() if d is None else w * d.conj().unsqueeze(-2).to(w.dtype)


def _apply_(u: Tensor, q: Tensor, identity: bool) -> None:
    """Q <- H_1 ... H_k Q in place; `identity` says that Q is the first columns of the identity."""
    k = u.shape[-1]
    for start in reversed(range(0, k, _PANEL)):
        panel, block = u[..., start:, start : start + _PANEL], q[..., start:, start * identity :]
        if identity and start + _PANEL >= k:
            inner = panel[..., : block.shape[-1], :].mH
        else:
            inner = panel.mH @ block
        _subtract_product_(block, panel, _solve(panel.mH @ panel, inner))


def _undo_(u: Tensor, q: Tensor, g: Tensor, identity: bool) -> Tensor:
    """dL/dU from Q = H_1 ... H_k Q' and G = dL/dQ, which end as Q' and dL/dQ' in place.

    If Q' is the first columns of the identity, Q and G do not end there: the last panel needs neither.
    """
    k = u.shape[-1]
    gu = torch.zeros_like(u)
    for start in range(0, k, _PANEL):
        panel = u[..., start:, start : start + _PANEL]
        block, h = (m[..., start:, start * identity :] for m in (q, g))
        t = panel.mH @ panel
        s = _solve_adjoint(t, panel.mH @ h)
        if identity and start + _PANEL >= k:
            # T^-H U^H Q = -T^-1 U^H Q', with Q' = I.
            top = block.shape[-1]
            r = -_solve(t, panel[..., :top, :].mH)
            found = h @ r.mH
            found[..., :top, :] -= s.mH
        else:
            r = _solve_adjoint(t, panel.mH @ block)
            found = h @ r.mH
            _subtract_product_(block, panel, r)
            _subtract_product_(h, panel, s)
            _subtract_product_(found, block, s.mH)
        gu[..., start:, start : start + _PANEL] = _subtract_product_(found, panel, _symmetric(s @ r.mH))
    return gu


def _solve(t: Tensor, b: Tensor) -> Tensor:
    """T^-1 B; from the right, which is up to twice as fast for rows that are contiguous."""
    return torch.linalg.solve_triangular(t.mH, b.mH, upper=False, left=False, unitriangular=True).mH


def _solve_adjoint(t: Tensor, b: Tensor) -> Tensor:
    """T^-H B."""
    return torch.linalg.solve_triangular(t, b.mH, upper=True, left=False, unitriangular=True).mH


def _symmetric(m: Tensor) -> Tensor:
    """N + N^H with N = striu(M) + diag(M) / 2."""
    n = m.triu()
    n.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    return n + n.mH


def _subtract_product_(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """C -= A B."""
    if c.dim() == 2:
        return c.addmm_(a, b, alpha=-1)
    if c.dim() == 3:
        return c.baddbmm_(a, b, alpha=-1)
    return c.sub_(a @ b)
