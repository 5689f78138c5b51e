"""Products with Hadamard matrices, without forming them."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_traced
from stiefelkit.errors import ShapeError, needs
from stiefelkit.functional._arithmetic.function import Context, Function
from stiefelkit.functional._arithmetic.product import opaque
from stiefelkit.init import hadamard_factors
from stiefelkit.tensors import check_dtype, check_tensors, working_dtype

_RADIX = 16
"""The order up to which factors are multiplied to one matrix: measured, passes of such products are the fastest."""


def hadamard_transform(x: Tensor, *, adjoint: bool = False) -> Tensor:
    """Returns :math:`H x / √n` for vectors x, with the matrix of `stiefelkit.init.hadamard(n, random=False)`.

    It is orthogonal. Costs :math:`8 n log_2(n)` operations for :math:`n = 2^k` in place of :math:`2 n^2`: one product
    with a matrix of order 16 for each four factors of 2, and one with the last factor. Worked out in float64 or
    complex128, and rounded once. Differentiable any number of times.

    Args:
        x: vectors of shape (*, n), real or complex, of any floating dtype.
        adjoint: multiplies by :math:`H^T` instead, the inverse.

    >>> hadamard_transform(torch.tensor([3.0, 1.0, 0.0, 0.0]))
    tensor([2., 1., 2., 1.])
    """
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        check_tensors("hadamard_transform", x)
        check_dtype("hadamard_transform", x.dtype)
    if x.dim() < 1:
        needs(False, ShapeError, "hadamard_transform", "vectors of shape (*, n)", "a number")
    if not is_traced():
        hadamard_factors(x.shape[-1])  # raises
    return _Transform.of(x, adjoint)


class _Transform(Function):
    """Applies H or its adjoint, each of which is the other's gradient."""

    @staticmethod
    def forward(x: Tensor, adjoint: bool) -> Tensor:
        return _transformed(x, adjoint)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.adjoint = inputs[1]

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor, None]:
        return _Transform.of(g, not ctx.adjoint), None

    @staticmethod
    def tangent(ctx: Context, t: Tensor, *_: None) -> Tensor:
        return _Transform.of(t, ctx.adjoint)


@opaque(lambda x, adjoint: torch.empty_like(x, memory_format=torch.contiguous_format), dims=(1,))
def _transformed(x: Tensor, adjoint: bool) -> Tensor:
    n = x.shape[-1]
    y = x.to(working_dtype(x.dtype)).resolve_conj()
    rest = n
    for h in _grouped(n, y.dtype, y.device):
        # x is in the order (before, this factor, after): each factor acts on an index of its own.
        m = len(h)
        rest //= m
        h = h.mT if adjoint else h
        y = h @ y.reshape(-1, m, rest) if rest > 1 else y.reshape(-1, m) @ h.mT
    return (y.reshape(x.shape) / n**0.5).to(x.dtype)


@functools.lru_cache(64)
def _grouped(n: int, dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
    """Returns the factors of the matrix of order n, small ones multiplied together, kept where they are used."""
    groups: list[Tensor] = []
    with torch.inference_mode(False):
        for h in hadamard_factors(n):
            if groups and len(groups[-1]) * len(h) <= _RADIX:
                groups[-1] = torch.kron(groups[-1], h)
            else:
                groups.append(h)
        return tuple(h.to(device, dtype) for h in groups)
