"""The Cayley transform of a packed tangent vector and its exact backward.

Square (Helfrich, Willmott, Ye 2018; Maduranga, Helfrich, Ye 2019): W = (I + A)^-1 (I - A) = 2 M - I, M = (I + A)^-1.
Tall: the first p columns of the n x n transform of A = [[A11, -A21^H], [A21, 0]] need a p x p inverse only,
X = (I + A11 + A21^H A21)^-1, W = [2 X - I; -2 A21 X].
"""

from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_differentiated, is_exporting
from stiefelkit.functional._arithmetic.float64 import splits
from stiefelkit.functional._arithmetic.function import Function, keep
from stiefelkit.functional._arithmetic.product import opaque, plus_product, product, sandwich
from stiefelkit.functional._arithmetic.split_products import (
    BITS_OF_RESIDUALS,
    BITS_OF_TALL,
    fine_inverse,
    fine_product,
    settle,
    settled,
)
from stiefelkit.functional._cayley.quotient import SMALLEST_BLOCKED, inverse_of_accretive
from stiefelkit.functional._diagonal import diagonal, phase_gradient, phase_tangent
from stiefelkit.functional._kernels.launch import Anywhere, cayley_backward, cayley_forward, takes
from stiefelkit.functional._packing import pack_skew_gradient, unpack_skew, unpack_square
from stiefelkit.functional._polish import polish
from stiefelkit.metrics import working_dtype
from stiefelkit.numbers import PRECISION, PRECISIONS, check_counts
from stiefelkit.tensors import check_tensors

