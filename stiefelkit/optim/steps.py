"""How far a frame goes."""

import itertools
import math

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, norms_of
from stiefelkit.optim.bucket import Bucket

__all__ = ["above_rounding", "as_factor", "bounded_steps", "count_steps", "inverse", "length_of", "second_moments"]

_ROUNDING = 4.0
"""What rounding may leave of the tangent part of a normal matrix, over eps sqrt(p) and its norm."""


def second_moments(bucket: Bucket, norms: list[float], decay: float) -> list[tuple[int, float]]:
    """Stages the next count of steps and v <- decay v + (1 - decay) ||G||^2; returns both for each matrix of the batch.

    Raises:
        OverflowError: a moment is not finite in the dtype of the frame.
    """
    p, moments = bucket.params[0], bucket.numbers("exp_avg_sq")
    old = [0.0] * len(norms) if moments is None else moments.tolist()
    squares = [decay * v + (1 - decay) * x * x for v, x in zip(old, norms, strict=True)]
    largest = torch.finfo(p.dtype).max
    if not all([square < largest for square in squares]):  # also for NaN
        raise OverflowError
    bucket.stage("exp_avg_sq", torch.tensor(squares, dtype=p.real.dtype, device=p.device))
    return list(zip(count_steps(bucket), squares, strict=True))


def count_steps(bucket: Bucket) -> list[int]:
    """Stages the next count of steps, and returns it for each matrix of the batch."""
    counts = [k + 1 for k in map(dict.get, bucket.states, itertools.repeat("step"), itertools.repeat(0))]
    bucket.stage("step", counts)
    matrices = math.prod(bucket.params[0].shape[:-2])
    return counts if matrices == 1 else [k for k in counts for _ in range(matrices)]


def inverse(x: float) -> float:
    """1 / x, and 0 where nothing has been measured yet."""
    return 1 / x if x > 0 else 0.0


def bounded_steps(direction: Tangent, scales: list[float], lr: float, q: float) -> list[float]:
    """min(lr, 2 q / ||A||_F) along each direction times its scale, A its generator: factors of the unscaled directions.

    Where the norm of a direction is too small to be told from zero, nothing moves.
    """
    generators = [s * norm for s, norm in zip(scales, direction.generator_norms(), strict=True)]
    return [s * min(lr, 2 * q / a) if a > 0 else 0.0 for s, a in zip(scales, generators, strict=True)]


def as_factor(steps: list[float], like: Tensor) -> float | Tensor:
    """One number if all are the same, else a tensor (*, 1, 1)."""
    if len(set(steps)) == 1:
        return steps[0]
    return torch.tensor(steps, dtype=like.real.dtype, device=like.device)[:, None, None]


def length_of(direction: Tangent, steps: list[float]) -> float:
    """Frobenius norm of the longest of the increments, to first order."""
    return max([step * norm for step, norm in zip(steps, direction.norms("euclidean"), strict=True)])


def above_rounding(gradient: Tangent, g: Tensor) -> Tangent:
    """A Riemannian gradient of G with zeros in the place of either part that cannot be told from rounding.

    For optimizers that make a direction of full length of it, however short it is.
    """
    rounding = _ROUNDING * torch.finfo(g.dtype).eps * g.shape[-1] ** 0.5
    lost = [rounding * norm for norm in norms_of(g)[0]]
    rotation, rotation_norms = _above(lost, gradient.rotation, gradient.rotation_norms)
    if gradient.rest is None:
        return Tangent(rotation, None, rotation_norms, gradient.rest_norms)
    rest, rest_norms = _above(lost, gradient.rest, gradient.rest_norms)
    return Tangent(rotation, rest, rotation_norms, rest_norms, gradient.along_norms)


def _above(lost: list[float], part: Tensor, norms: list[float]) -> tuple[Tensor, list[float]]:
    kept = [norm > bound for norm, bound in zip(norms, lost, strict=True)]
    if all(kept):
        return part, norms
    mask = torch.tensor(kept, device=part.device).view(*part.shape[:-2], 1, 1)
    return part * mask, [norm * keep for norm, keep in zip(norms, kept, strict=True)]
