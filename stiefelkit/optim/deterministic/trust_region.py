"""A trust region along frames, whose model is minimized by truncated conjugate gradients."""

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from stiefelkit.numbers import optional
from stiefelkit.optim.deterministic.minimizer import OF_ALL, Memory, Minimizer
from stiefelkit.optim.deterministic.objective import Objective, Position, dot
from stiefelkit.optim.settings import Setting, at_least, integer

_ACCEPTED = 0.1
"""Least share of the gain predicted by the model that a step has to make."""


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

    >>> import stiefelkit as sk
    >>> a = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
    >>> w = torch.nn.Parameter(sk.init.haar((6, 2)))
    >>> optimizer = TrustRegion(sk.optim.frames(w))
    >>> _ = optimizer.step(lambda: -torch.trace(w.mT @ a @ w))
    >>> round(optimizer.progress.loss, 12)
    -11.0
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
        """See `Minimizer`."""
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


class Model(NamedTuple):
    """Minimum of a model: the point, a flat vector; by how much the model falls; whether it is as long as permitted."""

    u: Tensor
    gain: float
    is_at_boundary: bool


def truncated(
    g: Tensor,
    hessian: Callable[[Tensor], Tensor],
    radius: float,
    kappa: float,
    theta: float,
    most: int,
    least: float = 0.0,
) -> Model:
    """Minimizes <g, u> + <u, H u> / 2 within a radius by conjugate gradients, by so many products at most.

    Until ||g + H u|| is the share `kappa` of ||g||, times the power `theta` of the first step's length, but no less
    than the share `least`, below which what is left is rounding.

    References:
        Steihaug, The conjugate gradient method and trust regions in large scale optimization, SIAM J. Numer. Anal. 20,
        1983.
    """
    u, hu = torch.zeros_like(g), torch.zeros_like(g)
    r, d = g, -g
    rr = dd = dot(g, g)
    uu, ud, gain, length = 0.0, 0.0, 0.0, math.sqrt(rr)
    near = enough = kappa * kappa * rr
    for i in range(most):
        hd = hessian(d)
        bend = dot(d, hd)
        if rr <= near and bend <= length * dd:
            break  # along the minima, if they are no points: such a curvature is as small as the gradient
        step = rr / bend if bend > 0 else math.inf
        if i == 0 and bend > 0:
            q = step * length
            enough = rr * max(min(kappa, min(q, 1.0) ** theta), least) ** 2
        reached = uu + 2 * step * ud + step * step * dd
        if not reached < radius * radius:
            step = (-ud + math.sqrt(ud * ud + dd * (radius * radius - uu))) / dd
            u, hu = torch.add(u, d, alpha=step), torch.add(hu, hd, alpha=step)
            return Model(u, -dot(g, u) - 0.5 * dot(u, hu), True)
        new_u, new_hu = torch.add(u, d, alpha=step), torch.add(hu, hd, alpha=step)
        new_gain = -dot(g, new_u) - 0.5 * dot(new_u, new_hu)
        if new_gain <= gain:
            break
        u, hu, gain = new_u, new_hu, new_gain
        r = torch.add(r, hd, alpha=step)
        before, rr = rr, dot(r, r)
        if rr <= enough:
            break
        beta = rr / before
        uu, ud, dd = reached, beta * (ud + step * dd), rr + beta * beta * dd
        d = torch.sub(beta * d, r)
    return Model(u, gain, False)