_LARGEST_IN_DOUBLE = 48
"""Up to here the backward of a float32 frame in float64 costs about as much as in float32."""
_LARGE = 256
"""From here on memory counts, below the number of operators."""
_DOUBLE = (torch.float64, torch.complex128)
_SMALLEST_FAST = 128
"""Below, LAPACK inverts no faster in float32 than in float64."""


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
    of the coordinates, while they are moderate (:math:`‖I + A‖_F ≤ 100`); the rest would be no faster.

    Args:
        v: packed coordinates (see `unpack_skew`), shape (*, skew_size(n, p, phase is not None)), float32 or float64.
        n: rows of the frame.
        p: columns of the frame, :math:`p ≤ n`.
        signs: real frames: fixed diagonal D, shape (*, p), any dtype; all ones when None.
        phase: complex frames: angles of D in radians, shape (*, p); the frame is complex if they are given.
        precision: "exact" or "fast".

    Returns:
        Frames of shape (*, n, p) in the precision of v; a square W has no eigenvalue -1 in :math:`W D^H`.

    Raises:
        DtypeError: v is no tensor.
        ShapeError: v has another number of coordinates.
        OptionError: n or p is no count, or the precision is another word.
    """
    if not (isinstance(v, Tensor) and type(n) is type(p) is int and 0 <= p <= n):
        check_tensors("cayley", v)
        check_counts("cayley", n=n, p=p)
    if precision not in PRECISIONS:
        PRECISION.require("cayley", "precision", precision)
    if phase is not None:
        d = None
    elif signs is not None:
        d = diagonal(signs=signs)
    else:
        d = v.new_ones(p, dtype=torch.float64)
    if n > p:
        w = _Tall.of(v, phase, d, n, p)
    else:
        fast = precision == "fast" and v.dtype == torch.float32 and n >= _SMALLEST_FAST
        w = _Square.of(v, phase, d, n, fast)
    if v.dtype == torch.float32 and w.dtype in _DOUBLE and splits(w):  # type: ignore[union-attr]
        w = settle(w)  # type: ignore[arg-type]
    return w.to(torch.promote_types(v.dtype, torch.complex32) if d is None else v.dtype)  # type: ignore[union-attr]


class _Square(Function):
    """Saves W itself, from which 2 M D = W + D.

    A saved output keeps second derivatives right where a further saved tensor would not.
    """

    @staticmethod
    def forward(v: Tensor, phase: Tensor | None, d: Tensor | None, n: int, fast: bool) -> Tensor:  # type: ignore[override]
        is_complex = phase is not None
        # A real A of odd order has a null vector, which costs the gradient half of float32's digits at large
        # coordinates.
        is_single = fast or (n > _LARGEST_IN_DOUBLE and (is_complex or n % 2 == 0))
        dtype = v.dtype if is_single else torch.float64
        dtype = torch.promote_types(dtype, torch.complex32) if is_complex else dtype
        may_launch = v.dtype == torch.float32 and not fast and (v.is_cuda or Anywhere.is_asked)
        if may_launch and takes(v, n, 1 + is_complex):
            return cayley_forward(v, _entries(phase, d), n, dtype)
        a = unpack_square(v, n, is_complex, shift=1.0)
        is_split = v.dtype == torch.float32 and not fast and splits(a)
        if not fast:
            a = a.to(torch.complex128 if a.is_complex() else torch.float64)
        if is_split:
            m = fine_inverse(a, BITS_OF_RESIDUALS)
        else:
            m = torch.linalg.inv_ex(a)[0] if n < SMALLEST_BLOCKED else inverse_of_accretive(a)
        if v.dtype == torch.float64:
            # What the inverse leaves in float64, a Newton step takes away.
            m = m + m @ (torch.eye(n, dtype=m.dtype, device=m.device) - a @ m)
        if is_exporting():
            m = m.clone()  # an exported program trains by the derivative of the inverse, which needs it as it is
        d = (diagonal(phase=phase) if d is None else d).to(m.dtype)
        if is_split:
            w = m.mul_(2 * d.unsqueeze(-2))
            w.diagonal(dim1=-2, dim2=-1).sub_(d)
            # What is saved in float64 has 2 M D = W + D to the digits of M, which may be small.
            return w if dtype == w.dtype else settled(w).to(dtype)
        if n < _LARGE or dtype == m.dtype:
            w = m.mul_(2 * d.unsqueeze(-2))
            w.diagonal(dim1=-2, dim2=-1).sub_(d)
            return polish(w) if v.dtype == torch.float64 else w.to(dtype)
        on_diagonal = (2 * m.diagonal(dim1=-2, dim2=-1) - 1) * d
        doubled = (2 * d).unsqueeze(-2)
        # Signs may come after the rounding, phases may not.
        w = m.mul_(doubled).to(dtype) if m.is_complex() else m.to(dtype).mul_(doubled.to(dtype))
        w.diagonal(dim1=-2, dim2=-1).copy_(on_diagonal)
        return w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        v, phase, d, ctx.n, _ = inputs
        ctx.dtype = v.dtype
        ctx.save_for_backward(phase, d, output)
        ctx.save_for_forward(phase, d, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        phase, d, w = ctx.saved_tensors
        if not is_differentiated() and ctx.dtype == torch.float32 and takes(w, ctx.n, 1 + w.is_complex()):
            gv = cayley_backward(w, g, _entries(phase, d), ctx.dtype)
            return gv, phase_gradient(phase, w, g), None, None, None
        d = _entries(phase, d).to(w.dtype)
        adjoint = _add_diagonal(w, d).mH
        # (2 M)^H G D^H (2 M)^H with (2 M)^H = D (W + D)^H
        between = _times(ctx.dtype, w)
        inner = sandwich(adjoint, g) if between is product else between(between(adjoint, g), adjoint)
        gv = pack_skew_gradient(inner * (d * -0.5).unsqueeze(-1))
        return gv.to(ctx.dtype), phase_gradient(phase, w, g), None, None, None

    @staticmethod
    def tangent(ctx: Any, tv: Tensor | None, tp: Tensor | None, *_: None) -> Tensor:  # type: ignore[override]
        phase, d, w = ctx.saved_tensors
        tw = phase_tangent(w, tp)
        if tv is None:
            return tw
        doubled = _add_diagonal(w, _entries(phase, d).to(w.dtype))
        ta = unpack_square(tv.to(w.real.dtype), ctx.n, w.is_complex())
        back = doubled * _entries(phase, d).to(w.dtype).conj().unsqueeze(-2)
        return tw - product(product(back, ta), doubled) / 2


class _Tall(Function):
    """Saves the coordinates and W, from whose upper block 2 X D = W1 + D."""

    @staticmethod
    def forward(v: Tensor, phase: Tensor | None, d: Tensor | None, n: int, p: int) -> Tensor:  # type: ignore[override]
        a11, a21 = unpack_skew(v.double(), n, p, phase is not None)
        d = _entries(phase, d).to(a11.dtype)
        if _is_split(v, a11):
            return _split_frame(a11, a21, d)
        doubled = 2 * _resolvent(a11, a21) * d.unsqueeze(-2)
        w = torch.cat([_add_diagonal(doubled, -d).mT, -doubled.mT @ a21.mT], dim=-1).mT
        return polish(w) if v.dtype == torch.float64 else w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        v, phase, d, ctx.n, ctx.p = inputs
        keep(ctx, v, phase, d, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        v, phase, d, w = ctx.saved_tensors
        n, p = ctx.n, ctx.p
        d = _entries(phase, d).to(w.dtype)
        adjoint = _add_diagonal(w[..., :p, :], d).mH
        _, a21 = unpack_skew(v.double(), n, p, phase is not None)
        g1, g2 = g[..., :p, :], g[..., p:, :]
        if _is_split(v, w):
            times = _of_tall
            g11 = times(times(adjoint, g1 - times(a21.mH, g2)), adjoint) * (d.unsqueeze(-1) / -2)
            g21 = (times(a21, g11 + g11.mH) - times(g2, adjoint)).mT
        else:
            g11 = adjoint @ (g1 - a21.mH @ g2) @ adjoint * (d.unsqueeze(-1) / -2)
            g21 = plus_product((g11 + g11.mH).mT @ a21.mT, adjoint.mT, g2.mT, -1)
        gv = pack_skew_gradient(g11, g21.mT)
        return gv.to(v.dtype), phase_gradient(phase, w, g), None, None, None

    @staticmethod
    def tangent(ctx: Any, tv: Tensor | None, tp: Tensor | None, *_: None) -> Tensor:  # type: ignore[override]
        v, phase, d, w = ctx.saved_tensors
        n, p = ctx.n, ctx.p
        tw = phase_tangent(w, tp)
        if tv is None:
            return tw
        doubled = _add_diagonal(w[..., :p, :], _entries(phase, d).to(w.dtype))
        back = doubled * _entries(phase, d).to(w.dtype).conj().unsqueeze(-2)
        a21 = unpack_skew(v.double(), n, p, phase is not None)[1]
        t11, t21 = unpack_skew(tv.double(), n, p, phase is not None)
        inner = a21.mH @ t21
        top = back @ (t11 + inner + inner.mH) @ doubled / -2
        return tw + torch.cat([top, -(t21 @ doubled) - a21 @ top], dim=-2)


def _is_split(v: Tensor, m: Tensor) -> bool:
    """Returns whether frames of float32 coordinates are spared products of float64 matrices as large as M."""
    return v.dtype == torch.float32 and splits(m)


def _times(dtype: torch.dtype, w: Tensor) -> Any:
    """Returns the product with a W of float64 for coordinates of a dtype."""
    return fine_product if dtype == torch.float32 and w.dtype == working_dtype(w.dtype) and splits(w) else product


def _of_tall(a: Tensor, b: Tensor) -> Tensor:
    return fine_product(a, b, BITS_OF_TALL)


def _entries(phase: Tensor | None, d: Tensor | None) -> Tensor:
    return diagonal(phase=phase) if d is None else d


def _add_diagonal(m: Tensor, d: Tensor) -> Tensor:
    total = m.clone()
    total.diagonal(dim1=-2, dim2=-1).add_(d)
    return total


def _resolvent(a11: Tensor, a21: Tensor) -> Tensor:
    """Returns (I + A11 + A21^H A21)^-1, accurate also where A21 is large in some directions and vanishes in others.

    With [I; A21] = Q R it is Q1 (I + Q1^H A11 Q1)^-1 Q1^H, Q1 = R^-1: the Gram matrix, whose rounding would swamp the
    identity, is never formed.
    """
    eye = torch.eye(a11.shape[-1], dtype=a11.dtype, device=a11.device)
    r = torch.linalg.qr(a21, mode="r")[1]
    r = torch.linalg.qr(torch.cat([eye.expand_as(a11), r], dim=-2), mode="r")[1]
    q1 = torch.linalg.solve_triangular(r, eye.expand_as(a11), upper=True)
    inner = torch.linalg.inv_ex(eye + q1.mH @ a11 @ q1)[0]
    return q1 @ inner @ q1.mH


@opaque(lambda a11, a21, d: a11.new_empty(*a11.shape[:-2], a11.shape[-2] + a21.shape[-2], a11.shape[-1]))
def _split_frame(a11: Tensor, a21: Tensor, d: Tensor) -> Tensor:
    """Maps in float32 products: with any Q near R^-1 it is Q (Q^H Q + Z^H Z + Q^H A11 Q)^-1 Q^H, Z = A21 Q.

    What is inverted is near I in its Hermitian part, since Q is R^-1 to float32.
    """
    single = torch.complex64 if a11.is_complex() else torch.float32
    eye = torch.eye(a11.shape[-1], dtype=single, device=a11.device)
    r = torch.linalg.qr(a21.to(single), mode="r")[1]
    r = torch.linalg.qr(torch.cat([eye.expand_as(a11), r], dim=-2), mode="r")[1]
    q = torch.linalg.solve_triangular(r, eye.expand_as(r), upper=True).to(a11.dtype)
    z = _of_tall(a21, q)
    qh = q.mH.resolve_conj()
    gram = _of_tall(qh, q) + _of_tall(z.mH, z)
    inverse = fine_inverse(gram + _of_tall(qh, _of_tall(a11, q)), BITS_OF_TALL)
    x = _of_tall(inverse, qh) * (2 * d.unsqueeze(-2))
    return torch.cat([_add_diagonal(_of_tall(q, x), -d), -_of_tall(z, x)], dim=-2)
