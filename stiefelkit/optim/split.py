"""What the optimizers of Kong, Wang and Tao share: the split step, and a momentum that goes along."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stiefelkit.functional import Tangent
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.functional._arithmetic.product import plus_product
from stiefelkit.functional._stiefel.polar_step import leapt_momentum, split_increment, transported_momentum, turn
from stiefelkit.optim.base.batch import Bucket
from stiefelkit.optim.base.tangent_optimizer import Retraction, TangentOptimizer
from stiefelkit.optim.steps import as_factor


@dataclass
class Moving(Tangent):
    """A direction, and the momentum that it was made of."""

    momentum: Tangent | None = None


class SplitStep(Retraction):
    """First within the columns of W, then out of them."""

    def increment(
        self, group: dict[str, Any], w: Tensor, direction: Tangent, steps: Norms, defect: Tensor | None
    ) -> tuple[Tensor, Any]:
        """See `Retraction`."""
        return split_increment(w, direction, as_factor(steps, w), defect=defect), None

    def leap(self, w: Tensor, direction: Tangent, steps: Norms) -> Tensor:
        """See `Retraction`."""
        return split_increment(w, direction, as_factor(steps, w), unscaled=True)


class SplitOptimizer(TangentOptimizer):
    """Has a momentum in the tangent space that the step takes along exactly; its key is `buffer`."""

    buffer = "momentum_buffer"
    retraction = SplitStep()

    def carry(
        self, group: dict[str, Any], bucket: Bucket, direction: Tangent, steps: Norms, w: Tensor, **to: Tensor
    ) -> None:
        """See `TangentOptimizer`."""
        if self.buffer not in bucket.states[0]:
            return
        increment, leapt = to.get("increment"), to.get("leapt")
        share = 0.5 if is_canonical(group) else 1.0
        momentum = direction.momentum if isinstance(direction, Moving) and direction.momentum else direction
        if leapt is not None and momentum is direction:
            after = leapt_momentum(w, leapt, direction, as_factor(steps, w), share).to(w.dtype)
        elif increment is None:
            w = w if leapt is None else leapt.to(w.dtype)
            within = momentum.rotation * share
            if momentum.rest is not None:
                within = within - w.mH @ momentum.rest
            after = w @ within if momentum.rest is None else plus_product(momentum.rest, w, within)
        else:
            after = transported_momentum(w + increment, direction, as_factor(steps, w), momentum, share)
        if momentum.units:
            after = after * as_factor(momentum.units, w)
        bucket.stage(self.buffer, after)


def is_canonical(group: dict[str, Any]) -> bool:
    """Returns whether the metric of a group is the canonical one."""
    return group["manifold"].endswith(":canonical")


def turned(group: dict[str, Any], direction: Tangent, steps: Norms, *rests: Tensor | None) -> list[Tensor | None]:
    """V of momenta after the rotation of their own, dV = -V Y dt in the Euclidean metric, nothing in the canonical."""
    if direction.rest is None or is_canonical(group):
        return list(rests)
    back = turn(direction, as_factor(steps, direction.rest)).mH
    return [None if rest is None else plus_product(rest, rest, back) for rest in rests]
