"""Taylor's polynomial of degree 12 of scaled matrices, by four products, and its adjoint.

Bader, Blanes, Casas 2019; the coefficients, one of a family, were solved for in 50 digits.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.product import add_product_
from stiefelkit.functional._arithmetic.split_products import BITS, sliced_product
from stiefelkit.functional._packing import minus_adjoint

__all__ = ["DEGREE", "LOG_FACTORIAL", "adder", "polynomial", "polynomial_adjoint", "products"]

DEGREE = 12
LOG_FACTORIAL = math.log2(math.factorial(DEGREE + 1))
_CONSTANTS = (0.0, 5.3159789575987123025, 0.18188869982170451712, 0.0)
_POWERS = (
    (0.46932117595418217043, -0.20099424927047284253, -0.046239461340630719291),
    (1.1992679041713223157, 0.011792962409929970316, 0.01108844528519167989),
    (0.055027984399308985572, 0.09351590770536261043, 0.0061070052889834025576),
    (-0.13181061013830184016, -0.020278555405892590793, -0.0067595184686308635978),
)
"""B_k = constant + combination of A, A^2, A^3; then A6 = B2 + B3^2 and sum_{j <= 12} A^j / j! = B0 + (B1 + A6) A6."""


def polynomial(powers: Tensor, s: int, split: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the polynomial of A 2^-s from A, A^2 and A^3, stacked, and parts of it: itself, B1 + A6, A6 and B3.

    With `split` here and below products of float64 are those of `sliced_product`.
    """
    add_product_ = adder(split)
    b = _combine(powers, s, False)
    for k in (1, 2):
        b[k].diagonal(dim1=-2, dim2=-1).add_(_CONSTANTS[k])
    a6 = add_product_(b[2], b[3], b[3])
    left = b[1].add_(a6)
    return add_product_(b[0], left, a6), b


def polynomial_adjoint(g: Tensor, powers: Tensor, b: Tensor, s: int, skew: bool, split: bool = False) -> Tensor:
    """Returns the gradient of A by that of the polynomial, up to a Hermitian matrix for a skew A."""
    a, a2, _ = powers
    _, left, a6, b3 = b
    times, add_product = products(a, split)
    add_product_ = adder(split)
    gb = torch.empty_like(b)
    gb[0] = g
    times(g, a6.mH, out=gb[1])
    add_product(gb[1], left.mH, g, out=gb[2])
    times(gb[2], b3.mH, out=gb[3])
    add_product_(gb[3], b3.mH, gb[2])
    ga, ga2, ga3 = _combine(gb, s, True)
    if skew:
        # A^2 can change by Hermitian, A^3 by skew matrices only: -(S A + A S) and -2 S A have the same skew part.
        ga3 = minus_adjoint(ga3)
        add_product_(ga2, ga3, a, alpha=-0.5)
        add_product_(ga, a2, ga3, alpha=0.5)
        return add_product_(ga, ga2 + ga2.mH, a, alpha=-1)
    add_product_(ga2, ga3, a.mH)
    add_product_(ga, a2.mH, ga3)
    add_product_(ga, ga2, a.mH)
    return add_product_(ga, a.mH, ga2)


def products(a: Tensor, split: bool = False) -> tuple[Any, Any]:
    """Returns what gives A B, and C + A B, for one matrix or for a batch."""
    if split:
        return _times, _plus_times
    return (torch.mm, torch.addmm) if a.dim() == 2 else (torch.bmm, torch.baddbmm)


def adder(split: bool) -> Any:
    """Returns what adds alpha A B to C."""
    return _add_times_ if split else add_product_


def _times(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    ab = sliced_product(a, b, BITS)
    return ab if out is None else out.copy_(ab)


def _plus_times(c: Tensor, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return out.copy_(c + sliced_product(a, b, BITS))


def _add_times_(c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    return c.add_(sliced_product(a, b, BITS), alpha=alpha)


@functools.lru_cache(maxsize=256)
def _coefficients(s: int, transposed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Coefficients of the powers for A 2^-s, one row for each combination."""
    rows = [[c * 0.5 ** (s * (k + 1)) for k, c in enumerate(row)] for row in _POWERS]
    with torch.inference_mode(False):
        table = torch.tensor(rows, dtype=dtype, device=device)
        return table.mT.contiguous() if transposed else table


def _combine(m: Tensor, s: int, transposed: bool) -> Tensor:
    """Returns linear combinations of the matrices stacked in m, by one product."""
    flat = (torch.view_as_real(m) if m.is_complex() else m).view(len(m), -1)
    rows = _coefficients(s, transposed, flat.dtype, flat.device) @ flat
    return torch.view_as_complex(rows.view(-1, *m.shape[1:], 2)) if m.is_complex() else rows.view(-1, *m.shape[1:])
