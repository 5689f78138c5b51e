"""The matrix exponential by scaling and squaring, with its exact adjoint.

The scaling depends on the norm of the matrix, so an opaque operator decides on it: nothing outside branches on values,
and no TF32 enters. Without host syncs each matrix takes those it needs of a fixed number of squarings.

Taylor's polynomial of degree 12 of the scaled matrix takes four products: Bader, Blanes, Casas 2019; the coefficients,
one of a family, were solved for in 50 digits.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_differentiated, is_view
from stiefelkit.functional._arithmetic.devices import switch
from stiefelkit.functional._arithmetic.function import Context, Function, by_transposing, keep
from stiefelkit.functional._arithmetic.norms import bounds_of_skew, finite, probe
from stiefelkit.functional._arithmetic.product import FullPrecision, add_product_, is_plain, opaque
from stiefelkit.functional._packing import check_square, minus_adjoint
from stiefelkit.functional._polar import polished
from stiefelkit.metrics import working_dtype

_LARGEST_IN_SINGLE = 8.0  # norm above which the squarings would cost float32 too many of its digits
_SQUARINGS = 20  # without host syncs: enough for ||A||_2 of some 2e5, of whose turns float32 holds two digits
_LONGEST = 2.0**18
_DEGREE = 12
_LOG_FACTORIAL = math.log2(math.factorial(_DEGREE + 1))
_CONSTANTS = (0.0, 5.3159789575987123025, 0.18188869982170451712, 0.0)
_POWERS = (
    (0.46932117595418217043, -0.20099424927047284253, -0.046239461340630719291),
    (1.1992679041713223157, 0.011792962409929970316, 0.01108844528519167989),
    (0.055027984399308985572, 0.09351590770536261043, 0.0061070052889834025576),
    (-0.13181061013830184016, -0.020278555405892590793, -0.0067595184686308635978),
)
"""B_k = constant + combination of A, A^2, A^3; then A6 = B2 + B3^2 and sum_{j <= 12} A^j / j! = B0 + (B1 + A6) A6."""

_FINE = 1e-10  # error of frames in float64 that are rounded to float32
Factors = tuple[Tensor, tuple[Tensor, ...]]


def exponential(a: Tensor, *, skew: bool = False, is_fine: bool = False, polish: bool = False) -> Tensor:
    """Returns the exponential of square matrices, twice differentiable, once of them in forward mode.

    Takes :math:`4 + s` products and :math:`7 + 2 s` more backward (:math:`8 + 2 s` if not skew),
    :math:`s = log_2(‖A‖ / 2)` or so in float32. On devices beside CPUs, where no norm is read, s is 20, all in float64,
    and an A of norm beyond some 2e5 is scaled to that norm.

    Args:
        a: square matrices, shape (*, n, n), float32, float64, complex64 or complex128; one scaling serves a batch.
        skew: whether :math:`A^H = -A`. The gradient is then right up to a Hermitian matrix: antisymmetrize it.
        is_fine: whether the polynomial may be off by 1e-10, relative to :math:`‖W‖_F` (8 times as much in single
            directions), in place of 3.5 eps of the dtype. No number, which Dynamo would make a symbol.
        polish: for skew A: take a last step to the nearest unitary matrix (`stiefelkit.functional.polish`).

    Returns:
        Tensor of the shape and dtype of A; float32 of norm above 8 is computed in float64. NaN propagates.
    """
    check_square("exponential", a)
    return (_Kept if is_plain(a) else _Traced).of(a, skew, is_fine, polish)


class _Traced(Function):
    """Calls an opaque operator each way."""

    @staticmethod
    def forward(a: Tensor, skew: bool, is_fine: bool, polish: bool) -> Tensor:
        return _exponential(a, skew, is_fine, polish)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Any) -> None:
        a, ctx.skew, ctx.is_fine, _ = inputs
        keep(ctx, a)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        return _Adjoint.of(ctx.saved_tensors[0], g, ctx.skew, ctx.is_fine), None, None, None

    @staticmethod
    def tangent(ctx: Context, t: Tensor, *_: None) -> Tensor:
        return derivative(ctx.saved_tensors[0], t, ctx.is_fine)


class _Kept(_Traced):
    """Keeps the factors of the adjoint, in plain eager mode."""

    generate_vmap_rule = False
    setup_context = torch.autograd.Function.setup_context

    @staticmethod
    def forward(ctx: Context, a: Tensor, skew: bool, is_fine: bool, polish: bool) -> Tensor:
        with FullPrecision(a.device):
            w, factors = _taylor(a, skew, is_fine)
            w = _shaped(w, a)
            w = polished(w) if polish else w
            # Dual numbers take no view for what a function returns.
            w = w.clone() if is_view(w) else w
        ctx.skew, ctx.is_fine = skew, is_fine
        ctx.save_for_backward(a, *factors)
        ctx.save_for_forward(a)
        return w

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        if is_differentiated() or not is_plain(g):
            return _Traced.backward(ctx, g)
        a, *factors = ctx.saved_tensors
        with FullPrecision(g.device):
            return _adjoint(g.to(factors[0].dtype), factors, ctx.skew).to(a.dtype), None, None, None


class _Adjoint(Function):
    """Returns the adjoint derivative of the exponential at A along G, differentiable in both."""

    @staticmethod
    def forward(a: Tensor, g: Tensor, skew: bool, is_fine: bool) -> Tensor:
        return _exponential_adjoint(a, g, skew, is_fine)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, g, ctx.skew, _ = inputs
        keep(ctx, a, g)

    @staticmethod
    def backward(ctx: Context, gg: Tensor) -> tuple[Tensor | None, ...]:
        a, g = (t.to(working_dtype(t.dtype)) for t in ctx.saved_tensors)
        # The adjoint is the upper right block of exp [[A^H, G], [0, A^H]], whose own adjoint this takes.
        n = a.shape[-1]
        adjoint = _Adjoint.of(_blocks(a.mH, g), _blocks(torch.zeros_like(a), gg.to(g.dtype)), False, None)
        ga = (adjoint[..., :n, :n] + adjoint[..., n:, n:]).mH
        return ga.to(gg.dtype), adjoint[..., :n, n:].to(gg.dtype), None, None

    tangent = by_transposing(backward)


adjoint = _Adjoint.of


def derivative(a: Tensor, t: Tensor, is_fine: bool) -> Tensor:
    """Returns the derivative of the exponential at A along T: the adjoint one at A^H."""
    return _Adjoint.of(a.mH.resolve_conj(), t, False, is_fine)


def _blocks(a: Tensor, g: Tensor) -> Tensor:
    """Returns [[A, G], [0, A]]."""
    return torch.cat([torch.cat([a, g], dim=-1), torch.cat([torch.zeros_like(a), a], dim=-1)], dim=-2)


@opaque(lambda a, skew, is_fine, polish: torch.empty_like(a, memory_format=torch.contiguous_format))
def _exponential(a: Tensor, skew: bool, is_fine: bool, polish: bool) -> Tensor:
    w = _shaped(_taylor(a, skew, is_fine)[0], a)
    return polished(w) if polish else w


@opaque(lambda a, g, skew, is_fine: torch.empty_like(a, memory_format=torch.contiguous_format))
def _exponential_adjoint(a: Tensor, g: Tensor, skew: bool, is_fine: bool) -> Tensor:
    _, factors = _taylor(a, skew, is_fine)
    out = _adjoint(g.to(factors[0].dtype), factors, skew).to(a.dtype)
    return out.clone() if is_view(out) else out  # forward mode takes a view for one of A


def _shaped(w: Tensor, a: Tensor) -> Tensor:
    # No view where it has them already: forward mode would take it for one of A.
    return (w if w.shape == a.shape else w.reshape(a.shape)).to(a.dtype)


def _taylor(a: Tensor, skew: bool, is_fine: bool) -> Factors:
    """Returns exp(A), and the factors of its adjoint: powers of A, parts of its polynomial, and the squared."""
    if switch.forbidden or not (a.is_cpu and a.numel()):
        return _taylor_no_sync(a, skew, is_fine)
    n = a.shape[-1]
    a = a.reshape(-1, n, n) if a.dim() > 3 else a
    times, _ = _products(a)
    powers = a.new_empty(3, *a.shape)
    first, a2, a3 = powers.unbind()
    first.copy_(a)
    times(a, a, out=a2)
    times(a2, a, out=a3)
    unit = 3.5 * torch.finfo(a.dtype).eps if not is_fine else _FINE
    longest = _LARGEST_IN_SINGLE if a.dtype != working_dtype(a.dtype) else math.inf
    s, norm = _squarings_of_skew(powers, unit, longest) if skew else (None, 0.0)
    if s is None:
        log_error, norm = _skew_truncation(powers) if skew else _truncation(a)
        s = _squarings(log_error, norm, unit)
    if not norm <= longest:
        return _taylor(a.to(working_dtype(a.dtype)), skew, is_fine)
    w, b = _polynomial(powers, s)
    squared = []
    for k in range(s):
        # Squaring doubles the distance from a unitary matrix: at huge norms it would end in infinity.
        w = polished(w) if skew and k % 16 == 15 else w
        squared.append(w)
        w = times(w, w)
    return w, (powers, b, *squared)


def _taylor_no_sync(a: Tensor, skew: bool, is_fine: bool) -> Factors:
    """Does the same as `_taylor` in float64 or complex128, without host syncs.

    The factors are powers of A 2^-s, parts of its polynomial, integers s, (*, 1, 1), 2^-s, and the squared.
    """
    n = a.shape[-1]
    a = a.to(working_dtype(a.dtype))
    a = a.reshape(-1, n, n) if a.dim() > 3 else a
    times, _ = _products(a)
    a2 = times(a, a)
    a3 = times(a2, a)
    unit = math.log2(3.5 * torch.finfo(a.dtype).eps if not is_fine else _FINE)
    norm = _bound(a, a2, a3, skew)
    s = ((13 * norm.log2() - _LOG_FACTORIAL - unit) / _DEGREE).ceil_().clamp_(0, _SQUARINGS)
    longest = 2 ** ((_DEGREE * _SQUARINGS + _LOG_FACTORIAL + unit) / 13)
    scale = (longest / norm).clamp_(max=1) * 0.5**s
    powers = torch.stack([a * scale, a2 * scale**2, a3 * scale**3])
    w, b = _polynomial(powers, 0)
    squared = []
    for k in range(_SQUARINGS):
        squared.append(w)
        w = torch.where(s > k, times(w, w), w)
    return w, (powers, b, s.long(), scale, *squared)


def _adjoint(g: Tensor, factors: Sequence[Tensor], skew: bool) -> Tensor:
    """Returns the gradient of A by that of its exponential, up to a Hermitian matrix for a skew A."""
    powers, b, *squared = factors
    shape, g = g.shape, g.reshape(powers.shape[1:])
    times, count, counted, scale = _products(g)[0], len(squared), None, None
    if squared and squared[0].dtype is torch.int64:
        counted, scale, *squared = squared
        count = 0
    for k, w in reversed(list(enumerate(squared))):
        wh = w.mH
        before = add_product_(times(g, wh), wh, g)
        g = before if counted is None else torch.where(counted > k, before, g)
    ga = _polynomial_adjoint(g, powers, b, count, skew)
    return (ga if scale is None else ga.mul_(scale)).view(shape)


def squared_exponential(powers: Tensor) -> Factors:
    """Returns exp(A) of one skew float64 A, the first of three matrices (3, n, n), by few launches without host syncs.

    Always takes 20 squarings, after which float64 is still exact to some 1e-9, two at a time: the blocks of `rows` are
    W, W^2, W^3, W^4, its second and third power, and so on. A of norm beyond 2^18 is scaled to that norm.
    """
    n = powers.shape[-1]
    a, a2, a3 = powers
    torch.mm(a, a, out=a2)
    torch.mm(a2, a, out=a3)
    table, constants, exponents = _combinations_of_skew(powers.device)
    scaled = table * torch.linalg.vector_norm(a3).clamp_(min=_LONGEST**3).pow(exponents)
    b = (scaled @ powers.flatten(1)).view(4, n, n)
    b.diagonal(dim1=-2, dim2=-1).add_(constants)
    w, left, a6, b3 = b
    left.addmm_(b3, b3)
    a6.addmm_(b3, b3)
    rows = powers.new_empty(n, (3 * _SQUARINGS // 2 + 1) * n)
    torch.addmm(w, left, a6, out=rows[:, :n])
    for start in range(0, rows.shape[1] - n, 3 * n):
        square = rows[:, start + n : start + 2 * n]
        torch.mm(rows[:, start : start + n], rows[:, start : start + n], out=square)
        torch.mm(square, rows[:, start : start + 2 * n], out=rows[:, start + 2 * n : start + 4 * n])
    return rows[:, -n:], (powers, scaled, b, rows)


def squared_adjoint(g: Tensor, powers: Tensor, scaled: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    """Returns the gradient of A by G, that of its `squared_exponential`, up to a Hermitian matrix.

    With Omega = W^H G a squaring back is Omega <- Omega + W Omega W^H, two of them are the sum over four powers of W.
    """
    n = g.shape[-1]
    omega = rows[:, -n:].mH @ g
    between = torch.empty_like(rows[:, : 3 * n])
    for start in range(0, rows.shape[1] - n, 3 * n):
        three = rows[:, start : start + 3 * n]
        stacked, out = (t.unflatten(1, (3, n)).transpose(0, 1) for t in (three, between))
        torch.bmm(stacked, omega.expand(3, n, n), out=out)
        omega = torch.addmm(omega, between, three.mH)
    _, left, a6, b3 = b
    gb = torch.empty_like(b)
    torch.mm(rows[:, :n], omega, out=gb[0])
    torch.mm(gb[0], a6.mH, out=gb[1])
    torch.mm(left.mH, gb[0], out=gb[2])
    both = gb[1] + gb[2]
    torch.mm(both, b3.mH, out=gb[3]).addmm_(b3.mH, both)
    ga, ga2, ga3 = (scaled.mH @ gb.flatten(1)).view(3, n, n)
    return _skew_gradient(powers[0], powers[1], ga, ga2, ga3)


def _truncation(a: Tensor) -> tuple[float, float]:
    """Returns the binary logarithm of the is_fine, relative to ||W||_F, and a bound of ||A||_2, for any A."""
    norm = float(finite(torch.linalg.matrix_norm(a, 1)).amax())
    return 13 * _log2(norm) - _LOG_FACTORIAL, norm


def _squarings(log_error: float, norm: float, unit: float) -> int:
    """Returns the squarings after which the truncation is a unit, or 8 in single directions, at most."""
    # The error of A 2^-s, squared s times, is 2^(-12 s) of that of A.
    log_worst = max(log_error, 13 * _log2(norm) - _LOG_FACTORIAL - 3, math.log2(unit))
    return math.ceil((log_worst - math.log2(unit)) / _DEGREE) if log_worst < math.inf else 0


def _squarings_of_skew(powers: Tensor, unit: float, longest: float) -> tuple[int | None, float]:
    """Returns the same for a skew A, or None, and a bound of its norm: S_3^(13/3) <= S_13 <= ||A||_2^20 S_3."""
    least, bound, third = bounds_of_skew(powers)
    log_third = _log2(third / powers.shape[-1] ** 0.5)
    few = _squarings(13 / 3 * log_third - _LOG_FACTORIAL, least, unit)
    many = _squarings(10 * _log2(bound) + log_third - _LOG_FACTORIAL, bound, unit) if bound <= longest else -1
    return (few if few == many else None), bound


def _skew_truncation(powers: Tensor) -> tuple[float, float]:
    """Returns `_truncation` of a skew A, from A, A^2 and A^3: root mean square of sigma^13 / 13!, and ||A||_2.

    Probes that all miss the largest singular vectors may miss a norm of 1.3 times the estimate, but none of twice it,
    where the bound counts instead.
    """
    bound, top, length = probe(powers)
    if not 0 < bound < math.inf:
        return -math.inf, bound if bound == 0 else math.inf
    if bound > 2 * top:
        return 13 * math.log2(bound) - _LOG_FACTORIAL, bound
    return _log2(length) + 12 * math.log2(bound) + _log2(min(top / 1.05, bound)) - _LOG_FACTORIAL, min(top, bound)


def _log2(x: float) -> float:
    return math.log2(x) if x > 0 else -math.inf


def _bound(a: Tensor, a2: Tensor, a3: Tensor, skew: bool) -> Tensor:
    """Returns a bound of ||A||_2 for each matrix, shape (*, 1, 1); zero for what is not finite."""
    if not skew:
        return finite(torch.linalg.matrix_norm(a, 1, keepdim=True))
    # The singular values of A^k are the powers of those of A.
    second, third = (torch.linalg.matrix_norm(power, keepdim=True) for power in (a2, a3))
    return finite(torch.minimum(second.sqrt(), third ** (1 / 3)))


def _polynomial(powers: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Returns the polynomial of A 2^-s from A, A^2 and A^3, stacked, and parts of it: itself, B1 + A6, A6 and B3."""
    b = _combine(powers, s, False)
    w, left, a6, b3 = b.unbind()
    left.diagonal(dim1=-2, dim2=-1).add_(_CONSTANTS[1])
    a6.diagonal(dim1=-2, dim2=-1).add_(_CONSTANTS[2])
    left.add_(add_product_(a6, b3, b3))
    return add_product_(w, left, a6), b


