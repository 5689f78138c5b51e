"""The Cayley transform of a packed tangent vector, with its exact backward and its inverse.

Square (Helfrich, Willmott, Ye 2018; Maduranga, Helfrich, Ye 2019): W = (I + A)^-1 (I - A) = 2 M - I, M = (I + A)^-1.
Tall: the first p columns of the n x n transform of A = [[A11, -A21^H], [A21, 0]] need a p x p inverse only,
X = (I + A11 + A21^H A21)^-1, W = [2 X - I; -2 A21 X].
"""

from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_differentiated, is_exporting
from stiefelkit.functional._arithmetic.devices import may_sync_host
from stiefelkit.functional._arithmetic.function import Context, Function, by_transposing, keep
from stiefelkit.functional._arithmetic.product import plus_product, product
from stiefelkit.functional._cayley.quotient import inverse_by_lu, inverse_of_accretive
from stiefelkit.functional._kernels import launch
from stiefelkit.functional._packing import (
    check_size,
    check_tall,
    diagonal,
    pack_skew,
    pack_skew_gradient,
    phase_gradient,
    remembered,
    skew_size,
    unpack_skew,
    unpack_square,
)
from stiefelkit.functional._polar import polish
from stiefelkit.numbers import PRECISION, PRECISIONS, check_counts
from stiefelkit.tensors import check_tensors

_LARGEST_IN_DOUBLE = 48  # up to here the backward of a float32 frame in float64 costs about as much as in float32
_SMALLEST_FAST = 128  # below, LAPACK inverts no faster in float32 than in float64
_SLACK = 1e-6  # excess over 1 that entries of A may have after `cayley_inverse`
_ROUNDING = 1e-10
"""Moves that gain so little more than another are no better, and the phase of so small a pivot means nothing."""


def cayley(
    v: Tensor, n: int, p: int, *, signs: Tensor | None = None, phase: Tensor | None = None, precision: str = "exact"
) -> Tensor:
    """Returns the scaled Cayley transform of packed coordinates.

    Differentiable any number of times, once of them in forward mode; composes with vmap, compile and export. Costs one
    p x p inverse and, for a tall frame, one QR factor and one product of (n - p) x p; backward two p x p products and,
    for a tall frame, three of (n - p) x p. The diagonal costs nothing: it is folded into p x p factors.

    In "exact" precision everything is float64 up to the last rounding, except for the two products of the backward of
    square float32 frames from n = 49 on (real ones of even order). Exact for coordinates up to about 1e6; beyond 1e8 a
    frame of odd size loses digits. In "fast" precision the inverse of square frames from n = 128 on has the precision
    of the coordinates, while they are moderate (:math:`‖I + A‖_F ≤ 100`), on a CPU, where that is known; the rest would
    be no faster.

    Args:
        v: packed coordinates (see `unpack_skew`), shape (*, skew_size(n, p, phase is not None)), float32 or float64.
        n: rows of the frame.
        p: columns of the frame, :math:`p ≤ n`.
        signs: real frames: fixed diagonal D, shape (*, p), any dtype; all ones when None.
        phase: complex frames: angles of D in radians, shape (*, p); the frame is complex if they are given.
        precision: "exact" or "fast".

    Returns:
        Frames of shape (*, n, p) in the precision of v; a square W has no eigenvalue -1 in :math:`W D^H`.
    """
    if not (isinstance(v, Tensor) and type(n) is type(p) is int and 0 <= p <= n):
        check_tensors("cayley", v)
        check_counts("cayley", n=n, p=p)
    if precision not in PRECISIONS:
        PRECISION.require("cayley", "precision", precision)
    may_launch = p > 0 and v.dtype == torch.float32 and (v.is_cuda or launch.Interpreter.is_on)
    if may_launch and launch.takes(v, n, 1 + (phase is not None)):
        is_single = n == p and n > _LARGEST_IN_DOUBLE and (phase is not None or n % 2 == 0)
        if n > p:  # tall frames are columns of square ones, whose other coordinates are zeros
            v, phase, signs = _of_square(v, n, p, phase, signs)
        w = _InOneLaunch.of(v, phase, signs, n, is_single, False)
        return w[..., :p].to(torch.float32 if phase is None else torch.complex64)
    d = None
    if phase is None:
        d = v.new_ones(p, dtype=torch.float64) if signs is None else diagonal(signs=signs)
    if n > p:
        w = _Tall.of(v, phase, d, n, p)
    else:
        fast = precision == "fast" and v.dtype == torch.float32 and n >= _SMALLEST_FAST and may_sync_host(v)
        # A real A of odd order has a null vector, which costs gradients of large coordinates half of float32's digits.
        is_single = fast or (n > _LARGEST_IN_DOUBLE and (phase is not None or n % 2 == 0))
        w = _Square.of(v, phase, d, n, is_single, fast)
    return w.to(torch.promote_types(v.dtype, torch.complex32) if d is None else v.dtype)


