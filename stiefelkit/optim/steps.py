"""How far a frame goes."""

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, norms_of
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.functional._arithmetic.product import plus_product
from stiefelkit.functional._arithmetic.reads import reads_are_free
from stiefelkit.metrics import working_dtype
from stiefelkit.optim.base.batch import Bucket
from stiefelkit.optim.base.on_device import counted

__all__ = [
    "above_rounding",
    "are_ordinary",
    "as_factor",
    "bounded_steps",
    "count_steps",
    "divided",
    "have_squares",
    "in_units",
    "inverse",
    "largest_root",
    "length_of",
    "rate",
    "second_moments",
    "shares",
    "units_of",
]

_ROUNDING = 4.0
"""What rounding may leave of the tangent part of a normal matrix, over eps sqrt(p) and its norm."""
_ORDINARY = 2.0**24
"""Factor of a direction up to which, and from whose inverse on, fourth powers of one that makes a step of length 1 stay
in the range of float32."""


def rate(group: dict[str, Any]) -> float | Tensor:
    """Returns the learning rate of a group; a tensor that lives on a device stays there."""
    lr = group["lr"]
    return lr if isinstance(lr, Tensor) and not reads_are_free(lr) else float(lr)


def second_moments(bucket: Bucket, norms: Norms, decay: float) -> list[tuple[Any, Any]]:
    """Stages the next count of steps and v <- decay v + (1 - decay) ||G||^2; returns both for each matrix of the batch.

    Where no value is read, one pair of tensors of all of them.

    Raises:
        OverflowError: a moment is not finite in the dtype of the frame.
    """
    if not bucket.is_read:
        shapes = [p.shape[:-2] for p in bucket.params]
        for state, shape in zip(bucket.states, shapes, strict=True):
            if "exp_avg_sq" not in state:
                state["exp_avg_sq"] = torch.zeros(shape, dtype=bucket.params[0].dtype.to_real(), device=norms[0].device)
        moments = bucket.numbers("exp_avg_sq")
        assert moments is not None
        mixed = decay * moments + (1 - decay) * norms[0].square()
        bucket.stage("exp_avg_sq", mixed)
        return [(counted(bucket), mixed)]
    p, moments = bucket.params[0], bucket.numbers("exp_avg_sq")
    old = [0.0] * len(norms) if moments is None else moments.tolist()
    squares = [decay * v + (1 - decay) * x * x for v, x in zip(old, norms, strict=True)]
    largest = torch.finfo(p.dtype).max
    if not all([square < largest for square in squares]):  # also for NaN
        raise OverflowError
    bucket.stage("exp_avg_sq", torch.tensor(squares, dtype=p.real.dtype, device=p.device))
    return list(zip(count_steps(bucket), squares, strict=True))


def count_steps(bucket: Bucket) -> list[Any]:
    """Stages the next count of steps, and returns it for each matrix of the batch: where none is read, a tensor."""
    if not bucket.is_read:
        return [counted(bucket)]
    counts = [k + 1 for k in map(dict.get, bucket.states, itertools.repeat("step"), itertools.repeat(0))]
    bucket.stage("step", counts)
    matrices = math.prod(bucket.params[0].shape[:-2])
    return counts if matrices == 1 else [k for k in counts for _ in range(matrices)]


def inverse(x: Any) -> Any:
    """1 / x, and 0 where nothing has been measured yet."""
    if isinstance(x, Tensor):
        return torch.where(x > 0, x.reciprocal(), 0.0)
    return 1 / x if x > 0 else 0.0


def bounded_steps(direction: Tangent, scales: Norms, lr: float | Tensor, q: float) -> Norms:
    """min(lr, 2 q / ||A||_F) along each direction times its scale, A its generator: factors of the unscaled directions.

    Where the norm of a direction is too small to be told from zero, nothing moves.
    """
    generators = [s * norm for s, norm in zip(scales, direction.generator_norms(), strict=True)]
    return [s * t for s, t in zip(scales, shares(generators, 2 * q, lr), strict=True)]


def shares(norms: Norms, bound: float, most: float | Tensor) -> Norms:
    """min(most, bound / norm) of each norm, and 0 of those that are 0."""
    if isinstance(norms[0], Tensor):
        return [torch.where(norm > 0, bound / norm, 0.0).clamp(max=most) for norm in norms]
    return [min(most, bound / norm) if norm > 0 else 0.0 for norm in norms]


def as_factor(steps: Norms, like: Tensor) -> float | Tensor:
    """Returns one number if all are the same, else a tensor (*, 1, 1)."""
    if isinstance(steps[0], Tensor):
        return steps[0].to(like.real.dtype).view((1, 1) if like.dim() == 2 else (-1, 1, 1))
    if len(set(steps)) == 1:
        return steps[0]
    return torch.tensor(steps, dtype=like.real.dtype, device=like.device)[:, None, None]


