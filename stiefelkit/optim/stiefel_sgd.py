"""SGD on the Stiefel manifold with a momentum that stays in the tangent bundle by itself, and its split step."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, riemannian_gradient
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.functional._arithmetic.product import plus_product
from stiefelkit.functional._stiefel.polar_step import leapt_momentum, split_increment, transported_momentum, turn
from stiefelkit.functional._stiefel.tangents import times
from stiefelkit.optim.batch import Bucket, Group
from stiefelkit.optim.settings import MOMENTUM, OF_SGD, RATE, SHARED, Setting
from stiefelkit.optim.steps import CayleyStep, Retraction, TangentOptimizer, as_factor, in_units, metric_of, rate


@dataclass
class TangentWithMomentum(Tangent):
    """A direction, and the momentum that it was made of."""

    momentum: Tangent = field(kw_only=True)


class SplitStep(Retraction):
    """Moves frames within the columns of W first, then out of them."""

    landed = CayleyStep.landed  # within the columns that is all of it

    def increment(self, group: Group, w: Tensor, direction: Tangent, steps: Norms, defect: Tensor | None) -> Tensor:
        return split_increment(w, direction, as_factor(steps, w), defect=defect)

    def leap(self, w: Tensor, direction: Tangent, steps: Norms) -> Tensor:
        return split_increment(w, direction, as_factor(steps, w), unscaled=True)


class SplitOptimizer(TangentOptimizer):
    """Has a momentum in the tangent space that the step takes along exactly; its key is `buffer`."""

    buffer = "momentum_buffer"
    retraction = SplitStep()

    def transport(
        self, group: Group, bucket: Bucket, direction: Tangent, steps: Norms, w: Tensor, **to: Tensor
    ) -> None:
        if not bucket.keeps(self.buffer):
            return
        increment, leapt = to.get("increment"), to.get("leapt")
        share = 0.5 if metric_of(group) == "canonical" else 1.0
        momentum = direction.momentum if isinstance(direction, TangentWithMomentum) else direction
        if leapt is not None and momentum is direction:
            after = leapt_momentum(w, leapt, direction, as_factor(steps, w), share).to(w.dtype)
        elif increment is None:
            w = w if leapt is None else leapt.to(w.dtype)
            if momentum.rest is None:
                after = times(w, momentum.rotation, share)
            else:
                after = plus_product(momentum.rest, w, momentum.rotation * share - w.mH @ momentum.rest)
        else:
            after = transported_momentum(w + increment, direction, as_factor(steps, w), momentum, share)
        if momentum.units:
            after = after * as_factor(momentum.units, w)
        bucket.stage(self.buffer, after)


def turned(group: Group, direction: Tangent, steps: Norms, *rests: Tensor | None) -> list[Tensor | None]:
    """Returns V of momenta after the rotation of their own, dV = -V Y dt, of the Euclidean metric alone."""
    if direction.rest is None or metric_of(group) == "canonical":
        return list(rests)
    back = turn(direction, as_factor(steps, direction.rest)).mH
    return [None if rest is None else plus_product(rest, rest, back) for rest in rests]


class StiefelSGD(SplitOptimizer):
    r"""SGD whose momentum is a velocity on the manifold: no projection, no transport, and none of it is lost.

    The momentum :math:`W Y + V`, Y skew and :math:`W^H V = 0`, gets the Riemannian gradient, :math:`Y ← momentum Y +
    W^H G - G^H W` and :math:`V ← momentum V + G - W W^H G`. The frame goes within its columns first, :math:`W_1 = W
    cay(-lr Y)`, then out of them, :math:`W ← (W_1 - lr V) (I + lr^2 V^H V)^{-1/2}`, and :math:`V ← (V + lr W_1 V^H V)
    (I + lr^2 V^H V)^{-1/2}`, as the equations of motion have it: without gradients, at momentum 1, the frame goes along
    a geodesic. The last factor is not published, and 1 to first order: with it V keeps its length, without it long
    steps feed on themselves. In "stiefel:euclidean" Y gets half as much, and V turns against Y, where in the authors'
    code it turns with Y. Other groups are moved by torch.optim.SGD.

    `CayleySGD` projects its momentum instead: cheaper, and the same to first order.

    References:
        Kong, Wang, Tao, Momentum Stiefel optimizer, with applications to suitably-orthogonal attention, and optimal
        transport, ICLR 2023; the factor of V Y, 2 a - 1 (a = 0 in the Euclidean metric, 1/2 in the canonical one), is
        that of the Euler-Lagrange equations, where the authors' code has 1 - 3 a / 2.
    """

    free_optimizer = torch.optim.SGD

    settings = (
        Setting("lr", 1e-2, RATE, "learning rate."),
        Setting("momentum", 0.9, MOMENTUM, "factor of the last direction."),
        *OF_SGD,
        *SHARED,
    )
    examples = ({}, {"momentum": 0.0, "precision": "fast"}, {"nesterov": True})
    steady: ClassVar = {"momentum": 0.0}

    def direction(self, group: Group, bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        if group["momentum"]:
            g = g.add(bucket.state("momentum_buffer"), alpha=group["momentum"])
        along = riemannian_gradient(w, g, metric_of(group))
        along, steps = in_units(w, along, [rate(group)] * len(along.rotation_norms))
        (along.rest,) = turned(group, along, steps, along.rest)
        return along, steps
