"""Products and inverses to more digits than float32 holds, by float32 products, for devices whose float64 is slow.

Storage, sums and scalings are float64, which costs n^2 slow operations; the n^3 are products of float32. Slices are
whole numbers of so few bits that a product of two of them is exact in float32 in any order of summation, on tensor
cores lowered to TF32 as well (Ozaki, Ogita, Oishi, Rump 2012).
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.function import Context, Function, keep
from stiefelkit.functional._arithmetic.product import bilinear_tangent, opaque, product
from stiefelkit.functional._polish import Polish, split_defect

BITS = 40
"""Of a product, relative to the largest entries of a row of A and a column of B."""
BITS_OF_RESIDUALS = 30
BITS_OF_TALL = 50
"""Of tall frames, whose gradients with large coordinates cancel to a millionth of their terms."""
_EXACT = 24
"""Bits of whole numbers that float32 holds."""


def fine_product(a: Tensor, b: Tensor, bits: int = BITS) -> Tensor:
    """Multiplies as `sliced_product`; differentiable any number of times."""
    return _Fine.of(a, b, bits)


class _Fine(Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, bits: int) -> Tensor:
        return sliced_product(a, b, bits)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, ctx.bits = inputs
        keep(ctx, a, b)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), bits = ctx.saved_tensors, ctx.bits
        ga, gb = fine_product(g, b.mH, bits), fine_product(a.mH, g, bits)
        return ga.sum_to_size(a.shape), gb.sum_to_size(b.shape), None

    @staticmethod
    def tangent(ctx: Context, ta: Tensor | None, tb: Tensor | None, _: None) -> Tensor:
        a, b = ctx.saved_tensors
        return bilinear_tangent(partial(fine_product, bits=ctx.bits), a, b, ta, tb)


@opaque(lambda a, b, bits: a @ b, dims=(2, 2))
def sliced_product(a: Tensor, b: Tensor, bits: int) -> Tensor:
    """Multiplies float64 or complex128 matrices by float32 products, to so many bits of rows' and columns' largest."""
    if not a.is_complex():
        return _sliced(a, b, bits)
    # One real product of twice the length makes both parts.
    a, b = a.resolve_conj(), b.resolve_conj()
    rows = torch.cat([torch.cat([a.real, -a.imag], -1), torch.cat([a.imag, a.real], -1)], -2)
    re, im = _sliced(rows, torch.cat([b.real, b.imag], -2), bits).chunk(2, -2)
    return torch.complex(re.contiguous(), im.contiguous())


def _sliced(a: Tensor, b: Tensor, bits: int) -> Tensor:
    k = a.shape[-1]
    count, width = slices_for(k, bits)
    rows, columns = _scale(a, -1), _scale(b, -2)
    left, right = torch.cat(_slices(a / rows, count, width), -1), _slices(b / columns, count, width)
    right = torch.cat(right[::-1], -2)
    total = None
    for order in reversed(range(count)):
        # All pairs of slices of one order of magnitude, in one product.
        inner = (order + 1) * k
        part = (left[..., :inner] @ right[..., (count - 1 - order) * k :, :]).to(a.dtype)
        part = part.mul_(0.5 ** (width * (order + 2)))
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.mul_(rows).mul_(columns)


def slices_for(k: int, bits: int) -> tuple[int, int]:
    """Returns how many slices of how many bits hold as many bits, sums over k entries of all of them being exact."""
    count = 1
    while True:
        width = max((_EXACT - math.ceil(math.log2(k * count or 1))) // 2, 1)
        if count * width >= bits:
            return count, width
        count += 1


def _scale(m: Tensor, dim: int) -> Tensor:
    """Returns powers of 2 at or above the largest entries along a dimension; 1 where all are zero, NaN beside NaN."""
    if not m.numel():
        return m.new_ones(())
    largest = m.abs().amax(dim, keepdim=True)
    return torch.where(largest == 0, 1.0, largest).log2().ceil().exp2()


def _slices(m: Tensor, count: int, width: int) -> list[Tensor]:
    parts = []
    for _ in range(count):
        m = m * 2**width
        rounded = m.round()
        parts.append(rounded.float())
        m = m - rounded
    return parts


@opaque(lambda m, bits: torch.empty_like(m, memory_format=torch.contiguous_format))
def fine_inverse(m: Tensor, bits: int) -> Tensor:
    """Inverts float64 or complex128 M, its Hermitian part at least I, by float32 products to about ||M|| 2^-bits."""
    single = torch.complex64 if m.is_complex() else torch.float32
    x = torch.linalg.inv_ex(m.to(single))[0].to(m.dtype)
    for _ in range(2 if bits <= BITS_OF_RESIDUALS else 3):
        less = sliced_product(m, x, bits)
        less.diagonal(dim1=-2, dim2=-1).sub_(1)
        x = x - (x.to(single) @ less.to(single)).to(m.dtype)
    return x


def settled(w: Tensor) -> Tensor:
    """Takes one Newton step to the nearest float64 or complex128 frames by float32 products: d becomes 3/4 d^2."""
    single = torch.complex64 if w.is_complex() else torch.float32
    high = w.to(single)
    error = split_defect(high, (w - high.to(w.dtype)).to(single))
    return w - product(high, error).to(w.dtype) / 2


class _Settle(Polish):
    @staticmethod
    def forward(w: Tensor) -> Tensor:
        return settled(w)


settle = _Settle.of
"""Takes the same step, which gradients pass straight through, as through `polish`."""
