r"""What rounding does to orthogonality, and when it has to be taken away: the error model of frame optimizers.

All lengths are Frobenius norms; u is half of eps, and a rounding limit 0.6 u sqrt(p).

1. A sum of products that is rounded at every term, in any order, is off by about 0.41 u |a| |b| at random: the partial
   sum of k terms is off by u / sqrt(3) of itself, and grows as sqrt(k). An increment of length l is a product with such
   sums, so its error D has ||W^H D + D^H W||_F = sqrt(2) 0.41 u sqrt(p) l: **one rounding limit for a length of 1**,
   whatever n and p are. Kernels that add in blocks do better, never worse.
2. P = G - W S has the error of W S and G, and so counts with t (||S||^2 + ||P||^2)^(1/2), not with its own length.
3. The inverse of I + Q is off by u times the norm of Q = t Omega / 2 + t^2 P^H P / 4, where that is beyond 1.
4. A defect E that is there already puts -E S into W^H P, and so grows by the factor 1 + 2 t ||S|| at most.
5. A defect that is taken away with an increment of the generator t A leaves E t ||A|| behind, since what is added to
   turns as well.
6. W, and not W + lo, is what is rounded where there is no remainder: one limit more in each step.

What they add up to since the last polish, in limits, is a frame's "wear". It is kept below 1.2 in "exact" precision:
with the rounding of W itself, 1 limit at random to that, (1 + 1.2^2)^(1/2) = 1.6 limits. In "fast" it is kept below 10.
What is promised, 2 and 30 limits, leaves room for errors that align.
"""

import math
import operator

from torch import Tensor

from stiefelkit.functional import Tangent

__all__ = ["HOPELESS", "PROMISED", "due", "growth", "left_behind", "urgent", "wear", "wear_of_rounding"]

PROMISED = {"exact": 2.0, "fast": 30.0, "float64": 20.0}
"""||W^H W - I||_F that is kept to, in rounding limits, for ever; below p = 16 one eps more. "float64" in both."""
HOPELESS = 100.0
"""Wear from which a step is worked out in float64: one polish takes away a defect of some 800 limits."""
_DUE = {"exact": 0.6, "fast": 5.0}
"""Wear that the next increment takes away besides, and twice which is not left to it."""
_SHARE = {"exact": 0.07, "fast": 1.0}
"""The same over sqrt(p), up to twice that for tall frames: small frames of few columns turn far by short steps."""
_ROUNDS = {"exact": 8, "fast": 16}
"""Steps after which a polish comes at the latest, if there is no remainder."""


def due(w: Tensor, precision: str, *, sampled: bool = False) -> float:
    """The wear that is taken away with the next increment; of frames where it is sampled 0.9 limits in "exact"."""
    n, p = w.shape[-2:]
    bound = min(_DUE[precision], _SHARE[precision] * math.sqrt(p) * min(2.0, math.sqrt(n / p)))
    return 1.5 * bound if sampled else bound


def urgent(w: Tensor, precision: str) -> float:
    """The wear that does not wait for the next increment; so much that two short steps do not reach it."""
    return 2 * due(w, precision)


def wear(direction: Tangent, steps: list[float]) -> float:
    """What a step adds, in rounding limits, the most of a batch: 1, 2 and 3 above."""
    if direction.rest is None:
        longest = max(map(operator.mul, steps, direction.rotation_norms))
        return longest * max(1.0, 0.5 * longest)
    worst = 0.0
    for t, o, r, s in zip(steps, direction.rotation_norms, direction.rest_norms, direction.along_norms, strict=True):
        q = 0.5 * t * (o + 0.5 * t * r * r)
        worst = max(worst, t * math.hypot(o, r, s if r else 0.0) * max(1.0, q))
    return worst


def growth(direction: Tangent, steps: list[float]) -> float:
    """By what a step multiplies the wear that there is, at most: 4 above."""
    norms = zip(steps, direction.rest_norms, direction.along_norms, strict=True)
    return max([1 + 2 * t * s if r else 1.0 for t, r, s in norms])


def left_behind(direction: Tangent, steps: list[float]) -> float:
    """The share of a defect that an increment which shall take it away leaves, at most: 5 above."""
    return max([t * a for t, a in zip(steps, direction.generator_norms(), strict=True)])


def wear_of_rounding(w: Tensor, precision: str) -> float:
    """What any step adds where there is no remainder: 6 above, shared out so that a polish comes in time."""
    return due(w, precision) / _ROUNDS[precision]
