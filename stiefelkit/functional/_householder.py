"""Frames and maps that are products of Householder reflectors, and the reflectors of a frame.

They are applied panel by panel in compact WY form. A panel of reflectors H_j = I - u_j u_j^H, |u_j|^2 = 2, j = 1 ... b,
is P = H_1 ... H_b = I - U T^-1 U^H with T = I + striu(U^H U) (Joffrain et al. 2006). With U lower-trapezoidal, the
panel that starts at column j touches the rows from j on only and, where panels are applied last to first to a diagonal,
the columns from j on: 4/3 n^3 flops for a square frame.

Backward undoes the panels, first to last: with Q = P Q', G = dL/dQ, X = Q^H U T^-1 and Y = G^H U T^-1,

    Q' = Q - U X^H,  dL/dQ' = G - U Y^H,  dL/dU = G X - Q' Y - U (N + N^H),  N = striu(Y^H X) + diag(Y^H X) / 2.

Where Q' is diagonal, X = -Q'^H U T^-H needs no Q.

A trap: inside an operator that was traced, elementwise functions take a lazy conjugate for the matrix itself. Products
and triangular solvers see it.
"""

from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_differentiated
from stiefelkit.errors import NonFiniteError, RankError, needs
from stiefelkit.functional._arithmetic.devices import splits
from stiefelkit.functional._arithmetic.function import Context, Function, by_transposing, keep
from stiefelkit.functional._arithmetic.product import add_product_, opaque
from stiefelkit.functional._kernels.columns import reflected_columns, reflected_columns_gradient, takes_columns
from stiefelkit.functional._packing import (
    check_complex,
    check_tall,
    diagonal,
    pack_trapezoid,
    phase_gradient,
    unpack_trapezoid,
)
from stiefelkit.functional._polar import polish, polished
from stiefelkit.metrics import working_dtype
from stiefelkit.numbers import PRECISION, PRECISIONS, check_counts
from stiefelkit.tensors import check_tensors

_MOVED = 1e-8  # axes that a rotation moves by less than this stay where they are: below the rounding of float32
_INDEPENDENT = 1e-10  # the least singular value of unit vectors that span a dimension
_TINY = 1e-300


def householder(
    v: Tensor,
    n: int,
    k: int,
    p: int,
    *,
    dtype: torch.dtype = torch.float64,
    signs: Tensor | None = None,
    phase: Tensor | None = None,
    precision: str = "exact",
) -> Tensor:
    """Returns the first p columns of :math:`H_1 ... H_k D`, a product of k reflectors and a diagonal.

    Differentiable any number of times; composes with vmap, compile and export. The scale of a reflector (1e-30 to 1e30
    is safe) does not count, and a zero one is the identity, with gradient zero. Takes :math:`4/3 n^3` flops for
    :math:`n = k = p`, panel by panel; backward :math:`4 n^3`, in the dtype of the frame. Gradients that are
    differentiated themselves (create_graph=True, torch.func) come from a plain formula in float64, in one panel.

    Args:
        v: packed reflectors, the columns of a lower-trapezoidal U (n x k) (see `unpack_trapezoid`), float32 or float64,
            shape (*, trapezoid_size(n, k, dtype.is_complex)).
        n: rows of the frame.
        k: number of reflectors, :math:`k ≤ p`.
        p: columns of the frame, :math:`p ≤ n`.
        dtype: of the frame: float32, float64, complex64 or complex128.
        signs: fixed diagonal D, shape (*, p) or fewer batch dimensions, any dtype.
        phase: angles of D in radians, as `signs`, complex frames only; :math:`D = I` when neither is given.
        precision: "exact": a float32 or complex64 frame is worked out in float64 and rounded once. "fast": it is not,
            and its distance from the product grows to some 20 times the rounding limit.

    Returns:
        Frames of shape (*, n, p).
    """
    check_tensors("householder", v)
    check_counts("householder", n=n, k=k, p=p)
    if precision not in PRECISIONS:
        PRECISION.require("householder", "precision", precision)
    if phase is not None and not dtype.is_complex:
        check_complex("householder", dtype, phase)
    exact = precision == "exact"
    if k <= _panels(dtype)[0] and not takes_columns(v, n, p, dtype):
        return _OnePanel.of(v, phase, signs, n, k, p, dtype, exact)[0]
    return _Panels.of(v, phase, signs, n, k, p, dtype, exact)


