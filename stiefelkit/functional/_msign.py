r"""The matrix sign, U V^H of X = U S V^H, in nothing but products.

An odd polynomial of X takes each singular value to its value at the polynomial and leaves U and V. The ones here are
quintics, a X + b X X^H X + c X (X^H X)^2, of which each is the best approximation of 1 on the interval that the one
before has left: Polar Express.
"""

import functools
import math

import numpy
import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.product import opaque, plus_product
from stiefelkit.functional._polar import check_matrices, scaled
from stiefelkit.functional._polish import polished
from stiefelkit.metrics import working_dtype
from stiefelkit.numbers import PRECISION, at_least

_LAST = (15 / 8, -10 / 8, 3 / 8)
"""Of third order at 1: an error x becomes 5/2 x^3."""
_NEAR = 3e-3
"""Error from which `_LAST` takes over: 7e-8 after one of it, which is rounding in float32, and nothing after two."""
_MARGIN = 1.01
"""How far beyond an interval a polynomial may be used."""


def msign(x: Tensor, *, lowest: float = 1e-3, precision: str = "exact") -> Tensor:
    r"""Returns :math:`U V^H` of the singular value decomposition :math:`X = U S V^H`, by products alone.

    For X of full rank it is the frame nearest to X, the steepest direction in the spectral norm: :math:`⟨X, A⟩` over
    all A with :math:`‖A‖_2 ≤ 1` is largest there. Singular values from `lowest` times the largest on come out as 1.
    Smaller ones come out between 0 and 1, growing, and at least as large as they were relative to the largest; so a
    matrix without full rank gives its partial isometry up to rounding times 20 / `lowest`, and zero gives zero. No
    value is read on the host. What is not finite gives NaN.

    Costs 8 steps (9 in float64) of two products n x p x p and one p x p x p at the default, about three more for each
    factor of 100 in `lowest`, and a polish.

    Args:
        x: matrices of shape (*, n, p), any floating or complex dtype; bfloat16 and float16 are done in float32.
        lowest: smallest singular value, over the largest, that is taken to 1; from 1e-12 to 0.5. Below 1e-6 it takes
            float64 to tell one from rounding.
        precision: "exact" ends with a polish in float64, at the rounding limit of the dtype; "fast" does not, and is
            off by a few :math:`eps √p` more.

    Returns:
        Matrices of the same shape and dtype, contiguous, without a gradient: `polar_factor` has one.

    Raises:
        DtypeError: X is no tensor, or of integers.
        ShapeError: X is a vector or a number.
        OptionError: `lowest` or the precision is out of range.

    References:
        Amsel, Persson, Musco, Gower, The Polar Express: optimal matrix sign methods and their application to the Muon
        algorithm, ICLR 2026.

    >>> msign(torch.tensor([[3.0, 0.0], [0.0, -4.0], [0.0, 0.0]]))
    tensor([[ 1.,  0.],
            [ 0., -1.],
            [ 0.,  0.]])
    """
    check_matrices("msign", x)
    PRECISION.require("msign", "precision", precision)
    lowest = at_least(1e-12, most=0.5).require("msign", "lowest", lowest)
    is_wide = x.shape[-2] < x.shape[-1]
    fine = x.detach().to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x.detach()
    fine = (fine.mH if is_wide else fine).resolve_conj().contiguous()
    signed = _signed(fine, float(lowest), precision == "exact")
    return (signed.mH.resolve_conj() if is_wide else signed).to(x.dtype).contiguous()


@opaque(lambda x, lowest, exact: torch.empty_like(x), dims=(2,))
def _signed(x: Tensor, lowest: float, exact: bool) -> Tensor:
    if not x.numel():
        return x.clone()
    x = scaled(x)
    gram = x.mH @ x
    square = gram @ gram
    # ||X||_2^4 <= ||(X^H X)^2||_F, at most sqrt(p) times that.
    size = torch.linalg.matrix_norm(square, keepdim=True)
    bound = torch.where(size == 0, 1.0, size).pow(0.25)
    x, gram, square = x / bound, gram / bound.square(), square / bound.square().square()
    is_double = x.dtype == working_dtype(x.dtype)
    for i, (a, b, c) in enumerate(quintics(lowest * x.shape[-1] ** -0.125, is_double)):
        if i:
            gram = x.mH @ x
            square = gram @ gram
        x = plus_product(a * x, x, b * gram + c * square)
    return polished(x) if exact else x


@functools.lru_cache(maxsize=64)
def quintics(lowest: float, is_double: bool) -> tuple[tuple[float, float, float], ...]:
    """Returns coefficients (a, b, c) that take singular values in [lowest, 1] to 1, up to rounding."""
    low, high = lowest, 1.0
    steps = []
    while 1 - low > _NEAR:
        # Where the interval is long, the best quintic all but vanishes inside; rounding there might change signs.
        start = max(low, 0.02407 * high)
        a, b, c = _best(start, high)
        if start > low:
            ends = sum(x * (a + x * x * (b + x * x * c)) for x in (low, high))
            a, b, c = (2 / ends * k for k in (a, b, c))
        reached = low * (a + low * low * (b + low * low * c))
        if reached < 0.5:
            # Beyond a long interval a quintic grows fast, and what rounding puts there with it.
            a, b, c = a / _MARGIN, b / _MARGIN**3, c / _MARGIN**5
        steps.append((a, b, c))
        low, high = low * (a + low * low * (b + low * low * c)), 2 - reached
    return (*steps, *[_LAST] * (2 if is_double else 1))


def _best(low: float, high: float) -> tuple[float, float, float]:
    """Finds the odd quintic nearest to 1 on an interval by Remez' exchange: errors +E, -E, +E, -E."""
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    a = b = c = 0.0
    before = math.inf
    for _ in range(50):
        points = numpy.array([low, *inner, high])
        system = numpy.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        a, b, c, error = (float(k) for k in numpy.linalg.solve(system, numpy.ones(4)))
        if abs(before - error) <= 1e-13:
            break
        before, root = error, math.sqrt(9 * b * b - 20 * a * c)
        inner = [math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1)]
    return a, b, c