def length_of(direction: Tangent, steps: Norms) -> Any:
    """Frobenius norm of the longest of the increments, to first order; where none is read, a tensor of all."""
    return max([step * norm for step, norm in zip(steps, direction.norms("euclidean"), strict=True)])


def largest_root(dtype: torch.dtype) -> float:
    """Returns the root of the largest number of a dtype.

    Args:
        dtype: a floating dtype; for a complex one that of its parts.
    """
    return torch.finfo(dtype).max ** 0.5


def have_squares(direction: Tangent, dtype: torch.dtype) -> bool:
    """Returns whether the squares of a direction's norms are finite in a dtype; not where one is NaN."""
    size = sum(direction.rotation_norms) + sum(direction.rest_norms)
    return size * max(direction.units, default=1.0) < largest_root(dtype)


def are_ordinary(steps: Norms) -> bool:
    """Returns whether factors are 0 or of a size that leaves powers of directions in the range of their dtype."""
    if 1 / _ORDINARY < min(steps) and max(steps) < _ORDINARY:
        return True
    return all([1 / _ORDINARY < t < _ORDINARY or t == 0 for t in steps])


def units_of(norms: Norms) -> Norms:
    """Powers of 2 of the size of norms; 1 for 0."""
    return [2.0 ** max(math.frexp(norm)[1], -1000) for norm in norms]


def divided(x: Tensor, units: Norms) -> Tensor:
    """Returns each matrix over its unit, which need not be in the range of the dtype."""
    unit = torch.tensor(units, dtype=torch.float64, device=x.device).view((-1, 1, 1) if x.dim() == 3 else (1, 1))
    return (x.to(working_dtype(x.dtype)) / unit).to(x.dtype)


def in_units(w: Tensor, direction: Tangent, steps: Norms) -> tuple[Tangent, Norms]:
    """Returns the same steps along directions of length 1 or so, where powers of these leave the range of their dtype.

    That is where the factors are extreme, as a rate of 1e30 is with a gradient of 1e-30. The units are powers of 2, so
    that nothing is rounded, and what rounding below the normal numbers has put into W^H P is taken away. Where there is
    no direction, there is no step.
    """
    if isinstance(direction.rotation_norms[0], Tensor) or are_ordinary(steps):
        return direction, steps
    norms = direction.norms("euclidean")
    units = units_of(norms)
    rotation, rest = divided(direction.rotation, units), direction.rest
    if rest is not None:
        rest = divided(rest, units)
        rest = plus_product(rest, w, w.mH @ rest, -1)
    rotation_norms = [o / u for o, u in zip(direction.rotation_norms, units, strict=True)]
    rest_norms = direction.rest_norms if rest is None else norms_of(rest)[0]
    before = direction.units or [1.0] * len(units)
    scaled = replace(
        direction,
        rotation=rotation,
        rest=rest,
        rotation_norms=rotation_norms,
        rest_norms=rest_norms,
        along_norms=[],
        units=[u * v for u, v in zip(units, before, strict=True)],
    )
    return scaled, [t * u if norm else 0.0 for t, u, norm in zip(steps, units, norms, strict=True)]


def above_rounding(gradient: Tangent, g: Tensor) -> Tangent:
    """Returns a Riemannian gradient of G with zeros in the place of either part that cannot be told from rounding.

    For optimizers that make a direction of full length of it, however short it is.
    """
    rounding = _ROUNDING * torch.finfo(g.dtype).eps * g.shape[-1] ** 0.5
    lost = [rounding * norm for norm in norms_of(g)[0]]
    rotation, rotation_norms = _above(lost, gradient.rotation, gradient.rotation_norms)
    if gradient.rest is None:
        return Tangent(rotation, None, rotation_norms, gradient.rest_norms)
    rest, rest_norms = _above(lost, gradient.rest, gradient.rest_norms)
    return Tangent(rotation, rest, rotation_norms, rest_norms, gradient.along_norms)


def _above(lost: Norms, part: Tensor, norms: Norms) -> tuple[Tensor, Norms]:
    if isinstance(norms[0], Tensor):
        above = norms[0] > lost[0]
        return part * above.view(*part.shape[:-2], 1, 1), [norms[0] * above]
    kept = [norm > bound for norm, bound in zip(norms, lost, strict=True)]
    if all(kept):
        return part, norms
    mask = torch.tensor(kept, device=part.device).view(*part.shape[:-2], 1, 1)
    return part * mask, [norm * keep for norm, keep in zip(norms, kept, strict=True)]