def _polynomial_adjoint(g: Tensor, powers: Tensor, b: Tensor, s: int, skew: bool) -> Tensor:
    """Returns the gradient of A by that of the polynomial, up to a Hermitian matrix for a skew A."""
    a, a2, _ = powers.unbind()
    _, left, a6, b3 = b.unbind()
    times, add_product = _products(a)
    gb = torch.empty_like(b)
    gb0, gb1, gb2, gb3 = gb.unbind()
    gb0.copy_(g)
    times(g, a6.mH, out=gb1)
    add_product(gb1, left.mH, g, out=gb2)
    times(gb2, b3.mH, out=gb3)
    add_product_(gb3, b3.mH, gb2)
    ga, ga2, ga3 = _combine(gb, s, True).unbind()
    if skew:
        return _skew_gradient(a, a2, ga, ga2, ga3)
    add_product_(ga2, ga3, a.mH)
    add_product_(ga, a2.mH, ga3)
    add_product_(ga, ga2, a.mH)
    return add_product_(ga, a.mH, ga2)


def _skew_gradient(a: Tensor, a2: Tensor, ga: Tensor, ga2: Tensor, ga3: Tensor) -> Tensor:
    # A^2 can change by Hermitian, A^3 by skew matrices only: -(S A + A S) and -2 S A have the same skew part.
    ga3 = minus_adjoint(ga3)
    add_product_(ga2, ga3, a, alpha=-0.5)
    add_product_(ga, a2, ga3, alpha=0.5)
    return add_product_(ga, ga2 + ga2.mH, a, alpha=-1)


