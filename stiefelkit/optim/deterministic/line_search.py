"""How far to go along a curve: to a point of the strong Wolfe conditions, by slopes where losses are only rounding."""

import math
from dataclasses import dataclass

from torch import Tensor

from stiefelkit.optim.deterministic.objective import Objective, Position
from stiefelkit.optim.deterministic.space import CurvePoint

_MOST = 30  # points that are asked for at most
_FURTHER = 10.0  # by what a step grows at most from one point to the next
_SHRUNK = 0.66  # largest share of a bracket that a step may leave; beyond it the next point is the middle


@dataclass(frozen=True)
class Trial:
    """A point of a curve, and what the closure says there."""

    t: float
    on_curve: CurvePoint
    position: Position
    slope: float


def search(
    objective: Objective, start: Position, u: Tensor, slope: float, t: float, decrease: float, curvature: float
) -> Trial | None:
    """Looks along a flat vector for a step, t at first, with the strong Wolfe conditions.

    These are :math:`f(t) ≤ f(0) + decrease t f'(0)` and :math:`|f'(t)| ≤ curvature |f'(0)|`. Where f(t) and the least
    loss of any start differ by no more than rounding, the first is :math:`f'(t) ≤ (2 decrease - 1) f'(0)` instead,
    which is the same for a parabola. Slopes are those of the curve itself. A bracket, at whose left end the curve falls
    and at whose right it rises or is too high, shrinks by secants of the slopes.

    Returns:
        A trial; where none keeps the conditions the flattest of those that are lower, or None.

    References:
        Hager, Zhang, A new conjugate gradient method with guaranteed descent and an efficient line search, SIAM J.
        Optim. 16, 2005.
    """
    path = objective.space.path(start.points, u)
    left, left_slope, right, right_slope = 0.0, slope, math.inf, math.nan
    width, best = math.inf, None
    for _ in range(_MOST):
        on_curve = path(t)
        position = objective.at(on_curve.points)
        trial = Trial(t, on_curve, position, on_curve.slope(position.gradients))
        is_low = objective.allows(position, start.noise)
        decreases = position.loss <= start.loss + decrease * t * slope
        decreases = decreases or (is_low and trial.slope <= (2 * decrease - 1) * slope)
        if decreases and abs(trial.slope) <= curvature * abs(slope):
            return trial
        if is_low and position.norm < math.inf and (best is None or abs(trial.slope) < abs(best.slope)):
            best = trial
        if is_low and trial.slope < 0:
            left, left_slope = t, trial.slope
        else:
            right, right_slope = t, trial.slope if is_low else math.nan
        if right == math.inf:
            # A secant through the slopes at 0 and t.
            bend = (left_slope - slope) / left
            t = min(max(left - left_slope / bend if bend > 0 else math.inf, 1.5 * left), _FURTHER * left)
            continue
        if right - left <= 1e-15 * right:
            break
        # A secant of the slopes again; nearer the left end if that at the right is unknown.
        share = min(max(left_slope / (left_slope - right_slope), 0.05), 0.95) if right_slope > 0 else 0.25
        t = left + (right - left) * share
        if right - left > _SHRUNK * width:
            t = (left + right) / 2
        width = right - left
    if best is None or not (best.position.loss < start.loss or abs(best.slope) < abs(slope)):
        return None
    return best
