"""L-BFGS along frames, with a memory that is transported by the Cayley transform."""

from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.functional._stiefel.conjugate_gradients import dot
from stiefelkit.optim.deterministic.line_search import search
from stiefelkit.optim.deterministic.minimizer import OF_ALL, Memory, Minimizer
from stiefelkit.optim.deterministic.objective import Objective, Position
from stiefelkit.optim.settings import Setting, at_least, integer

_CAUTION = 1e-8  # cosine between a step and the change of the gradient from which they count


class LBFGS(Minimizer):
    r"""Searches along :math:`d = -H g`, H an inverse Hessian estimated from the last steps and changes of the gradient.

    Steps and changes are transported to each new point, isometrically, so that what they tell stays true: all in one
    call, at the cost of 2 `history_size` + 2 transports. The step is a point of the strong Wolfe conditions, mostly the
    first that is tried. For losses whose gradient is what costs.

    References:
        Huang, Gallivan, Absil, A Broyden class of quasi-Newton methods for Riemannian optimization, SIAM J. Optim. 25,
        2015.
        Huang, Absil, Gallivan, A Riemannian BFGS method without differentiated retraction for nonconvex optimization
        problems, SIAM J. Optim. 28, 2018: which pairs may count.
    """

    settings = (
        *OF_ALL,
        Setting("history_size", 10, integer(1), "steps that are remembered."),
        Setting("curvature", 0.9, at_least(0, 1), "|slope| after a line search, over that before it, at most."),
    )
    examples: ClassVar = ({}, {"history_size": 3})

    def iterate(self, objective: Objective, here: Position, memory: Memory) -> Position | None:
        settings, g = self.param_groups[0], here.gradient
        curvature = settings["curvature"]
        kept = [memory["steps"], memory["changes"]] if {"steps", "changes"} <= memory.keys() else []
        d, t = (-_two_loops(g, *kept), 1.0) if kept else (-g, 0.1 * objective.space.diameter / here.norm)
        slope = dot(g, d)
        trial = None
        if slope < -1e-8 * here.norm * torch.linalg.vector_norm(d).item():
            trial = search(objective, here, d, slope, t, min(1e-4, curvature / 2), curvature)
        if trial is None:
            if not memory:
                return None
            memory.clear()
            return here
        there = objective.on_manifold(trial.position)
        transported = trial.on_curve.transport(torch.cat([g[None], trial.t * d[None], *kept]))
        s, y = transported[1], there.gradient - transported[0]
        steps, changes = transported[2:].tensor_split(2)
        if dot(s, y) > _CAUTION * (dot(s, s) * dot(y, y)) ** 0.5:
            first = max(len(steps) + 1 - settings["history_size"], 0)
            steps, changes = torch.cat([steps[first:], s[None]]), torch.cat([changes[first:], y[None]])
        if len(steps):
            memory.update(steps=steps, changes=changes)
        return there


def _two_loops(g: Tensor, steps: Tensor, changes: Tensor) -> Tensor:
    """H g, by the recursion of Nocedal."""
    inverses = (1 / (steps * changes).sum(-1)).tolist()
    q, shares = g, []
    for s, y, inverse in zip(reversed(steps.unbind()), reversed(changes.unbind()), reversed(inverses), strict=True):
        shares.append(inverse * dot(s, q))
        q = torch.sub(q, y, alpha=shares[-1])
    q = q / (inverses[-1] * dot(changes[-1], changes[-1]))
    for s, y, inverse, share in zip(steps.unbind(), changes.unbind(), inverses, reversed(shares), strict=True):
        q = torch.add(q, s, alpha=share - inverse * dot(y, q))
    return q