def _products(a: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Returns functions for A B and C + A B, of one matrix or of a batch."""
    return (torch.mm, torch.addmm) if a.dim() == 2 else (torch.bmm, torch.baddbmm)


@functools.lru_cache(maxsize=256)
def _coefficients(s: int, transposed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns coefficients of the powers for A 2^-s, one row for each combination."""
    rows = [[c * 0.5 ** (s * (k + 1)) for k, c in enumerate(row)] for row in _POWERS]
    with torch.inference_mode(False):
        table = torch.tensor(rows, dtype=dtype, device=device)
        return table.mT.contiguous() if transposed else table


@functools.lru_cache(maxsize=16)
def combinations(device: torch.device) -> Tensor:
    """Returns constants and coefficients of the powers in float64, one row for each combination, (4, 4)."""
    with torch.inference_mode(False):
        rows = [(c, *row) for c, row in zip(_CONSTANTS, _POWERS, strict=True)]
        return torch.tensor(rows, dtype=torch.float64, device=device)


@functools.lru_cache(maxsize=16)
def _combinations_of_skew(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns coefficients of B0, B1 + B2, B2, B3 for _LONGEST 2^-20 A, constants, and exponents of ||A^3||_F."""
    with torch.inference_mode(False):
        k, table = torch.arange(1.0, 4.0, dtype=torch.float64, device=device), combinations(device).clone()
        table[1] += table[2]
        return table[:, 1:] * (_LONGEST * 0.5**_SQUARINGS) ** k, table[:, :1].clone(), k / -3


def _combine(m: Tensor, s: int, transposed: bool) -> Tensor:
    """Returns linear combinations of the matrices stacked in m, by one product."""
    parts = torch.view_as_real(m) if m.is_complex() else m
    flat = parts.flatten(1)
    rows = _coefficients(s, transposed, flat.dtype, flat.device) @ flat
    rows = rows.view(len(rows), *parts.shape[1:])
    return torch.view_as_complex(rows) if m.is_complex() else rows
