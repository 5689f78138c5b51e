"""What rounding does to frames, measured and taken away."""

import math
from collections.abc import Callable

from torch import Tensor

from stiefelkit.errors import NonFiniteError, RankError
from stiefelkit.functional import Tangent, nearest_frame, norms_of
from stiefelkit.functional._polish import rounded_defect, sampled_defect
from stiefelkit.metrics import defect as defect_of
from stiefelkit.metrics import rounding_limit, working_dtype
from stiefelkit.optim.bucket import Bucket

__all__ = ["estimate", "is_sampled", "land", "leap", "measured", "polish", "polish_wholly", "wear_left"]

_SMALLEST_SAMPLED = 1 << 16
"""Numbers of a frame from which an estimate of W^H W - I takes less than half of its time."""
_MARGIN = 1.25
"""What is added to an estimate."""
_TURNS = 3
"""Polishes that take any defect which is not lost to the rounding limit."""


def measured(bucket: Bucket, w: Tensor, coarse: bool = False) -> tuple[Tensor, float]:
    """W^H W - I of what W is the rounding of, in the dtype of W if coarse, and its largest norm."""
    defect = defect_of(w) if coarse else rounded_defect(w, bucket.remainders())
    return defect, max(norms_of(defect)[0])


def is_sampled(bucket: Bucket) -> bool:
    """Whether an estimate of what rounding has left pays: of large frames with a remainder."""
    return bucket.params[0].shape[-2:].numel() >= _SMALLEST_SAMPLED and bucket.remainders() is not None


def estimate(bucket: Bucket) -> None:
    """Has the wear be what there is: the model's bound is two or three times that after a step, and more after some."""
    p = bucket.params[0]
    there_is = sampled_defect(bucket.frames(), bucket.remainders()).max().item() / rounding_limit(p.shape[-1], p.dtype)
    bucket.wear = min(bucket.wear, _MARGIN * there_is) if math.isfinite(there_is) else math.inf


def wear_left(bucket: Bucket, norm: float) -> float:
    """The wear after a polish of a defect: 3/4 of its square remains."""
    p = bucket.params[0]
    return 0.0 if norm * norm <= 0.3 * rounding_limit(p.shape[-1], p.dtype) else math.inf


def polish(bucket: Bucket, coarse: bool = False) -> float:
    """Takes W^H W - I away, worked out in the dtype of W if coarse, and returns how large it was."""
    w = bucket.frames()
    defect, norm = measured(bucket, w, coarse)
    bucket.add((w @ defect).mul_(-0.5))
    bucket.wear = wear_left(bucket, norm)
    return norm


def polish_wholly(bucket: Bucket) -> None:
    """Polishes until nothing is left."""
    for _ in range(_TURNS):
        polish(bucket)
        if bucket.wear == 0:
            return


def land(bucket: Bucket, precision: str, left: float = math.inf) -> None:
    """Polishes frames that products alone have moved, `left` from the manifold as far as is known, until they are.

    In "exact" the defect is worked out in float64.
    """
    bucket.wear = 0.0
    exact = precision == "exact"
    limit = rounding_limit(bucket.params[0].shape[-1], bucket.params[0].dtype)
    while left > (0.3 * limit if exact else 3 * limit):
        norm = polish(bucket, coarse=not exact)
        left = 0.75 * norm * norm


def leap(
    bucket: Bucket,
    w: Tensor,
    direction: Tangent,
    steps: list[float],
    increment: Callable[[Tensor, Tangent, list[float]], Tensor],
) -> Tensor | None:
    """Where a step leads that is so long that it is no small increment: worked out in float64, the nearest frame.

    None where that is not finite, or many frames are equally near.
    """
    wide, lo = working_dtype(w.dtype), bucket.remainders()
    exact = nearest_frame(w.to(wide) if lo is None else w.to(wide) + lo)
    rest = None if direction.rest is None else direction.rest.to(wide)
    if rest is not None:
        rest = rest - exact @ (exact.mH @ rest)
    tangent = Tangent(direction.rotation.to(wide), rest, direction.rotation_norms, direction.rest_norms)
    try:
        return nearest_frame(exact + increment(exact, tangent, steps))
    except (NonFiniteError, RankError):
        return None
