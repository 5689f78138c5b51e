r"""The exponential of a packed tangent vector, and the logarithms of frames.

Square: W = exp(A). Tall: the first p columns of the n x n exponential of A = [[A11, -A21^H], [A21, 0]], which are
[W1; Z Y] with [W1; Y] those of a 2p x 2p exponential: A maps the span of the first p unit vectors and of the columns of
A21 into itself. With any invertible C and B = [[I, 0], [0, Z]], Z = A21 C^-1, it does so by A B = B M,
M = [[A11, -A21^H Z], [C, 0]], so that exp(A) B = B exp(M). The Cholesky factor C of I + A21^H A21 makes M nearly skew.
"""

import math
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_differentiated
from stiefelkit.functional._arithmetic.function import Context, Function, keep
from stiefelkit.functional._arithmetic.product import is_plain, product
from stiefelkit.functional._exponential.taylor import (
    adjoint,
    derivative,
    exponential,
    squared_adjoint,
    squared_exponential,
)
from stiefelkit.functional._kernels import launch
from stiefelkit.functional._packing import (
    check_size,
    check_square,
    check_tall,
    pack_skew_gradient,
    skew_size,
    unpack_skew,
)
from stiefelkit.functional._polar import polish
from stiefelkit.numbers import PRECISION, PRECISIONS, check_counts
from stiefelkit.tensors import check_tensors

_LARGEST_IN_DOUBLE = 32
_LARGEST_KEPT = 512
"""Rows of a matrix whose powers a device keeps, 44 matrices; beyond, products cost more than their launches."""
_WINDOW = (-0.97, -0.8)  # eigenvalues of the Hermitian part below a gap in here are those near -1


def matrix_exp(
    v: Tensor, n: int, p: int, is_complex: bool, *, rotation: Tensor | None = None, precision: str = "exact"
) -> Tensor:
    """Returns the first p columns of the exponential of a skew matrix in packed coordinates, times a fixed rotation.

    Differentiable any number of times, once of them in forward mode; composes with vmap, compile and export. Frames
    with :math:`n ≤ 2p` take 4 products of n x n and 7 more backward up to norm 2 (see `exponential`), in float32 up to
    norm 8; taller ones as many of 2p x 2p in float64, and two products of (n - p) x p, 4 more backward. Exact for
    float32 coordinates up to about 1e5, for float64 ones, polished twice, 1e8.

    Args:
        v: packed coordinates (see `unpack_skew`), shape (*, skew_size(n, p, is_complex)), float32 or float64.
        n: rows of the frame.
        p: columns of the frame, :math:`p ≤ n`.
        is_complex: whether the frame is complex.
        rotation: orthogonal or unitary to float32, shape (*, p, p), float64 or complex128; polished before use.
        precision: "exact" or "fast"; "fast" leaves out the polish of float32 frames with :math:`n ≤ 2p`.

    Returns:
        Frames of shape (*, n, p) in the precision of v.
    """
    check_tensors("matrix_exp", v)
    check_counts("matrix_exp", n=n, p=p)
    if precision not in PRECISIONS:
        PRECISION.require("matrix_exp", "precision", precision)
    single = v.dtype == torch.float32
    if n == p and single and launch.takes(v, n, 1 + is_complex):
        return _InOneLaunch.of(v, n, is_complex)
    if n == p <= _LARGEST_KEPT and v.dim() == 1 and not is_complex and launch.packs(v, v.dtype) and is_plain(v):
        return _Squared.of(v, n, is_complex)
    # Small matrices cost no more in float64 than a polish would.
    double = not single or n > 2 * p or (precision == "exact" and n <= _LARGEST_IN_DOUBLE)
    last = not single or not (double or precision == "fast")
    v = v.double() if double else v
    is_fine = single and double
    if n > 2 * p:
        block, z, _ = on_span(*unpack_skew(v, n, p, is_complex))
        columns = exponential(block, is_fine=is_fine)[..., :p]
        w = torch.cat([columns[..., :p, :], z @ columns[..., p:, :]], dim=-2)
        w = w if single else polish(w)
    else:
        a = _Skew.of(v, n, p, is_complex)
        w = exponential(a, skew=True, is_fine=is_fine, polish=last and n == p)
    if n > p:
        w = w[..., :p]
        if rotation is not None:
            w = product(w, polish(rotation).to(w.dtype))
        w = polish(w) if last else w
    return w.to(torch.complex64 if is_complex else torch.float32) if single else w


