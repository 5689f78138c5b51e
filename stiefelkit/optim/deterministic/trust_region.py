"""A trust region along frames, whose model is minimized by truncated conjugate gradients."""

import math
from typing import ClassVar

from stiefelkit.functional._stiefel.conjugate_gradients import dot, truncated
from stiefelkit.numbers import optional
from stiefelkit.optim.deterministic.minimizer import OF_ALL, Memory, Minimizer
from stiefelkit.optim.deterministic.objective import Objective, Position
from stiefelkit.optim.settings import Setting, at_least, integer

_ACCEPTED = 0.1  # least share of the gain predicted by the model that a step has to make


class TrustRegion(Minimizer):
    r"""Minimizes :math:`⟨g, u⟩ + ⟨u, H u⟩ / 2` in :math:`‖u‖ ≤ radius`, moves by u, and fits the radius to the outcome.

    The model is minimized by conjugate gradients (Steihaug, Toint), until
    :math:`‖g + H u‖ ≤ ‖g‖ min(kappa, q^{theta})`, q the length of the first of their steps: near a minimum whose
    Hessian is definite the gradient then shrinks quadratically. H is the Riemannian Hessian. Its products with vectors
    come from differentiating the gradient again where the closure leaves differentiation to the step, or calls
    `backward(create_graph=True)`; otherwise from differences of gradients, at one gradient each.

    What is gained is a difference of losses, or, where that is rounding, the mean of the slopes at both ends.

    References:
        Absil, Baker, Gallivan, Trust-region methods on Riemannian manifolds, Found. Comput. Math. 7, 2007.
        Conn, Gould, Toint, Trust-region methods, 2000, section 17.4.2: the ratio.
    """

    needs_products = True
    settings = (
        *OF_ALL,
        Setting(
            "max_inner", None, optional(integer(1)), "products with H in an iteration at most; the dimension when None."
        ),
        Setting("kappa", 0.1, at_least(0, 1), "share of the gradient that an iteration leaves, far from a minimum."),
        Setting("theta", 1.0, at_least(0), "power of q; 1 + theta is the order of convergence, at most 2."),
    )
    examples: ClassVar = ({}, {"max_inner": 8}, {"kappa": 0.01, "theta": 0.5})

    def iterate(self, objective: Objective, here: Position, memory: Memory) -> Position | None:
        settings, space = self.param_groups[0], objective.space
        radius = memory.get("radius", space.diameter / 8)
        model = truncated(
            here.gradient,
            objective.hessian(here),
            radius,
            settings["kappa"],
            settings["theta"],
            settings["max_inner"] or space.size,
            max(here.floor / here.norm, objective.eps ** (0.4 if here.graph is None else 0.8)),
        )
        if not model.gain > 0:
            return None
        on_curve = space.path(here.points, model.u)(1.0)
        there = objective.at(on_curve.points)
        if model.gain <= here.noise:
            # The losses differ by rounding only: what is gained is the mean of the slopes, exactly so of a parabola.
            ratio = (dot(here.gradient, model.u) + on_curve.slope(there.gradients)) / (-2 * model.gain)
        else:
            ratio = (here.loss - there.loss + here.noise) / (model.gain + here.noise)
        if not (math.isfinite(there.loss + there.norm) and objective.allows(there, here.noise)):
            ratio = -math.inf
        if ratio < 0.25:
            radius *= 0.25
        elif ratio > 0.75 and model.is_at_boundary:
            radius = min(2 * radius, space.diameter) if space.is_bounded else 2 * radius
        memory["radius"] = radius
        if ratio > _ACCEPTED:
            return objective.on_manifold(there)
        if radius < objective.eps * space.diameter:
            return None
        return objective.at(here.points)  # its graph was of parameters that have been written to
