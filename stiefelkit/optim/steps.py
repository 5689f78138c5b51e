"""How far a frame goes."""

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, norms_of, riemannian_gradient
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.functional._arithmetic.product import plus_product
from stiefelkit.functional._arithmetic.reads import may_sync_host
from stiefelkit.metrics import working_dtype
from stiefelkit.optim.base.batch import Bucket

__all__ = [
    "above_rounding",
    "are_ordinary",
    "as_factor",
    "bounded_steps",
    "count_steps",
    "divided",
    "gradient_with_momentum",
    "have_squares",
    "in_units",
    "inverse",
    "is_still",
    "largest_root",
    "rate",
    "reach",
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
    return lr if isinstance(lr, Tensor) and not may_sync_host(lr) else float(lr)


def is_still(group: dict[str, Any], bucket: Bucket) -> bool:
    """Returns whether the rate is known to be zero, as `torch.distributed.checkpoint` has it for the states alone."""
    lr = group["lr"]
    return (bucket.is_read or not isinstance(lr, Tensor)) and float(lr) == 0


def second_moments(bucket: Bucket, norms: Norms, decay: float) -> list[tuple[Any, Any]]:
    """Stages the next count of steps and :math:`v ← decay v + (1 - decay) ‖G‖^2`; returns both for each matrix.

    Where no value is read, one pair of tensors of all of them.

    Raises:
        OverflowError: a moment is not finite in the dtype of the frame.
    """
    p, moments = bucket.params[0], bucket.numbers("exp_avg_sq")
    if not bucket.is_read:
        mixed = decay * moments + (1 - decay) * norms[0].square()
        bucket.stage("exp_avg_sq", mixed)
        return [(*count_steps(bucket), mixed)]
    largest, squares = torch.finfo(p.dtype).max, []
    for v, x in zip(moments.tolist(), norms, strict=True):
        squares.append(decay * v + (1 - decay) * x * x)
        if not squares[-1] < largest:  # also for NaN
            raise OverflowError
    bucket.stage("exp_avg_sq", torch.tensor(squares, dtype=p.dtype.to_real(), device=p.device))
    return list(zip(count_steps(bucket), squares, strict=True))


def count_steps(bucket: Bucket) -> list[Any]:
    """Stages the next count of steps, and returns it for each matrix of the batch: where none is read, a tensor."""
    matrices = math.prod(bucket.params[0].shape[:-2])
    if not bucket.is_read:
        after = bucket.numbers("step", of_frames=True) + 1
        bucket.stage("step", after)
        return [after.double().repeat_interleave(matrices)]
    counts = []
    for state in bucket.states:
        counts.append(int(state.get("step", 0)) + 1)  # a tensor where none was read before
    bucket.stage("step", counts)
    return counts if matrices == 1 else [k for k in counts for _ in range(matrices)]


def inverse(x: Any) -> Any:
    """1 / x, and 0 where nothing has been measured yet."""
    if isinstance(x, Tensor):
        return torch.where(x > 0, x.reciprocal(), 0.0)
    return 1 / x if x > 0 else 0.0


def bounded_steps(direction: Tangent, scales: Norms, lr: float | Tensor, q: float) -> Norms:
    """Steps :math:`min(lr, 2 q / ‖A‖_F)` along directions times their scales, A the generators.

    Returns factors of the unscaled directions.

    Where the norm of a direction is too small to be told from zero, nothing moves.
    """
    if q == math.inf and isinstance(lr, float) and not isinstance(scales[0], Tensor):
        return [scale * lr for scale in scales]
    generators = map(operator.mul, scales, direction.generator_norms())
    return [*map(operator.mul, scales, shares([*generators], 2 * q, lr))]


def shares(norms: Norms, bound: float, most: float | Tensor) -> Norms:
    """min(most, bound / norm) of each norm, and 0 of those that are 0."""
    if isinstance(norms[0], Tensor):
        return [torch.where(norm > 0, bound / norm, 0.0).clamp(max=most) for norm in norms]
    taken = []
    for norm in norms:
        taken.append(min(most, bound / norm) if norm > 0 else 0.0)
    return taken


def gradient_with_momentum(
    group: dict[str, Any], bucket: Bucket, w: Tensor, g: Tensor, *, side: str = "left"
) -> Tangent:
    """Returns the Riemannian gradient of momentum M + G, and stages it as the next M, if the group has a momentum."""
    metric, momentum = group["manifold"].partition(":")[2], group["momentum"]
    if momentum:
        g = g.add(bucket.state("momentum_buffer"), alpha=momentum)
    direction = riemannian_gradient(w, g, metric, side=side)
    if momentum:
        bucket.stage("momentum_buffer", direction.covector(w, metric))
    return direction


def as_factor(steps: Norms, like: Tensor) -> float | Tensor:
    """Returns one number if all are the same, else a tensor (*, 1, 1)."""
    if isinstance(steps[0], Tensor):
        return steps[0].to(like.real.dtype).view((1, 1) if like.dim() == 2 else (-1, 1, 1))
    if len(set(steps)) == 1:
        return steps[0]
    return torch.tensor(steps, dtype=like.real.dtype, device=like.device)[:, None, None]


def reach(direction: Tangent, steps: Norms, rounding: tuple[float, float] = (1.0, 1.0)) -> tuple[Any, float, float]:
    """Returns the Frobenius norm of the longest of the increments, to first order, and what a step does to the wear.

    That is what it adds, in rounding limits, the most of a batch, and by what it multiplies the wear that there is, at
    most. Where none is read, a tensor of all lengths, and zeros. `rounding` has the limits that a unit of length within
    the columns of W adds, and one out of them.
    """
    if isinstance(direction.rotation_norms[0], Tensor):
        return steps[0] * direction.norms("euclidean")[0], 0.0, 0.0
    longest, worn, grown, (within, beyond) = 0.0, 0.0, 1.0, rounding
    along = direction.along_norms or [0.0] * len(steps)
    for t, o, r, s in zip(steps, direction.rotation_norms, direction.rest_norms, along, strict=True):
        length = t * math.hypot(o, r)
        if not (length <= longest or longest != longest):  # a NaN stays
            longest = length
        if not r:
            worn = max(worn, t * within * o * max(1.0, 0.5 * t * o))
            continue
        worn = max(worn, t * math.hypot(within * o, beyond * r, s) * max(1.0, 0.5 * t * (o + 0.5 * t * r * r)))
        grown = max(grown, 1 + 2 * t * s)
    return longest, worn, grown


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
    that nothing is rounded, and what rounding below the normal numbers has put into :math:`W^H P` is taken away. Where
    there is no direction, there is no step.
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