class _Skew(Function):
    """Unpacks the whole n x n matrix, which is linear in v."""

    @staticmethod
    def forward(v: Tensor, n: int, p: int, is_complex: bool) -> Tensor:
        a11, a21 = unpack_skew(v, n, p, is_complex)
        return a11 if n == p else join_blocks(a11, a21)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.n, ctx.p, ctx.is_complex = inputs

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        p = ctx.p
        if ctx.n == p:
            return pack_skew_gradient(g), None, None, None
        gv = pack_skew_gradient(g[..., :p, :p], g[..., p:, :p] - g[..., :p, p:].mH)
        return gv, None, None, None

    @staticmethod
    def tangent(ctx: Context, t: Tensor, *_: None) -> Tensor:
        return _Skew.of(t, ctx.n, ctx.p, ctx.is_complex)


class _InOneLaunch(Function):
    """Takes a program of a GPU each way; where that is differentiated, many launches."""

    @staticmethod
    def forward(v: Tensor, n: int, is_complex: bool) -> Tensor:
        check_size(f"A skew {n} x {n} matrix", "coordinates", v, skew_size(n, n, is_complex))
        return launch.exponential_forward(v, n, torch.complex64 if is_complex else torch.float32)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        v, ctx.n, ctx.is_complex = inputs
        keep(ctx, v)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        v = ctx.saved_tensors[0]
        if not is_differentiated() and launch.takes(v, ctx.n, 1 + ctx.is_complex):
            return launch.exponential_backward(v, g), None, None
        a = _Skew.of(v.double(), ctx.n, ctx.n, ctx.is_complex)
        return pack_skew_gradient(adjoint(a, g.to(a.dtype), True, True)).to(v.dtype), None, None

    @staticmethod
    def tangent(ctx: Context, t: Tensor, *_: None) -> Tensor:
        a, t = (_Skew.of(x.double(), ctx.n, ctx.n, ctx.is_complex) for x in (ctx.saved_tensors[0], t))
        return derivative(a, t, True).to(torch.complex64 if ctx.is_complex else torch.float32)


class _Squared(_InOneLaunch):
    """Keeps the factors of the adjoint of one matrix on a device, in plain eager mode."""

    generate_vmap_rule = False
    setup_context = torch.autograd.Function.setup_context

    @staticmethod
    def forward(ctx: Context, v: Tensor, n: int, is_complex: bool) -> Tensor:
        check_size(f"A skew {n} x {n} matrix", "coordinates", v, skew_size(n, n, is_complex))
        powers = v.new_empty(3, n, n, dtype=torch.float64)
        launch.fill_skew_(powers[0], v, 0.0)
        w, factors = squared_exponential(powers)
        ctx.n, ctx.is_complex = n, is_complex
        ctx.save_for_backward(v, *factors)
        ctx.save_for_forward(v)
        return w.float()

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        if is_differentiated() or not is_plain(g):
            return _InOneLaunch.backward(ctx, g)
        return launch.skew_coordinates(squared_adjoint(g.double(), *ctx.saved_tensors[1:]), 1.0), None, None


def join_blocks(a11: Tensor, a21: Tensor) -> Tensor:
    """Joins A, shape (*, n, n), from its blocks of shape (*, p, p) and (*, n - p, p)."""
    zero = a11.new_zeros(*a11.shape[:-2], a21.shape[-2], a21.shape[-2])
    return torch.cat([torch.cat([a11, a21], dim=-2), torch.cat([-a21.mH, zero], dim=-2)], dim=-1)


