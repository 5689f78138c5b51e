"""Optimizers whose step goes along a tangent vector: where to is each one's own, how it stays a frame is here."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from stiefelkit.errors import NotAFrameError
from stiefelkit.functional import Tangent, cayley_increment
from stiefelkit.metrics import rounding_limit, working_dtype
from stiefelkit.optim.bucket import Bucket
from stiefelkit.optim.checks import not_finite
from stiefelkit.optim.frame_optimizer import FrameOptimizer
from stiefelkit.optim.rounding import HOPELESS, due, growth, left_behind, urgent, wear, wear_of_rounding
from stiefelkit.optim.steps import as_factor, length_of
from stiefelkit.optim.upkeep import leap, measured, polish_wholly, wear_left

__all__ = ["CayleyStep", "Retraction", "TangentOptimizer"]

_LONGEST = 2.0
"""Length of an increment over sqrt(p) from which it is worked out in float64."""
_LOST = 0.1
"""||W^H W - I||_F over sqrt(p) from which a frame has been changed by something else than its optimizer."""


class Retraction(ABC):
    """How a frame goes along a tangent vector, and what is done afterwards so that it is one."""

    @abstractmethod
    def increment(
        self, group: dict[str, Any], w: Tensor, direction: Tangent, steps: list[float], defect: Tensor | None
    ) -> tuple[Tensor, float]:
        """Returns what is added to W, shape (*, n, p), and its length, the largest of the batch.

        `direction` and `steps` are what `TangentOptimizer.direction` gives; a defect, if given, is taken away as well.
        """

    def leap(self, w: Tensor, direction: Tangent, steps: list[float]) -> Tensor:
        """Returns what is added to exact frames, in float64 or complex128, where a step is no small increment.

        The frame nearest to that is taken.
        """
        return cayley_increment(w, direction, as_factor(steps, w))

    @abstractmethod
    def settle(self, group: dict[str, Any], bucket: Bucket, length: float) -> None:
        """Polishes what cannot wait for the next step, after an increment of some length."""


class CayleyStep(Retraction):
    """By the Cayley transform; rounding is taken away with the next increment, unless it is urgent."""

    def increment(
        self, group: dict[str, Any], w: Tensor, direction: Tangent, steps: list[float], defect: Tensor | None
    ) -> tuple[Tensor, float]:
        """See `Retraction`."""
        increment = cayley_increment(w, direction, as_factor(steps, w), defect=defect, tolerance=group.get("tolerance"))
        return increment, length_of(direction, steps)

    def settle(self, group: dict[str, Any], bucket: Bucket, length: float) -> None:
        """See `Retraction`."""
        if bucket.wear > urgent(bucket.params[0], group["precision"]):
            polish_wholly(bucket)


class TangentOptimizer(FrameOptimizer):
    """Moves frames along tangent vectors; a subclass says along which and how far, in `direction`.

    A step adds an increment to W. In precision "exact" a float32 or complex64 frame has a remainder `lo` of the same
    dtype in the optimizer's state, and W + lo is what moves; increments are rounded as they are small. What their
    rounding leaves of W^H W - I is worked out in float64 whenever an error model (`stiefelkit.optim.rounding`) says
    that it may have come to 0.6 rounding limits, and is taken away with the next increment. So ||W^H W - I||_F stays
    within 2 rounding limits for ever. "fast" has no remainder, does this at 5 limits, after 16 steps at most, and stays
    within 30. float64 and complex128 frames have no remainder; "exact" polishes them every 8 steps at least, and both
    keep them within 20 limits. To each of these bounds comes one eps below 16 columns.
    """

    retraction: ClassVar[Retraction] = CayleyStep()
    """How a frame goes there."""

    @abstractmethod
    def direction(self, group: dict[str, Any], bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, list[float]]:
        """Returns a tangent vector, and how far against it each matrix of the batch goes; stages what it keeps.

        w and g, of shape (*, n, p), are the frames and the gradients of the objective that is minimised.

        Raises:
            OverflowError: a gradient or a moment is so large that its square overflows; nothing is written then.
        """

    def carry(
        self,
        group: dict[str, Any],
        bucket: Bucket,
        direction: Tangent,
        steps: list[float],
        w: Tensor,
        increment: Tensor | None = None,
    ) -> None:
        """Stages what goes along to W + increment, or to W after a step that is none; here nothing."""

    def move(self, group: dict[str, Any], bucket: Bucket) -> None:
        """See `FrameOptimizer`."""
        who, precision = type(self).__name__, group["precision"]
        w, g = bucket.frames(), bucket.gradients()
        if group["maximize"]:
            g = -g
        with_remainder = precision == "exact" and w.dtype != working_dtype(w.dtype)
        bucket.refresh(with_remainder)
        try:
            direction, steps = self.direction(group, bucket, w, g)
            finite = math.isfinite(sum(direction.rotation_norms) + sum(direction.rest_norms) + sum(steps))
        except OverflowError:
            finite = False
        if not finite:
            raise not_finite(who, [bucket])
        if float(group["lr"]) == 0:
            # torch.distributed.checkpoint makes such a step, for the state; it must not so much as polish.
            self.carry(group, bucket, direction, steps, w)
            bucket.commit()
            bucket.wear = bucket.wear
            return
        root = math.sqrt(w.shape[-1])
        worn = wear(direction, steps)
        if length_of(direction, steps) > _LONGEST * root or worn > HOPELESS:
            exact = leap(who, bucket, w, direction, steps, self.retraction.leap)
            self.carry(group, bucket, direction, steps, exact.to(w.dtype))
            bucket.commit()
            bucket.assign(exact)
            bucket.wear = 0.0
            return
        defect, before = None, bucket.wear * growth(direction, steps)
        if before >= due(w, precision):
            defect, norm = measured(bucket, w)
            if not norm <= _LOST * root:
                raise NotAFrameError(
                    f"{who} needs frames, got one with ||W^H W - I||_F = {norm:.2g}: it was changed from outside; "
                    "assign a frame with sk.assign_."
                )
            limit = rounding_limit(w.shape[-1], w.dtype)
            before = wear_left(bucket, norm) + norm / limit * left_behind(direction, steps)
        increment, length = self.retraction.increment(group, w, direction, steps, defect)
        self.carry(group, bucket, direction, steps, w, increment)
        bucket.commit()
        bucket.add(increment)
        bucket.wear = before + max(worn, 0.0 if with_remainder else wear_of_rounding(w, precision))
        self.retraction.settle(group, bucket, length)
