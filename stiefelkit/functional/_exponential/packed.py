r"""The exponential of a packed tangent vector.

Square: W = exp(A). Tall: the first p columns of the n x n exponential of A = [[A11, -A21^H], [A21, 0]], which are
[W1; Z Y] with [W1; Y] those of a 2p x 2p exponential: A maps the span of the first p unit vectors and of the columns of
A21 into itself. With any invertible C and B = [[I, 0], [0, Z]], Z = A21 C^-1, it does so by A B = B M,
M = [[A11, -A21^H Z], [C, 0]], so that exp(A) B = B exp(M). The Cholesky factor C of I + A21^H A21 makes M nearly skew.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.float64 import splits
from stiefelkit.functional._arithmetic.function import Function
from stiefelkit.functional._arithmetic.product import product
from stiefelkit.functional._arithmetic.split_products import fine_product, settle, settled
from stiefelkit.functional._exponential.taylor import exponential
from stiefelkit.functional._packing import pack_skew_gradient, unpack_skew
from stiefelkit.functional._polish import polish
from stiefelkit.numbers import PRECISION, PRECISIONS, check_counts
from stiefelkit.tensors import check_tensors

_LARGEST_IN_DOUBLE = 32
_FINER_THAN_SINGLE = 1e-10
"""Truncation of what is worked out in float64 and rounded to float32."""


def matrix_exp(
    v: Tensor, n: int, p: int, is_complex: bool, *, rotation: Tensor | None = None, precision: str = "exact"
) -> Tensor:
    """Returns the first p columns of the exponential of a skew matrix in packed coordinates, times a fixed rotation.

    Differentiable any number of times, once of them in forward mode; composes with vmap, compile and export. Square
    frames and those with :math:`n ≤ 2p` take 4 products of n x n and 7 more backward up to norm 2 (see `exponential`),
    in float32 up to norm 8; taller ones the same number of 2p x 2p in float64, and two products of (n - p) x p, 4 more
    backward. Those of float32 coordinates are frames to rounding up to about 1e5, of float64 ones, polished twice, 1e8.

    Args:
        v: packed coordinates (see `unpack_skew`), shape (*, skew_size(n, p, is_complex)), float32 or float64.
        n: rows of the frame.
        p: columns of the frame, :math:`p ≤ n`.
        is_complex: whether the frame is complex.
        rotation: orthogonal or unitary to float32, shape (*, p, p), float64 or complex128; polished before use.
        precision: "exact" or "fast"; "fast" leaves out the polish of float32 frames with :math:`n ≤ 2p`.

    Returns:
        Frames of shape (*, n, p) in the precision of v.

    Raises:
        DtypeError: v is no tensor.
        ShapeError: v has another number of coordinates.
        OptionError: n or p is no count, or the precision is another word.
    """
    check_tensors("matrix_exp", v)
    check_counts("matrix_exp", n=n, p=p)
    if precision not in PRECISIONS:
        PRECISION.require("matrix_exp", "precision", precision)
    single = v.dtype == torch.float32
    # Small ones cost no more in float64 than a polish would.
    double = not single or n > 2 * p or (precision == "exact" and n <= _LARGEST_IN_DOUBLE)
    last = not single or not (double or precision == "fast")
    v = v.double() if double else v
    truncation = _FINER_THAN_SINGLE if single and double else None
    is_split = single and splits(v.new_empty(0, p))
    last = last or (is_split and not double)
    if n > 2 * p:
        w = _tall(v, n, p, is_complex, truncation)
        w = w if single else polish(w)
    else:
        a = _Skew.of(v, n, p, is_complex)
        w = exponential(a, skew=True, truncation=truncation, polish=last and n == p)  # type: ignore[arg-type]
    if n > p:
        w = w[..., :p]
        if rotation is not None:
            # Float64 frames of float32 weights are spared float64 products where these are slow.
            w = fine_product(w, settled(rotation)) if is_split and double else product(w, polish(rotation).to(w.dtype))
        w = polish(w) if last else w
    w = settle(w) if is_split and double else w
    return w.to(torch.complex64 if is_complex else torch.float32) if single else w


class _Skew(Function):
    """The whole n x n matrix, which is linear in v."""

    @staticmethod
    def forward(v: Tensor, n: int, p: int, is_complex: bool) -> Tensor:  # type: ignore[override]
        a11, a21 = unpack_skew(v, n, p, is_complex)
        return a11 if n == p else whole(a11, a21)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.n, ctx.p, ctx.is_complex = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        p = ctx.p
        if ctx.n == p:
            return pack_skew_gradient(g), None, None, None
        gv = pack_skew_gradient(g[..., :p, :p], g[..., p:, :p] - g[..., :p, p:].mH)
        return gv, None, None, None

    @staticmethod
    def tangent(ctx: Any, t: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        return _Skew.of(t, ctx.n, ctx.p, ctx.is_complex)  # type: ignore[return-value]


def _tall(v: Tensor, n: int, p: int, is_complex: bool, truncation: float | None) -> Tensor:
    a11, a21 = unpack_skew(v, n, p, is_complex)
    is_split = truncation is not None and splits(a11)
    times = fine_product if is_split else torch.matmul
    block, z, _ = on_span(a11, a21, times)
    columns = exponential(block, truncation=truncation)[..., :p]
    return torch.cat([columns[..., :p, :], times(z, columns[..., p:, :])], dim=-2)


def whole(a11: Tensor, a21: Tensor) -> Tensor:
    """Returns A itself, shape (*, n, n), from its blocks of shape (*, p, p) and (*, n - p, p)."""
    zero = a11.new_zeros(*a11.shape[:-2], a21.shape[-2], a21.shape[-2])
    return torch.cat([torch.cat([a11, a21], dim=-2), torch.cat([-a21.mH, zero], dim=-2)], dim=-1)


def on_span(
    a11: Tensor, a21: Tensor, times: Callable[[Tensor, Tensor], Tensor] = torch.matmul
) -> tuple[Tensor, Tensor, Tensor]:
    """M of shape (*, 2p, 2p), Z of shape (*, n, p), and C, on which exp(A) does not depend: a constant to derivatives.

    Of A11, skew, (*, p, p), and A21, (*, n, p), float64 or complex128, with `times` for products.
    """
    # no_grad would leave forward derivatives.
    constant = a21.detach()
    gram = times(constant.mH, constant)
    shift = 1 + 1e-14 * gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)[..., None, None]
    eye = torch.eye(a11.shape[-1], dtype=a11.dtype, device=a11.device)
    c = torch.linalg.cholesky_ex(gram + shift * eye, upper=True)[0]
    z = torch.linalg.solve_triangular(c, a21, upper=True, left=False)
    right = torch.cat([-times(a21.mH, z), torch.zeros_like(c)], dim=-2)
    return torch.cat([torch.cat([a11, c], dim=-2), right], dim=-1), z, c
