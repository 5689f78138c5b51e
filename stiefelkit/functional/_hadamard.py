"""Products with Hadamard matrices, without forming them."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_differentiated, is_traced
from stiefelkit.errors import ShapeError, needs
from stiefelkit.functional._arithmetic.function import Context, Function, by_transposing, keep
from stiefelkit.functional._arithmetic.product import opaque
from stiefelkit.functional._kernels.columns import (
    LONGEST,
    hadamard_rows,
    hadamard_rows_gradient,
    takes_rows,
    transform_rows,
)
from stiefelkit.functional._packing import diagonal
from stiefelkit.init import hadamard_factors
from stiefelkit.numbers import integer
from stiefelkit.tensors import check_dtype, check_tensors, working_dtype

_RADIX = 16  # order up to which factors are multiplied to one matrix; passes of such products are the fastest


def hadamard_transform(
    x: Tensor, *, adjoint: bool = False, block: int | None = None, order: str | None = None
) -> Tensor:
    """Returns :math:`H x / √n` for vectors x, with the matrix of `stiefelkit.init.hadamard(n, random=False)`.

    It is orthogonal. Costs :math:`8 n log_2(n)` operations for :math:`n = 2^k` in place of :math:`2 n^2`: one product
    with a matrix of order 16 for each four factors of 2, and one with the last factor. Worked out in float64 or
    complex128, and rounded once. Differentiable any number of times.

    Args:
        x: vectors of shape (*, n), real or complex, of any floating dtype.
        adjoint: multiplies by :math:`H^T` instead, the inverse.
        block: transforms each run of so many entries alone; for n that have no such matrix.
        order: as of `stiefelkit.init.hadamard`; that of the library `fast_hadamard_transform` is by its name.

    >>> hadamard_transform(torch.tensor([3.0, 1.0, 0.0, 0.0]))
    tensor([2., 1., 2., 1.])
    """
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        check_tensors("hadamard_transform", x)
        check_dtype("hadamard_transform", x.dtype)
    if x.dim() < 1:
        needs(False, ShapeError, "hadamard_transform", "vectors of shape (*, n)", "a number")
    if block is not None and block != x.shape[-1]:
        size, n = int(integer(1).require("hadamard_transform", "block", block)), x.shape[-1]
        needs(n % size == 0, ShapeError, "hadamard_transform", f"a block that divides {n}", size)
        return hadamard_transform(x.unflatten(-1, (-1, size)), adjoint=adjoint, order=order).flatten(-2)
    if not is_traced():
        hadamard_factors(x.shape[-1], order)  # raises
    return _Transform.of(x, adjoint, order)


class _Transform(Function):
    """Applies H or its adjoint, each of which is the other's gradient."""

    @staticmethod
    def forward(x: Tensor, adjoint: bool, order: str | None) -> Tensor:
        return _transformed(x, adjoint, order)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.adjoint, ctx.order = inputs[1:]

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor, None, None]:
        return _Transform.of(g, not ctx.adjoint, ctx.order), None, None

    @staticmethod
    def tangent(ctx: Context, t: Tensor, *_: None) -> Tensor:
        return _Transform.of(t, ctx.adjoint, ctx.order)


@opaque(lambda x, adjoint, order: torch.empty_like(x, memory_format=torch.contiguous_format), dims=(1,))
def _transformed(x: Tensor, adjoint: bool, order: str | None) -> Tensor:
    n = x.shape[-1]
    if x.dtype.to_real() in (torch.float32, torch.float64) and takes_rows(x, n, 8 * LONGEST):
        return transform_rows(x)
    y = x.to(working_dtype(x.dtype)).resolve_conj()
    rest = n
    for h in _grouped(n, order, y.dtype, y.device):
        # x is in the order (before, this factor, after): each factor acts on an index of its own.
        m = len(h)
        rest //= m
        h = h.mT if adjoint else h
        y = h @ y.reshape(-1, m, rest) if rest > 1 else y.reshape(-1, m) @ h.mT
    return (y.reshape(x.shape) / n**0.5).to(x.dtype)