def _of_square(
    v: Tensor, n: int, p: int, phase: Tensor | None, signs: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns coordinates, phases and signs of square frames whose first p columns are those of tall ones."""
    places = _places_in_square(n, p, phase is not None, v.device)
    v = torch.nn.functional.pad(v, (0, 1)).index_select(-1, places)
    phase = None if phase is None else torch.nn.functional.pad(phase, (0, n - p))
    return v, phase, None if signs is None else torch.nn.functional.pad(signs, (0, n - p), value=1)


@remembered
def _places_in_square(n: int, p: int, is_complex: bool, device: torch.device) -> Tensor:
    """Returns where packed coordinates of square frames stand in those of tall ones and a zero."""
    i, j = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)
    high, low, size = torch.maximum(i, j), torch.minimum(i, j), skew_size(n, p, is_complex)
    below = low * (n - p) + high - p  # column by column
    if not is_complex:
        place = torch.where(high < p, high * (high - 1) // 2 + low, below + p * (p - 1) // 2)
        return torch.where(low < p, place, size)[torch.tril_indices(n, n, -1, device=device).unbind()]
    place = torch.where(high < p, i * p + j, below + p * p + (i < j) * (n - p) * p)
    return torch.where(low < p, place, size).flatten()


class _Square(Function):
    """Saves W, from which 2 M D = W + D: a saved output keeps second derivatives right, another tensor would not."""

    @staticmethod
    def forward(v: Tensor, phase: Tensor | None, d: Tensor | None, n: int, is_single: bool, fast: bool) -> Tensor:
        is_complex = phase is not None
        dtype = v.dtype if is_single else torch.float64
        dtype = torch.promote_types(dtype, torch.complex32) if is_complex else dtype
        is_packed = (v.is_cuda or launch.Interpreter.is_on) and not is_complex and launch.packs(v, v.dtype)
        if is_packed:
            check_size(f"A skew {n} x {n} matrix", "coordinates", v, skew_size(n, n, False))
        a = launch.skew_matrix(v, n, 1.0) if is_packed else unpack_square(v, n, is_complex, shift=1)
        if not fast:
            a = a.to(torch.complex128 if a.is_complex() else torch.float64)
        m = inverse_of_accretive(a)
        if v.dtype == torch.float64:
            # What the inverse leaves in float64, a Newton step takes away.
            m = m + m @ (torch.eye(n, dtype=m.dtype, device=m.device) - a @ m)
        if torch.compiler.is_compiling() and is_exporting():
            m = m.clone()  # an exported program trains by the derivative of the inverse, which needs it as it is
        d = (diagonal(phase=phase) if d is None else d).to(m.dtype)  # no call at each read of a weight
        w = m.mul_(2 * d.unsqueeze(-2))
        w.diagonal(dim1=-2, dim2=-1).sub_(d)
        if is_packed:  # an inverse on a device lies there by columns
            return w.to(dtype, memory_format=torch.contiguous_format)
        return polish(w) if v.dtype == torch.float64 else w.to(dtype)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        v, phase, d, ctx.n, *_ = inputs
        ctx.dtype = v.dtype
        ctx.save_for_backward(phase, d, output)  # as `keep` does, without a call at each read of a weight
        ctx.save_for_forward(phase, d, output)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        phase, d, w = ctx.saved_tensors
        return _pulled_back(g, phase, _entries(phase, d), w, ctx.dtype)

    tangent = by_transposing(backward)


class _InOneLaunch(_Square):
    """Takes a program of a GPU each way, which reads signs as they are; where that is differentiated, many launches."""

    @staticmethod
    def forward(v: Tensor, phase: Tensor | None, d: Tensor | None, n: int, is_single: bool, fast: bool) -> Tensor:
        check_size(f"A skew {n} x {n} matrix", "coordinates", v, skew_size(n, n, phase is not None))
        d, dtype = d if phase is None else diagonal(phase=phase), torch.float32 if is_single else torch.float64
        return launch.cayley_forward(v, d, n, dtype if phase is None else dtype.to_complex())

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        phase, d, w = ctx.saved_tensors
        if is_differentiated():
            signs = w.new_ones(ctx.n, dtype=torch.int8) if d is None else d
            return _pulled_back(g, phase, diagonal(signs=signs, phase=phase), w, ctx.dtype)
        gv = launch.cayley_backward(w, g, d if phase is None else diagonal(phase=phase), ctx.dtype)
        return gv, phase_gradient(phase, w, g), None, None, None, None

    tangent = by_transposing(backward)


def _pulled_back(
    g: Tensor, phase: Tensor | None, d: Tensor, w: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    d = d.to(w.dtype)
    adjoint = _add_diagonal(w, d).mH
    # (2 M)^H G D^H (2 M)^H with (2 M)^H = D (W + D)^H
    inner = product(product(adjoint, g), adjoint)
    if (w.is_cuda or launch.Interpreter.is_on) and not is_differentiated() and launch.packs(w, dtype):
        gv = launch.skew_coordinates(inner * d.unsqueeze(-1), -0.5)
    else:
        gv = pack_skew_gradient(inner * (d * -0.5).unsqueeze(-1))
    return gv.to(dtype), phase_gradient(phase, w, g), None, None, None, None


class _Tall(Function):
    """Saves the coordinates and W, whose upper block gives 2 X D = W1 + D."""

    @staticmethod
    def forward(v: Tensor, phase: Tensor | None, d: Tensor | None, n: int, p: int) -> Tensor:
        a11, a21 = unpack_skew(v.double(), n, p, phase is not None)
        d = _entries(phase, d).to(a11.dtype)
        doubled = 2 * _resolvent(a11, a21) * d.unsqueeze(-2)
        w = torch.cat([_add_diagonal(doubled, -d).mT, -doubled.mT @ a21.mT], dim=-1).mT
        return polish(w) if v.dtype == torch.float64 else w

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        v, phase, d, ctx.n, ctx.p = inputs
        keep(ctx, v, phase, d, output)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        v, phase, d, w = ctx.saved_tensors
        n, p = ctx.n, ctx.p
        d = _entries(phase, d).to(w.dtype)
        adjoint = _add_diagonal(w[..., :p, :], d).mH
        _, a21 = unpack_skew(v.double(), n, p, phase is not None)
        g1, g2 = g[..., :p, :], g[..., p:, :]
        g11 = adjoint @ (g1 - a21.mH @ g2) @ adjoint * (d.unsqueeze(-1) / -2)
        g21 = plus_product((g11 + g11.mH).mT @ a21.mT, adjoint.mT, g2.mT, -1)
        gv = pack_skew_gradient(g11, g21.mT)
        return gv.to(v.dtype), phase_gradient(phase, w, g), None, None, None

    tangent = by_transposing(backward)


def _entries(phase: Tensor | None, d: Tensor | None) -> Tensor:
    return diagonal(phase=phase) if d is None else d


def _add_diagonal(m: Tensor, d: Tensor) -> Tensor:
    total = m.clone()
    total.diagonal(dim1=-2, dim2=-1).add_(d)
    return total


def _resolvent(a11: Tensor, a21: Tensor) -> Tensor:
    """Returns (I + A11 + A21^H A21)^-1 as Q1 (I + Q1^H A11 Q1)^-1 Q1^H, [I; A21] = Q R, Q1 = R^-1: no Gram matrix."""
    eye = torch.eye(a11.shape[-1], dtype=a11.dtype, device=a11.device)
    r = torch.linalg.qr(a21, mode="r")[1]
    r = torch.linalg.qr(torch.cat([eye.expand_as(a11), r], dim=-2), mode="r")[1]
    q1 = torch.linalg.solve_triangular(r, eye.expand_as(a11), upper=True)
    inner = inverse_by_lu(eye + q1.mH @ a11 @ q1)
    return q1 @ inner @ q1.mH


def cayley_inverse(q: Tensor, d: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Finds coordinates and a diagonal D with :math:`Q = cayley(v) D`, for any frame Q.

    D is found by Gaussian elimination on :math:`I + Q_1 E` that picks each :math:`e_j` so that its pivot has modulus
    :math:`≥ 1` (the Schur complements stay contractions), so that every frame, eigenvalue -1 included, has a
    well-conditioned preimage. Then entries of D change, one or two at a time, until every :math:`|a_{ij}| ≤ 1` and
    every column of :math:`A_{21}` has norm :math:`≤ 1`, up to 1e-6. For square frames 1 is the least bound: two
    exchanged columns have :math:`|a_{12}| ≥ 1` for every D.

    This ends: each move multiplies :math:`|det(I + Q_1 D^H)|`, which elimination leaves at 1 or more and is at most
    :math:`2^p`, by a gain; while an entry is above :math:`1 + s`, there is one of more than :math:`1 + 2s/3`. It is the
    theorem of O'Dorney (2014; Kahan 2006), which Maduranga, Helfrich and Ye (2019) state for phases.

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
    """Eliminates on I + Q1 E with |pivot| >= 1, by LAPACK's QR or, for phases and pivots of 0, a loop; returns E^*."""
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
    """Makes the moves that `cayley_inverse` tells of, for the largest entry each time; overwrites X and D.

    With X = (I + B1)^-1 and B = Q D^H, |det(I + B1)| grows by |x_jj| + |1 - x_jj| where entry j is turned to the best
    phase, and by |det(I - 2 X_SS)| where the entries S = {i, j} are negated.
    """
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