def on_span(a11: Tensor, a21: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns M of shape (*, 2p, 2p), Z of shape (*, n, p), and C, of A11, skew, (*, p, p), and A21, (*, n, p)."""
    # exp(A) does not depend on C, which is a constant to derivatives; no_grad would leave forward ones.
    constant = a21.detach()
    gram = constant.mH @ constant
    shift = 1 + 1e-14 * gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)[..., None, None]
    eye = torch.eye(a11.shape[-1], dtype=a11.dtype, device=a11.device)
    c = torch.linalg.cholesky_ex(gram + shift * eye, upper=True)[0]
    z = torch.linalg.solve_triangular(c, a21, upper=True, left=False)
    right = torch.cat([-(a21.mH @ z), torch.zeros_like(c)], dim=-2)
    return torch.cat([torch.cat([a11, c], dim=-2), right], dim=-1), z, c


def skew_logarithm(w: Tensor) -> tuple[Tensor, Tensor]:
    """Finds a skew A with :math:`exp(A) = W` and eigenvalues in :math:`i [-π, π]`, for any W that has one.

    With S and K the Hermitian and the skew part of W, :math:`A = K g(S)`, :math:`g(c) = arccos(c) / √{1 - c^2}`, away
    from the eigenvalue -1; near it the angles are read off K, and in real matrices eigenvalues -1 are taken in pairs,
    each a rotation by π. Repeated eigenvalues are nothing special.

    Args:
        w: orthogonal or unitary matrices of shape (*, n, n), exact to rounding in float64 or complex128.

    Returns:
        A of the same shape and dtype, and which matrices have one, shape (*): all unitary ones, and the orthogonal ones
        with :math:`det W = 1`; the others' A lacks one eigenvalue -1.
    """
    check_square("skew_logarithm", w)
    n = w.shape[-1]
    if not w.numel():
        return w.clone(), w.new_ones(w.shape[:-2], dtype=torch.bool)
    logarithms, exists = zip(*(_logarithm(matrix) for matrix in w.reshape(-1, n, n)), strict=True)
    return torch.stack(logarithms).view(w.shape), torch.tensor(exists, device=w.device).view(w.shape[:-2])


def tall_logarithm(w: Tensor) -> tuple[Tensor, Tensor]:
    """Finds :math:`A_{21}` and R with :math:`W = exp([[0, -A_{21}^H], [A_{21}, 0]]) [I; 0] R`.

    With the polar decomposition :math:`W_1 = H R` and :math:`H = V diag(cos t) V^H`,
    :math:`A_{21} = W_2 R^H V diag(t / sin t) V^H`, where t lies in :math:`[0, π / 2]`.

    Args:
        w: frames of shape (*, n, p), exact to rounding in float64 or complex128.

    Returns:
        :math:`A_{21}` of shape (*, n - p, p) and the orthogonal or unitary R of shape (*, p, p).
    """
    check_tall("tall_logarithm", w)
    p = w.shape[-1]
    u, c, vh = torch.linalg.svd(w[..., :p, :])
    t = c.clamp(max=1.0).arccos()
    stretch = torch.where(t < 1e-4, 1 + t * t / 6, t / t.sin())
    # H = U diag(c) U^H and R = U V^H, so W2 R^H U = W2 V.
    a21 = (w[..., p:, :] @ vh.mH) * stretch.unsqueeze(-2) @ u.mH
    return a21, u @ vh


def _logarithm(w: Tensor) -> tuple[Tensor, bool]:
    hermitian, skew = (w + w.mH) / 2, (w - w.mH) / 2
    c, q = torch.linalg.eigh(hermitian)
    c = c.clamp(-1.0, 1.0)
    near = _split(c)
    c, q_near, q = c[near:], q[:, :near], q[:, near:]
    g = torch.where(1 - c < 1e-8, 1 + (1 - c) / 3, c.arccos() / ((1 - c) * (1 + c)).sqrt())
    a = skew @ (q * g) @ q.mH
    fits = True
    if near:
        k = q_near.mH @ skew @ q_near
        angles, fits = (_complex_angles(k), True) if w.is_complex() else _real_angles(k)
        a = a + q_near @ angles @ q_near.mH
    return (a - a.mH) / 2, fits


def _split(c: Tensor) -> int:
    """Returns how many of the ascending values lie below the widest gap in the window, which parts no equal ones."""
    ends = torch.cat([c.new_tensor([_WINDOW[0]]), c[(c > _WINDOW[0]) & (c < _WINDOW[1])], c.new_tensor([_WINDOW[1]])])
    return int((c <= ends[ends.diff().argmax()]).sum())


def _complex_angles(k: Tensor) -> Tensor:
    """Returns the logarithm of a unitary matrix with eigenvalues near -1 from its skew part."""
    s, v = torch.linalg.eigh(-1j * (k - k.mH) / 2)
    s = s.clamp(-1.0, 1.0)
    t = torch.where(s >= 0, math.pi - s.asin(), -math.pi - s.asin())
    return (v * (1j * t)) @ v.mH


def _real_angles(k: Tensor, size: float = 1.0) -> tuple[Tensor, bool]:
    """Returns the same for an orthogonal matrix, real; k is its skew part divided by `size`."""
    m = k.shape[0]
    s, v = torch.linalg.eigh(1j * (k - k.mT) / 2)
    if m < 2 or -s[0] * size <= 1e-15:  # rounding
        part = torch.zeros_like(k)
        first = torch.arange(0, m - 1, 2, device=k.device)
        part[first + 1, first], part[first, first + 1] = math.pi, -math.pi
        return part, m % 2 == 0
    # Vectors of the smaller sines are not well told from their conjugates: those wait for their own unit.
    rotating = s < 0.1 * s[0]
    v_rotating = v[:, rotating]
    sines = -s[rotating] * size
    a = -2 * ((v_rotating * (math.pi - sines.clamp(max=1.0).asin())) @ v_rotating.mH).imag
    rest = m - 2 * v_rotating.shape[1]
    if not rest:
        return a, True
    basis = torch.linalg.eigh((v_rotating @ v_rotating.mH).real)[1][:, :rest]
    inner = basis.mT @ k @ basis
    norm = torch.linalg.matrix_norm(inner).item() or 1.0
    part, fits = _real_angles(inner / norm, size * norm)
    return a + basis @ part @ basis.mT, fits
