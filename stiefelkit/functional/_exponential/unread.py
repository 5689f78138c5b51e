"""The exponential where no value is read: a fixed number of squarings, of which each matrix takes those it needs."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.norms import finite
from stiefelkit.functional._exponential.polynomial import (
    DEGREE,
    LOG_FACTORIAL,
    adder,
    polynomial,
    polynomial_adjoint,
    products,
)
from stiefelkit.metrics import working_dtype

__all__ = ["SQUARINGS", "unread_adjoint", "unread_exponential"]

SQUARINGS = 20
"""Enough for ||A||_2 of some 2e5: turns of which float32 coordinates hold two digits."""


def unread_exponential(
    a: Tensor, skew: bool, truncation: float | None, split: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the exponential in float64 or complex128, by float32 products if `split`, and what its adjoint takes.

    That is powers of A 2^-s, parts of its polynomial, s (of integers, by which they are known, shape (*, 1, 1)), 2^-s,
    and what was squared.
    """
    n = a.shape[-1]
    a = a.to(working_dtype(a.dtype))
    a = a.reshape(-1, n, n) if a.dim() > 3 else a
    times, _ = products(a, split)
    a2 = times(a, a)
    a3 = times(a2, a)
    unit = math.log2(3.5 * torch.finfo(a.dtype).eps if truncation is None else truncation)
    norm = _bound(a, a2, a3, skew)
    s = ((13 * norm.log2() - LOG_FACTORIAL - unit) / DEGREE).ceil_().clamp_(0, SQUARINGS)
    longest = 2 ** ((DEGREE * SQUARINGS + LOG_FACTORIAL + unit) / 13)
    scale = (longest / norm).clamp_(max=1) * 0.5**s
    powers = torch.stack([a * scale, a2 * scale**2, a3 * scale**3])
    w, b = polynomial(powers, 0, split)
    squared = []
    for k in range(SQUARINGS):
        squared.append(w)
        w = torch.where(s > k, times(w, w), w)
    return w, (powers, b, s.long(), scale, *squared)


def unread_adjoint(g: Tensor, factors: Sequence[Tensor], skew: bool, split: bool = False) -> Tensor:
    """Returns the gradient of A by that of its exponential, up to a Hermitian matrix for a skew A."""
    powers, b, s, scale, *squared = factors
    shape, g = g.shape, g.reshape(powers.shape[1:])
    times, _ = products(g, split)
    add_product_ = adder(split)
    for k, w in reversed(list(enumerate(squared))):
        wh = w.mH
        g = torch.where(s > k, add_product_(times(g, wh), wh, g), g)
    return polynomial_adjoint(g, powers, b, 0, skew, split).mul_(scale).view(shape)


def _bound(a: Tensor, a2: Tensor, a3: Tensor, skew: bool) -> Tensor:
    """Returns a bound of ||A||_2 for each matrix, shape (*, 1, 1); zero for what is not finite."""
    if not skew:
        return finite(torch.linalg.matrix_norm(a, 1, keepdim=True))
    # The singular values of A^k are the powers of those of A.
    second, third = (torch.linalg.matrix_norm(power, keepdim=True) for power in (a2, a3))
    return finite(torch.minimum(second.sqrt(), third ** (1 / 3)))