def householder_linear(
    x: Tensor,
    v: Tensor,
    n: int,
    k: int,
    *,
    signs: Tensor | None = None,
    phase: Tensor | None = None,
    precision: str = "exact",
) -> Tensor:
    """Returns x @ householder(v, n, k, p, ...).mT without forming the frame, in 4nk flops a row.

    Differentiable any number of times; composes with vmap, compile and export.

    Args:
        x: rows of shape (*, p), of the dtype that the frame would have.
        v: packed reflectors of one frame, as `householder` takes them.
        n: rows of the frame, :math:`p ≤ n`.
        k: number of reflectors, :math:`k ≤ p`.
        signs: fixed diagonal D, shape (p).
        phase: angles of D in radians, shape (p).
        precision: "exact": float32 and complex64 rows are worked out in float64. "fast": they are not.

    Returns:
        Rows of shape (*, n), dtype of x.
    """
    check_tensors("householder_linear", x, v)
    check_counts("householder_linear", n=n, k=k)
    PRECISION.require("householder_linear", "precision", precision)
    check_complex("householder_linear", x.dtype, phase)
    p = x.shape[-1]
    if signs is not None or phase is not None:
        x = x * diagonal(signs=signs, phase=phase).to(x.dtype)
    rows = torch.nn.functional.pad(x, (0, n - p)).reshape(-1, n)
    return _Reflect.of(v, rows, k, precision).reshape(*x.shape[:-1], n)


