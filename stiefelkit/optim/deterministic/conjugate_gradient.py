"""Conjugate gradients along frames, transported by the Cayley transform."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.functional._stiefel.conjugate_gradients import dot
from stiefelkit.optim.deterministic.line_search import search
from stiefelkit.optim.deterministic.minimizer import OF_ALL, Memory, Minimizer
from stiefelkit.optim.deterministic.objective import Objective, Position
from stiefelkit.optim.settings import Setting, at_least

_STEEP = 1e-8  # cosine between a direction and the gradient below which it is given up
_FIRST = 0.1  # length of the first step, over the diameter of the space


class ConjugateGradient(Minimizer):
    r"""Searches along :math:`d = -g + β d'`, d' the last direction transported, by the strong Wolfe conditions.

    :math:`β = max(⟨g, y⟩ / ⟨d', y⟩, 0)`, y the change of the gradient, by Hestenes and Stiefel.

    Costs two gradients an iteration, nearly, three vectors, and two transports. For losses whose gradient is cheap;
    where Hessians can be had, `TrustRegion` ends sooner, and `LBFGS` where a gradient is what costs.

    References:
        Hager, Zhang, A survey of nonlinear conjugate gradient methods, Pacific J. Optim. 2, 2006.
        Zhu, A Riemannian conjugate gradient method for optimization on the Stiefel manifold, Comput. Optim. Appl. 67,
        2017: the transport, and why it has to be isometric.
    """

    settings = (
        *OF_ALL,
        Setting("curvature", 0.4, at_least(0, 1), "|slope| after a line search, over that before it, at most."),
    )
    examples: ClassVar = ({}, {"curvature": 0.1})

    def iterate(self, objective: Objective, here: Position, memory: Memory) -> Position | None:
        curvature = self.param_groups[0]["curvature"]
        g, d = here.gradient, memory.get("direction")
        slope, dd = (0.0, 0.0) if d is None else (dot(g, d), dot(d, d))
        if d is None or not slope < -_STEEP * here.norm * math.sqrt(dd):
            d, dd = -g, here.norm**2
            slope = -dd
        bend = abs(memory.get("bend", 0.0))
        t = -slope / (bend * dd) if bend > 0 else _FIRST * objective.space.diameter / here.norm
        trial = search(objective, here, d, slope, t, min(0.1, curvature / 2), curvature)
        if trial is None and "direction" in memory:
            memory.clear()
            return here
        if trial is None:
            return None
        there = objective.on_manifold(trial.position)
        old_g, old_d = trial.on_curve.transport(torch.stack([g, d]))
        direction = _next(there, old_g, old_d, slope)
        memory.update(direction=direction, bend=(trial.slope - slope) / (trial.t * dd))
        return there


def _next(there: Position, old: Tensor, d: Tensor, slope: float) -> Tensor:
    """Returns beta d - g, from the last gradient and direction as they were transported; beta >= 0 as of Hestenes."""
    g = there.gradient
    gd = dot(g, d)
    gy, dy = there.norm**2 - dot(g, old), gd - slope
    return torch.sub(d * max(gy / dy, 0.0), g) if dy > 0 else -g
