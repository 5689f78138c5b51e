"""Products of reflectors, panel by panel in compact WY form, and their gradients, as opaque operators.

A panel of reflectors H_j = I - u_j u_j^H, |u_j|^2 = 2, j = 1 ... b, is P = H_1 ... H_b = I - U T^-1 U^H with
T = I + striu(U^H U) (Joffrain et al. 2006). With U lower-trapezoidal, the panel that starts at column j
touches the rows from j on only and, where panels are applied last to first to a diagonal, the columns from j on:
4/3 n^3 flops for a square frame.

Backward undoes the panels, first to last: with Q = P Q', G = dL/dQ, X = Q^H U T^-1 and Y = G^H U T^-1,

    Q' = Q - U X^H,  dL/dQ' = G - U Y^H,  dL/dU = G X - Q' Y - U (N + N^H),  N = striu(Y^H X) + diag(Y^H X) / 2.

Where Q' is diagonal, X = -Q'^H U T^-H needs no Q.

A trap: inside an operator that was traced, elementwise functions take a lazy conjugate for the matrix itself. Products
and triangular solvers see it.
"""

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.product import add_product_, opaque
from stiefelkit.functional._packing import pack_trapezoid, unpack_trapezoid
from stiefelkit.metrics import working_dtype

_TINY = 1e-300