class _OnePanel(Function):
    """Saves U, T and T^-1 U^H D for the derivative by hand; further derivatives are those of the plain formula."""

    @staticmethod
    def forward(
        v: Tensor, phase: Tensor | None, signs: Tensor | None, n: int, k: int, p: int, dtype: torch.dtype, exact: bool
    ) -> tuple[Tensor, ...]:
        working, is_split = _working(v, p, dtype, exact)
        d = _diagonal(v, phase, signs, p, working)
        w, *factors = form_panel(v, d, n, k, p, working, dtype)
        return polished(w) if is_split else _rounded(w, dtype), *factors, d.to(dtype)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        v, phase, _, ctx.n, ctx.k, _, _, _ = inputs
        keep(ctx, v, phase, *output[1:], output[0])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, g: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        v, phase, u, t, x, length, d, w = ctx.saved_tensors
        if g is None:
            return (None,) * 8
        if is_differentiated():
            gv = _plain_gradient(v, d if phase is None else _diagonal(v, phase, None, 0, d.dtype), g, ctx.n, ctx.k)
        else:
            gv = form_panel_gradient(u, t, x, length, d, g, v.shape[-1]).to(v.dtype)
        return gv, phase_gradient(phase, w, g), None, None, None, None, None, None

    @staticmethod
    def tangent(ctx: Context, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return by_transposing(_OnePanel.backward)(ctx, *tangents), *[None] * 5


class _Panels(Function):
    """Saves the frame alone, from which the derivative by hand undoes the panels; further ones as in `_OnePanel`."""

    @staticmethod
    def forward(
        v: Tensor, phase: Tensor | None, signs: Tensor | None, n: int, k: int, p: int, dtype: torch.dtype, exact: bool
    ) -> Tensor:
        if takes_columns(v, n, p, dtype):
            d = _diagonal(v, phase, signs, p, working_dtype(dtype))
            return reflected_columns(v, d, n, k, dtype)
        working, is_split = _working(v, p, dtype, exact)
        d = _diagonal(v, phase, signs, p, working)
        w = form_columns(v, d, n, k, p, working, _panels(dtype)[1])
        return polished(w) if is_split else _rounded(w, dtype)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        v, phase, signs, ctx.n, ctx.k, ctx.p, _, _ = inputs
        keep(ctx, v, phase, signs, output)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        v, phase, signs, w = ctx.saved_tensors
        if not is_differentiated() and takes_columns(v, ctx.n, ctx.p, w.dtype):
            return reflected_columns_gradient(v, w, g, ctx.k), phase_gradient(phase, w, g), *[None] * 6
        d = _diagonal(v, phase, signs, ctx.p, w.dtype)
        if is_differentiated():
            gv = _plain_gradient(v, d, g, ctx.n, ctx.k)
        else:
            gv = form_columns_gradient(v, d, w, g, ctx.n, ctx.k, _panels(w.dtype)[1])
        return gv, phase_gradient(phase, w, g), None, None, None, None, None, None

    tangent = by_transposing(backward)


class _Reflect(Function):
    """Applies panels to rows, and saves the result alone, as `_Panels`."""

    @staticmethod
    def forward(v: Tensor, x: Tensor, k: int, precision: str) -> Tensor:
        working = working_dtype(x.dtype) if precision == "exact" else x.dtype
        return reflect_rows(v, x, k, working, _panels(x.dtype)[1]).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        v, x, ctx.k, ctx.precision = inputs
        keep(ctx, v, x, output)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        v, x, y = ctx.saved_tensors
        if is_differentiated():
            gv, gx = torch.func.vjp(lambda v, x: _plain_product(v, x.mT, ctx.k).mT, v, x)[1](g)
        else:
            gv, gx = reflect_rows_gradient(v, y, g, ctx.k, _panels(y.dtype)[1])
        return gv, gx, None, None

    tangent = by_transposing(backward)


def _panels(dtype: torch.dtype) -> tuple[int, int]:
    """Returns how many reflectors make one panel, and the width of the panels of more, for frames of a dtype."""
    # The fastest, but narrow ones in float64, which has nothing finer to hide their rounding in.
    return (32, 32) if dtype == working_dtype(dtype) else (128, 96)


def _working(v: Tensor, p: int, dtype: torch.dtype, exact: bool) -> tuple[torch.dtype, bool]:
    """Returns the dtype to compute in, and whether that is the frames' own since float64 is slow."""
    is_split = exact and dtype != working_dtype(dtype) and v.dtype == torch.float32 and splits(v.new_empty(0, p))
    return working_dtype(dtype) if exact and not is_split else dtype, is_split


def _diagonal(v: Tensor, phase: Tensor | None, signs: Tensor | None, p: int, dtype: torch.dtype) -> Tensor:
    if phase is None and signs is None:
        return v.new_ones(*v.shape[:-1], p, dtype=dtype)
    return diagonal(signs=signs, phase=phase).to(dtype).expand(*v.shape[:-1], -1)


def _rounded(w: Tensor, dtype: torch.dtype) -> Tensor:
    # Twice: what rounding leaves of equal reflectors is large enough to blur the first W^H W.
    return polish(polish(w)) if dtype == working_dtype(dtype) else w.to(dtype)


def _plain_gradient(v: Tensor, d: Tensor, g: Tensor, n: int, k: int) -> Tensor:
    eye = torch.eye(n, d.shape[-1], dtype=d.dtype, device=d.device)
    return torch.func.vjp(lambda v: _plain_product(v, eye * d.unsqueeze(-2), k), v)[1](g)[0]


def _plain_product(v: Tensor, b: Tensor, k: int) -> Tensor:
    """Returns H_1 ... H_k B in operations that torch differentiates, in float64, in the dtype of B."""
    u = _normalised(v, b.shape[-2], k, b.is_complex())
    inner = torch.linalg.solve_triangular(u.mH @ u, u.mH @ b.to(u.dtype), upper=True, unitriangular=True)
    return (b - u @ inner).to(b.dtype)


def _normalised(v: Tensor, n: int, k: int, is_complex: bool) -> Tensor:
    """Scales reflectors to length sqrt 2, which makes T's diagonal 1; zero ones stay."""
    u = unpack_trapezoid(v.double(), n, k, is_complex)
    largest = u.detach().abs().amax(-2, keepdim=True)
    u = u / torch.where(largest == 0, 1.0, largest)
    length = torch.linalg.vector_norm(u, dim=-2, keepdim=True)
    return u / torch.where(length == 0, torch.inf, length * 0.5**0.5)


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


def householder_inverse(q: Tensor, k: int, signs: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Reduces a frame by k reflectors, column by column: :math:`Q = householder(v) R` with :math:`R = H_k ... H_1 Q`.

    Each reflector :math:`v_j = x + sgn(x_j) |x| e_j` sends column j to a multiple of :math:`e_j` without cancellation.
    If :math:`k = p`, R is diagonal, :math:`[D; 0]`. With prescribed signs, for real frames,
    :math:`v_j = x - d_j |x| e_j` instead; if :math:`k < p` in the column space of :math:`Q D - I`, of which k columns
    determine Q: a short x among Q's own first k columns determines its reflector only to :math:`eps / |x|`.

    Args:
        q: frames of shape (*, n, p), exact to rounding in float64 or complex128.
        k: number of reflectors, :math:`k ≤ p`.
        signs: prescribed diagonal D of real frames, shape (*, p); the stable choice when None.

    Returns:
        Packed reflectors of shape (*, d) in float64; the diagonal of R's top block, (*, p); and what is left of Q off
        that diagonal, the norm of :math:`R - [D; 0]` in the shape (*).
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
    v = pack_trapezoid(u)
    return v.reshape(*batch, v.shape[-1]), d.reshape(*batch, p), left.reshape(batch)


def _reduce(r: Tensor, k: int, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns reflectors (b, n, k) that reduce k columns, to prescribed signs if any, and what is left of them."""
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


def trapezoidal_reflectors(u: Tensor, orthogonal: bool = False) -> Tensor:
    """Finds k reflectors v_j (n, k), zero above row j, with the product of those of any nonzero u_j, in their order.

    Fix(R) is the complement of a space S of dimension d <= k. Let t_1, ..., t_d be an orthonormal basis of S with t_j
    zero above row j. The reflector v = R t - t takes R t back to t, and t joins the fixed vectors, since v in S is
    normal to them: after d steps the identity is left. Where R fixes t already there is no reflector; the even number
    left over is filled with equal pairs. `orthogonal` makes the u_j orthonormal first.
    """
    wide, k = u.double(), u.shape[1]
    norms = torch.linalg.vector_norm(wide, dim=0)
    is_right = bool((norms.isfinite() & (norms > 0)).all())
    needs(is_right, NonFiniteError, "trapezoidal_reflectors", "finite vectors that are not zero", "another")
    if not orthogonal and not u.triu(1).any():
        return u
    wide = wide / norms
    if orthogonal:
        wide, r = torch.linalg.qr(wide)
        is_right = bool(r.diagonal().abs().min() >= 1e-6)
        needs(is_right, RankError, "trapezoidal_reflectors", "independent vectors to orthonormalize", "dependent ones")
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
