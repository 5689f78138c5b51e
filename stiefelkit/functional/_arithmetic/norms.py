"""Norms of matrices as numbers, and what those of a skew matrix and of its powers say of its singular values."""

import functools
import math
from typing import Any

import numpy
import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.devices import switch
from stiefelkit.metrics import working_dtype
from stiefelkit.tensors import check_tensors

Norms = list[Any]
"""A number for each matrix of a batch; without host syncs one entry, a tensor of all of them, shape (b,)."""


def norms_of(*matrices: Tensor) -> list[Norms]:
    """Returns Frobenius norms of matrices, as numbers on a CPU, on other devices, which are not read, as a tensor.

    Where squares would leave the range of the dtype, they are taken in float64 or in units of the largest entry.

    Args:
        *matrices: tensors of one batch shape, (*, n, p) each.

    Returns:
        For each tensor a list: one number for each matrix of its batch, or one tensor of all, shape (b,), in float64.
    """
    for m in matrices:
        if not isinstance(m, Tensor):
            check_tensors("norms_of", m)
    if switch.forbidden or not matrices[0].is_cpu:
        return [[norms_without_sync(m)] for m in matrices]
    first, low = matrices[0], _smallest(matrices[0].dtype)
    if first.dim() == 2:
        found = []
        for m in matrices:
            norm = torch.linalg.vector_norm(_parts(m) if m.is_complex() else m).item()
            found.append([norm] if low < norm < math.inf else _safely(m))
        return found
    parts, dims = (map(_parts, matrices), (-3, -2, -1)) if first.is_complex() else (matrices, (-2, -1))
    norms = torch.stack([torch.linalg.vector_norm(m, dim=dims).reshape(-1) for m in parts]).tolist()
    for i, found in enumerate(norms):
        if found and not (low < min(found) and sum(found) < math.inf):
            norms[i] = _safely(matrices[i])
    return norms


def _safely(m: Tensor) -> Norms:
    # The modulus of a single entry takes no square.
    return norms_without_sync(m).tolist() if m.shape[-2:] != (1, 1) else [*map(abs, m.reshape(-1).tolist())]


def _parts(m: Tensor) -> Tensor:
    """Returns complex entries as pairs of numbers: their moduli would take many times as long as the sum."""
    return torch.view_as_real(m.resolve_conj()) if m.is_complex() else m


def norms_without_sync(m: Tensor) -> Tensor:
    """Returns Frobenius norms of entries of any size in float64, shape (b,), without a host sync."""
    parts, dims = _parts(m), (-3, -2, -1) if m.is_complex() else (-2, -1)
    if (m.dtype != working_dtype(m.dtype) and m.device.type != "mps") or not m.numel():  # that has no float64
        return torch.linalg.vector_norm(parts, dim=dims, dtype=torch.float64).reshape(-1)
    largest = torch.linalg.vector_norm(parts, math.inf, dim=dims, keepdim=True)
    unit = torch.where((largest > 0) & (largest < math.inf), largest, 1.0)
    return (torch.linalg.vector_norm(parts / unit, dim=dims, keepdim=True) * unit).reshape(-1)


@functools.lru_cache(maxsize=16)
def _smallest(dtype: torch.dtype) -> float:
    """Returns the norm above which no square that counts is lost in a dtype."""
    return 2.0**13 * torch.finfo(dtype).tiny ** 0.5


def probe(powers: Tensor) -> tuple[float, float, float]:
    """Returns a bound of ||A||_2, an estimate of it, and the root mean square of (sigma / bound)^12 of skew matrices.

    Four power steps of A^3, stacked behind A and A^2 in `powers`, from eight fixed vectors; the last ratio and 5 % are
    the norm, which all vectors miss (nearly orthogonal to the largest singular vectors) with a probability of 1e-8. The
    worst finite matrix of a batch counts; overflow in float32 gives infinity.
    """
    a3, (_, bound, _) = powers[2], bounds_of_skew(powers)
    add_product = torch.addmm if a3.dim() == 2 else torch.baddbmm
    if not 0 < bound < math.inf:
        return bound, bound, 0.0
    y = before = probes(*a3.shape[:-1], a3.dtype, a3.device)
    scale = max(bound, 1e-10) ** -3
    for _ in range(4):
        before, y = y, add_product(y, a3, y, beta=0, alpha=scale)
    lengths = torch.linalg.vector_norm(torch.stack([before, y]), dim=(-2, -1)).view(2, -1)
    last, length = finite(lengths).amax(1).tolist()
    return bound, 1.05 * bound * (length / max(last, 1e-30)) ** (1 / 3), length


def bounds_of_skew(powers: Tensor) -> tuple[float, float, float]:
    """Returns bounds of ||A||_2 for skew A from below and above, and ||A^3||_F, the largest of a batch, as `probe`."""
    norms = torch.linalg.vector_norm(powers, dim=(-2, -1)).view(3, -1)
    if powers.dtype == working_dtype(powers.dtype):
        norms = finite(norms)
    pairs, moments = 1 if powers.is_complex() else 2, norms.mT.tolist()
    least = max(c / b if b > 0 else 0.0 for _, b, c in moments)
    return least, max(_largest_of_moments(a, b, c, pairs) for a, b, c in moments), max(c for _, _, c in moments)


@functools.lru_cache(maxsize=64)
def probes(*sizes_dtype_device: Any) -> Tensor:
    """Returns fixed vectors without a preferred direction, whose squared lengths add up to 1: shape (*, n, 8)."""
    *batch, n, dtype, device = sizes_dtype_device
    with torch.inference_mode(False):
        # Not torch's generator, which vmap keeps from its functions.
        y = torch.from_numpy(numpy.random.default_rng(0).standard_normal((n, 8)))
        return (y / y.norm()).to(dtype=dtype, device=device).expand(*batch, n, 8).contiguous()


def _largest_of_moments(first: float, second: float, third: float, pairs: int) -> float:
    """Bounds the largest singular value by Frobenius norms of A, A^2 and A^3, if it comes `pairs` times; or infinity.

    With S_k = ||A^k||_F^2 in units of S_2 = 1 and x its square, those of all other values are moments too, so that
    (S_2 - 2 x^2)^2 <= (S_1 - 2 x) (S_3 - 2 x^3): a cubic, beyond whose largest root Newton's steps stay bounds.
    """
    unit = second**0.5
    if not math.isfinite(first + second + third):
        return math.inf
    if unit == 0 or third == 0:  # underflow, or what was not finite
        return min(first, unit * pairs**-0.25) if unit else first
    s1, s3 = (first / unit) ** 2, (third / unit / unit / unit) ** 2
    x = min(pairs**-0.5, (s3 / pairs) ** (1 / 3))
    for _ in range(6):
        value = pairs * x * (x * (2 - s1 * x) - s3) + s1 * s3 - 1
        slope = pairs * (x * (4 - 3 * s1 * x) - s3)
        if not (value < 0 and slope < 0):
            break
        x = max(x - value / slope, s3)  # S_3 / S_2 is a mean of them
    return 1.001 * unit * x**0.5


def finite(norms: Tensor) -> Tensor:
    """Puts zeros for NaN and infinity, so that one such matrix decides nothing for the rest of a batch."""
    return norms.nan_to_num(0.0, 0.0, 0.0)