@opaque(
    lambda v, d, n, k, p, dtype, saved: (
        v.new_empty(*v.shape[:-1], n, p, dtype=dtype),
        v.new_empty(*v.shape[:-1], n, k, dtype=saved),
        v.new_empty(*v.shape[:-1], k, k, dtype=saved),
        v.new_empty(*v.shape[:-1], p, k, dtype=saved),
        v.new_empty(*v.shape[:-1], 1, k, dtype=torch.float64),
    )
)
def form_panel(
    v: Tensor, d: Tensor, n: int, k: int, p: int, dtype: torch.dtype, saved: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Does the same as `form_columns` in one panel; also returns U, T, D^H U T^-H in the dtype `saved`, and lengths."""
    u, length = _unpack(v, n, k, dtype)
    t = u.mH @ u
    x = _times_inverse_adjoint(_scale_rows(u[..., :p, :], d), t)
    w = _embed(d, n)
    add_product_(w, u, x.mH, -1)
    # Compiled code counts on contiguous results.
    u, t, x = (m.to(saved, memory_format=torch.contiguous_format).contiguous() for m in (u, t, x))
    return w, u, t, x, length


@opaque(lambda u, t, x, length, d, g, size: g.new_empty(*g.shape[:-2], size, dtype=g.dtype.to_real()))
def form_panel_gradient(u: Tensor, t: Tensor, x: Tensor, length: Tensor, d: Tensor, g: Tensor, size: int) -> Tensor:
    """Returns dL/dv from dL/dW and the factors of `form_panel`, computed in the dtype of U."""
    y = _times_inverse(g.mH @ u, t)
    gu = u @ _symmetric(y.mH @ x)
    add_product_(gu, g, x, -1)
    gu[..., : d.shape[-1], :].addcmul_(y, d.unsqueeze(-1), value=-1)
    return _to_coordinates(gu, length)


@opaque(lambda v, d, n, k, p, dtype, width: v.new_empty(*v.shape[:-1], n, p, dtype=dtype))
def form_columns(v: Tensor, d: Tensor, n: int, k: int, p: int, dtype: torch.dtype, width: int) -> Tensor:
    """Returns the first p columns of H_1 ... H_k D from packed reflectors, in a dtype and panels of a width."""
    u, _ = _unpack(v, n, k, dtype)
    w = _embed(d, n)
    for start in reversed(range(0, k, width)):
        panel, block = u[..., start:, start : start + width], w[..., start:, start:]
        if start + width >= k:
            x = _scale_rows(panel[..., : p - start, :], d[..., start:])
        else:
            top = _scale_rows(panel[..., :width, :], d[..., start : start + width])
            x = torch.cat([top, block[..., width:, width:].mH @ panel[..., width:, :]], dim=-2)
        add_product_(block, panel, _times_inverse_adjoint(x, panel.mH @ panel).mH, -1)
    return w


@opaque(lambda v, d, w, g, n, k, width: torch.empty_like(v))
def form_columns_gradient(v: Tensor, d: Tensor, w: Tensor, g: Tensor, n: int, k: int, width: int) -> Tensor:
    """Returns dL/dv from W = form_columns(v, ...), exact or rounded, and dL/dW, computed in the dtype of W."""
    u, length = _unpack(v, n, k, w.dtype)
    minus = torch.zeros_like(u)
    for start in range(0, k, width):
        panel, gu = u[..., start:, start : start + width], minus[..., start:, start : start + width]
        t = panel.mH @ panel
        y = _times_inverse(g.mH @ panel, t)
        last = start + width >= k
        top = w.shape[-1] if last else width
        if last:
            x = -_times_inverse_adjoint(_scale_rows(panel[..., :top, :], d[..., start:]), t)
        else:
            x = _times_inverse(w.mH @ panel, t)
        add_product_(gu, panel, _symmetric(y.mH @ x))
        add_product_(gu, g, x, -1)
        gu[..., :top, :].addcmul_(y[..., :top, :], d[..., start : start + top, None])
        if not last:
            # Q' is D above, and zero beside D and beside what is left.
            w, g = w[..., top:, top:], g[..., top:, top:]
            w, g = (w.clone(), g.resolve_conj().clone()) if start == 0 else (w, g)
            add_product_(w, panel[..., top:, :], x[..., top:, :].mH, -1)
            add_product_(g, panel[..., top:, :], y[..., top:, :].mH, -1)
            add_product_(gu[..., top:, :], w, y[..., top:, :])
    return _to_coordinates(minus, length, -1).to(v.dtype)


@opaque(lambda v, x, k, dtype, width: x.new_empty(x.shape, dtype=dtype))
def reflect_rows(v: Tensor, x: Tensor, k: int, dtype: torch.dtype, width: int) -> Tensor:
    """Returns rows (H_1 ... H_k x)^T for rows x, computed in a dtype."""
    u, _ = _unpack(v, x.shape[-1], k, dtype)
    y = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    q = y.mT
    for start in reversed(range(0, k, width)):
        panel, block = u[..., start:, start : start + width], q[..., start:, :]
        add_product_(block, panel, _times_inverse_adjoint(block.mH @ panel, panel.mH @ panel).mH, -1)
    return y


@opaque(lambda v, y, g, k, width: (torch.empty_like(v), g.new_empty(g.shape)))
def reflect_rows_gradient(v: Tensor, y: Tensor, g: Tensor, k: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns dL/dv and dL/dx from y = reflect_rows(v, x, ...), exact or rounded, and dL/dy, in the dtype of y."""
    u, length = _unpack(v, y.shape[-1], k, y.dtype)
    rows, gx = (t.resolve_conj().clone(memory_format=torch.contiguous_format) for t in (y, g))
    minus = torch.zeros_like(u)
    for start in range(0, k, width):
        panel, gu = u[..., start:, start : start + width], minus[..., start:, start : start + width]
        q, h = rows.mT[..., start:, :], gx.mT[..., start:, :]
        t = panel.mH @ panel
        x, y = _times_inverse(q.mH @ panel, t), _times_inverse(h.mH @ panel, t)
        add_product_(gu, panel, _symmetric(y.mH @ x))
        add_product_(gu, h, x, -1)
        add_product_(q, panel, x.mH, -1)
        add_product_(h, panel, y.mH, -1)
        add_product_(gu, q, y)
    return _to_coordinates(minus, length, -1).to(v.dtype), gx


def _unpack(v: Tensor, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns reflectors of length sqrt 2, or zero, and the divisors, in float64."""
    u = unpack_trapezoid(v if v.dtype == torch.float64 else v.to(dtype.to_real()), n, k, dtype.is_complex)
    largest = None
    if v.dtype == torch.float64:
        largest = u.abs().amax(-2, keepdim=True).clamp_(min=_TINY).log2_().floor_().exp2_()
        u = u / largest
    length = torch.linalg.vector_norm(u, dim=-2, keepdim=True, dtype=working_dtype(u.dtype))
    length.mul_(0.5**0.5).clamp_(min=_TINY)
    u = u.div_(length.to(u.dtype.to_real()).clamp_(min=torch.finfo(u.dtype).tiny)).to(dtype)
    return u, length if largest is None else length.mul_(largest)


def _to_coordinates(gu: Tensor, length: Tensor, sign: int = 1) -> Tensor:
    """Returns the packed gradient of reflectors before they were divided; that of a zero reflector is zero."""
    length = length.to(gu.dtype.to_real())
    if gu.shape[-2] == gu.shape[-1]:
        gu[..., -1, -1].zero_()  # a reflector of one entry is -1, whatever the entry
    return pack_trapezoid(gu.div_(length.clamp(min=torch.finfo(length.dtype).tiny).mul_(sign)))


def _embed(d: Tensor, n: int) -> Tensor:
    # [D; 0], n x p.
    w = d.new_zeros(*d.shape[:-1], n, d.shape[-1])
    w.diagonal(dim1=-2, dim2=-1).copy_(d)
    return w


def _scale_rows(m: Tensor, d: Tensor) -> Tensor:
    return m * d.conj_physical().unsqueeze(-1)


def _times_inverse(m: Tensor, t: Tensor) -> Tensor:
    """Returns M T^-1 for unit upper triangular T, of which only what is above the diagonal is read."""
    return torch.linalg.solve_triangular(t, m, upper=True, left=False, unitriangular=True)


def _times_inverse_adjoint(m: Tensor, t: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(t.mH, m, upper=False, left=False, unitriangular=True)


def _symmetric(m: Tensor) -> Tensor:
    """Returns N + N^H with N = striu(M) + diag(M) / 2."""
    n = m.triu()
    n.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    return n + n.mT.conj_physical()
