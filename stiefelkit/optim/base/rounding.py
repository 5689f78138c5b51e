"""What rounding does to frames, measured and taken away."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stiefelkit.errors import NonFiniteError, RankError
from stiefelkit.functional import Tangent, nearest_frame, norms_of
from stiefelkit.functional._arithmetic.norms import probes
from stiefelkit.functional._arithmetic.product import SHORT, plus_product
from stiefelkit.functional._polish import rounded_defect
from stiefelkit.metrics import defect as defect_of
from stiefelkit.metrics import rounding_limit, working_dtype
from stiefelkit.optim.base.batch import Bucket
from stiefelkit.optim.base.checks import not_returned

LOST = 0.1
"""||W^H W - I||_F over sqrt(p) from which a frame has been changed by something else than its optimizer."""
_SMALLEST_PROBED = 128
"""Columns from which an estimate of what is left of a defect costs little beside the defect."""


def measured(bucket: Bucket, w: Tensor, coarse: bool = False, lands: Tensor | None = None) -> tuple[Tensor, Any]:
    """W^H W - I of what W is the rounding of, in the dtype of W if coarse, and its largest norm.

    For `lands` see `polish`.
    """
    defect = defect_of(w) if coarse else rounded_defect(w, bucket.remainders())
    defect = defect if lands is None else defect * lands
    return defect, max(norms_of(defect)[0])


@functools.lru_cache(maxsize=64)
def rounding_of_step(n: int, p: int, is_one: bool) -> tuple[float, float]:
    """Returns the limits that a Cayley step of unit length adds to the wear: within the columns of W, and beyond them.

    Of what sums of 64 terms round in a step within the columns, 6 / sqrt(p) limits reach W^H W - I; of the rounding of
    each entry of a step beyond them 2 / sqrt(p), and that of tall frames by the share that few rows have in the span of
    W, at most 8 p / n.
    """
    within = 7.5 / math.sqrt(p) if is_one or p <= SHORT else 1.0
    return min(1.0, within), min(1.0, 4 / math.sqrt(p) * min(1.0, math.sqrt(8 * p / n)))


def wear_left(bucket: Bucket, norm: float) -> float:
    """Returns the wear after a polish of a defect: 3/4 of its square remains."""
    p = bucket.params[0]
    return 0.0 if norm * norm <= 0.3 * rounding_limit(p.shape[-1], p.dtype) else math.inf


def polish(bucket: Bucket, coarse: bool = False, lands: Tensor | None = None) -> float:
    """Takes W^H W - I away, worked out in the dtype of W if coarse, and returns how large it was.

    Frames for which `lands`, 0 or 1, shape (*, 1, 1), is 0 stay as they are, and do not count.
    """
    w = bucket.frames()
    defect, norm = measured(bucket, w, coarse, lands)
    bucket.add((w @ defect).mul_(-0.5))
    bucket.wear = wear_left(bucket, norm)
    return norm


def land(bucket: Bucket, precision: str, turns: int, left: float = math.inf, lands: Tensor | None = None) -> None:
    """Polishes frames that products alone have moved until they are, or so often where no value is read.

    In "exact" the defect is worked out in float64, where none is read the last one alone. `left` is how far from the
    manifold they are, as far as is known. For `lands` see `polish`.
    """
    exact, p = precision == "exact", bucket.params[0]
    if not bucket.is_read:
        for turn in range(1, turns + 1):
            w = bucket.frames()
            defect = rounded_defect(w, bucket.remainders()) if exact and turn == turns else defect_of(w)
            defect = defect if lands is None else defect * lands
            if turn == turns:
                bucket.require(torch.linalg.matrix_norm(defect).amax() <= LOST * math.sqrt(p.shape[-1]), AssertionError)
            bucket.add((w @ defect).mul_(-0.5))
        return
    bucket.wear = 0.0
    limit = rounding_limit(p.shape[-1], p.dtype)
    while left > (0.3 * limit if exact else 3 * limit):
        norm = polish(bucket, not exact, lands)
        left = 0.75 * norm * norm


def leap(
    bucket: Bucket,
    w: Tensor,
    direction: Tangent,
    steps: list[float],
    increment: Callable[[Tensor, Tangent, list[float]], Tensor],
) -> Tensor | None:
    """Takes a step too long to be a small increment: in float64, to the nearest frame.

    None where that is not finite, or many frames are equally near.
    """
    wide, lo = working_dtype(w.dtype), bucket.remainders()
    exact = nearest_frame(w.to(wide) if lo is None else w.to(wide) + lo)
    rest = None if direction.rest is None else direction.rest.to(wide)
    if rest is not None:
        rest = rest - exact @ (exact.mH @ rest)
    tangent = Tangent(direction.rotation.to(wide), rest, direction.rotation_norms, direction.rest_norms)
    added = increment(exact, tangent, steps)
    if not isinstance(added, Tensor) or added.shape != exact.shape:
        raise not_returned("A retraction's leap", f"a tensor of shape {tuple(exact.shape)}", added)
    try:
        return nearest_frame(exact + added)
    except (NonFiniteError, RankError):
        return None


PROMISED = {"exact": 2.0, "fast": 30.0, "float64": 20.0}
"""Largest ||W^H W - I||_F after any step, in rounding limits; below p = 16 one eps more. "float64" in both."""
HOPELESS = 100.0
"""Wear from which a step is worked out in float64: one polish takes away a defect of some 800 limits."""
_DUE = {"exact": 0.6, "fast": 5.0}
"""Wear that the next increment takes away besides, if it would leave more than `MOST`."""
MOST = 2.8
"""Wear that a step of frames with a remainder may leave, over that which is due; without one 2."""
_SHARE = {"exact": 0.07, "fast": 1.0}
"""The same over sqrt(p), up to twice that for tall frames: small frames of few columns turn far by short steps."""
_ROUNDS = {"exact": 8, "fast": 16}
"""Steps after which a polish comes at the latest, if there is no remainder."""
_ROUNDS_OF_FEW = 6
"""The same of frames of fewer than 32 rows."""


@functools.lru_cache(maxsize=64)
def due(n: int, p: int, precision: str) -> float:
    """Returns the wear of n x p frames that an increment takes away if there is no remainder, or if it has to."""
    return min(_DUE[precision], _SHARE[precision] * math.sqrt(p) * min(2.0, math.sqrt(n / p)))


def left_behind(defect: Tensor, norm: float, direction: Tangent, steps: list[float]) -> float:
    """Bounds what an increment leaves of a defect D which it shall take away, ||D Y||_F, or estimates it for large D.

    Y, what it does within the columns of W, is t Omega + t^2 P^H P / 2. The estimate, and half more, is by what 8 rows
    times D Y are.
    """
    p = defect.shape[-1]
    if p < _SMALLEST_PROBED or defect.dim() > 2:
        norms = zip(steps, direction.rotation_norms, direction.rest_norms, strict=True)
        return norm * max([t * o + 0.5 * (t * r) ** 2 for t, o, r in norms])
    rows = probes(p, defect.dtype, defect.device).mT @ (defect * steps[0])
    left = rows @ direction.rotation
    if direction.rest is not None:
        left = plus_product(left, rows @ (direction.rest.mH * steps[0]), direction.rest, 0.5)
    return 1.5 * math.sqrt(p) * norms_of(left)[0][0]


def wear_of_rounding(w: Tensor, precision: str) -> float:
    """Returns what any step adds where there is no remainder: 6 above, shared out so that a polish comes in time."""
    n, p = w.shape[-2:]
    return due(n, p, precision) / ((_ROUNDS[precision] if n >= 32 else _ROUNDS_OF_FEW) - 0.5)