@functools.lru_cache(64)
def _grouped(n: int, order: str | None, dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
    """Returns the factors of the matrix of order n, small ones multiplied together, kept where they are used."""
    groups: list[Tensor] = []
    with torch.inference_mode(False):
        for h in hadamard_factors(n, order):
            if groups and len(groups[-1]) * len(h) <= _RADIX:
                groups[-1] = torch.kron(groups[-1], h)
            else:
                groups.append(h)
        return tuple(h.to(device, dtype) for h in groups)


def turned_rows(x: Tensor | None, turn: Tensor, signs: Tensor | None, n: int, dtype: torch.dtype) -> Tensor:
    """Returns x W^T for :math:`W = D_2 H D_1`, or if real :math:`W = S_2 R_2 H R_1 S_1`, as the map `Hadamard` has it.

    Args:
        x: rows of shape (*, m, n), those of the identity if None.
        turn: phases of D1 and D2, shape (*, 2, n), or angles of R1 and R2, (*, 2, n // 2).
        signs: of S1 and S2, shape (*, 2, n); None if W is complex.
        n: the order.
        dtype: the result is rounded to it once.
    """
    if not takes_rows(turn, n):
        return _plainly_turned(x, turn, signs, n).to(dtype)
    if x is not None and turn.dim() > 2:
        x = x.expand(*turn.shape[:-2], *x.shape[-2:])
    y = _Turned.of(turn, signs, x if x is None or turn.dim() > 2 else x.reshape(-1, n), n, dtype)[0]
    return y if x is None else y.reshape(x.shape)


class _Turned(Function):
    """Saves cosines and sines for the derivative in one launch; further derivatives are those of the plain formula."""

    @staticmethod
    def forward(turn: Tensor, signs: Tensor | None, x: Tensor | None, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return hadamard_rows(turn, signs, x, n, dtype)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        turn, signs, x, ctx.n, _ = inputs
        keep(ctx, turn, signs, x, *output[1:], output[0])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, g: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        turn, signs, x, c, s, _ = ctx.saved_tensors
        if g is None:
            return (None,) * 5
        if is_differentiated():

            def plainly(turn: Tensor, *x: Tensor) -> Tensor:
                return _plainly_turned(x[0] if x else None, turn, signs, ctx.n).to(g.dtype)

            to_turn, *to_x = torch.func.vjp(plainly, turn, *([] if x is None else [x]))[1](g)
        else:
            to_turn, *to_x = hadamard_rows_gradient(c, s, signs, x, g)
        return to_turn.to(turn.dtype), None, None if x is None else to_x[0], None, None

    @staticmethod
    def tangent(ctx: Context, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return by_transposing(_Turned.backward)(ctx, *tangents), None, None


def _plainly_turned(x: Tensor | None, turn: Tensor, signs: Tensor | None, n: int) -> Tensor:
    """Does the same by operators that torch differentiates, in float64 or complex128."""
    d = diagonal(phase=turn) if signs is None else diagonal(signs=signs)
    x = torch.eye(n, dtype=d.dtype, device=d.device) if x is None else x.to(d.dtype)
    first, last = (d.unsqueeze(-2) for d in d.unbind(-2))
    if signs is None:
        return hadamard_transform(x * first) * last
    right, left = (t.unsqueeze(-2) for t in turn.double().unbind(-2))
    return _rotated(hadamard_transform(_rotated(x * first, right)), left) * last


def _rotated(x: Tensor, t: Tensor) -> Tensor:
    """Rotates the entries i and i + n // 2 of vectors x by angles t; a single entry stays."""
    a, b, rest = x.tensor_split((t.shape[-1], 2 * t.shape[-1]), -1)
    return torch.cat([t.cos() * a - t.sin() * b, t.sin() * a + t.cos() * b, rest], -1)
