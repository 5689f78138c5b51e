"""Optimizers whose step goes along a tangent vector: where to is each one's own, how it stays a frame is here."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from stiefelkit.errors import NotAFrameError
from stiefelkit.functional import Tangent, cayley_increment
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.functional._stiefel.retractions import landed_in_one
from stiefelkit.metrics import rounding_limit
from stiefelkit.optim.base import rounding
from stiefelkit.optim.base.batch import Bucket
from stiefelkit.optim.base.checks import not_finite, not_returned, too_long
from stiefelkit.optim.base.frame_optimizer import FrameOptimizer
from stiefelkit.optim.base.rounding import measured
from stiefelkit.optim.steps import are_ordinary, as_factor, have_squares, in_units, is_still, reach

_TURNS = 3
"""Polishes that take any defect which is not lost to the rounding limit."""
_LONGEST = 2.0
"""Length of an increment over sqrt(p) from which it is worked out in float64."""


class Retraction(ABC):
    """A move of a frame along a tangent vector, and the polish that keeps the result a frame.

    W + increment is a frame but for rounding in proportion to the increment; what else is left of :math:`W^H W - I` is
    for `settle` to take away. A subclass with an `increment` of its own says anew that its `sums_are_short`, and how it
    has `landed`: those of another increment are not inherited.
    """

    polishes: ClassVar[int] = 1
    """Polishes after a step of length :math:`√p`, where no value can be read to count them."""
    sums_are_short: ClassVar[bool] = False
    """True if increments are products in sums of at most 64 terms, which round less (`rounding_of_step`)."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Takes back what has been said of an increment that the class replaces."""
        super().__init_subclass__(**options)
        for name in ("sums_are_short", "landed"):
            if next(word for base in cls.__mro__ for word in (name, "increment") if word in vars(base)) != name:
                setattr(cls, name, vars(Retraction)[name])

    @abstractmethod
    def increment(
        self, group: dict[str, Any], w: Tensor, direction: Tangent, steps: Norms, defect: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Returns what is added to W, shape (*, n, p), and its length, the largest of a batch; None for the steps' own.

        `direction` and `steps` are what `TangentOptimizer.direction` gives; a defect, if given, is taken away as well.
        """

    def leap(self, w: Tensor, direction: Tangent, steps: Norms) -> Tensor:
        """Returns what is added to exact frames, in float64 or complex128, where a step is no small increment.

        The frame nearest to that is taken.
        """
        return cayley_increment(w, direction, as_factor(steps, w))

    def landed(self, bucket: Bucket, direction: Tangent, steps: Norms) -> bool:
        """Tries to do a step and its polishes, where no value is read, by one launch; False where it takes several."""
        return False

    def settle(self, group: dict[str, Any], bucket: Bucket, length: float) -> None:
        """Polishes after an increment of some length what cannot wait for the next increment to take it away."""
        p = bucket.params[0]
        if not bucket.is_read:
            rounding.land(bucket, group["precision"], self.polishes)
            return
        most = rounding.due(*p.shape[-2:], group["precision"]) * (rounding.MOST if "lo" in bucket.states[0] else 2)
        if bucket.wear <= most:
            return
        for _ in range(_TURNS):
            rounding.polish(bucket)
            if bucket.wear == 0:
                return


class CayleyStep(Retraction):
    """By the Cayley transform."""

    sums_are_short = True

    def increment(
        self, group: dict[str, Any], w: Tensor, direction: Tangent, steps: Norms, defect: Tensor | None
    ) -> tuple[Tensor, Any]:
        """See `Retraction`."""
        increment = cayley_increment(w, direction, as_factor(steps, w), defect=defect, tolerance=group.get("tolerance"))
        return increment, None

    def landed(self, bucket: Bucket, direction: Tangent, steps: Norms) -> bool:
        """See `Retraction`."""
        w, lo, step = bucket.frames(), bucket.remainders(), as_factor(steps, bucket.frames())
        landed = (
            None if lo is None or not isinstance(step, Tensor) else landed_in_one(w, lo, direction, step, self.polishes)
        )
        if landed is None:
            return False
        w, lo, defects = landed
        bucket.replace(w, lo)
        bucket.require(defects.amax() <= rounding.LOST * math.sqrt(w.shape[-1]), AssertionError)
        return True


class TangentOptimizer(FrameOptimizer):
    """Moves frames along tangent vectors; a subclass says along which and how far, in `direction`.

    A step adds an increment to W. In precision "exact" a float32 or complex64 frame has a remainder `lo` of the same
    dtype in the optimizer's state, and :math:`W + lo` is what moves; increments are rounded as they are small. What
    their rounding leaves of :math:`W^H W - I` is worked out in float64 before an error model (`optim.base.rounding`)
    says that it may come to more than 1.7 rounding limits, and is taken away with that increment. So
    :math:`‖W^H W - I‖_F` stays within 2 rounding limits, however many steps are taken. "fast" has no remainder, does
    this at 5 limits, after 16 steps at most, and stays within 30. float64 and complex128 frames have no remainder;
    "exact" polishes them every 8 steps at least, and both keep them within 20 limits. Of fewer than 32 rows, what has
    no remainder is polished after 6 steps at most. To each of these bounds comes one eps below 16 columns. On devices
    whose values are not read, and with `capturable=True`, every step ends with a polish, and steps longer than
    :math:`√p` are shortened to it.
    """

    retraction: ClassVar[Retraction] = CayleyStep()
    """The retraction that moves a frame along its tangent vector."""

    @abstractmethod
    def direction(self, group: dict[str, Any], bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        """Returns a tangent vector, and how far against it each matrix of the batch goes; stages what it keeps.

        w and g, of shape (*, n, p), are the frames and the gradients of the objective that is minimized.

        Raises:
            OverflowError: a gradient or a moment is so large that its square overflows; nothing is written then.
        """

    def carry(
        self, group: dict[str, Any], bucket: Bucket, direction: Tangent, steps: Norms, w: Tensor, **to: Tensor
    ) -> None:
        """Stages what goes along to W + `increment`, to where W has `leapt`, or else to W; here nothing."""

    def move(self, group: dict[str, Any], bucket: Bucket) -> None:
        """See `FrameOptimizer`."""
        who, precision, is_read = type(self).__name__, group["precision"], bucket.is_read
        w, g = bucket.frames(), bucket.gradients()
        if group["maximize"]:
            g = -g
        with_remainder = precision == "exact" and bucket.is_narrow
        bucket.refresh(with_remainder)
        try:
            made: Any = self.direction(group, bucket, w, g)
            along, far = made if isinstance(made, tuple | list) and len(made) == 2 else (None, None)
            count = len(along.rotation_norms) if isinstance(along, Tangent) else -1
            if count != (len(far) if isinstance(far, list | tuple) else None):
                raise not_returned(f"{who}.direction", "a Tangent and a list of how far each matrix goes", made)
            direction, steps = made
            if is_read and not have_squares(direction, w.dtype):
                raise OverflowError
        except OverflowError:
            raise not_finite(who, [bucket]) from None
        if is_still(group, bucket):  # it must not so much as polish
            if not is_read:
                bucket.require((reach(direction, steps)[0] < math.inf).all(), AssertionError)
            self.carry(group, bucket, direction, steps, w)
            bucket.commit()
            bucket.wear = bucket.wear
            return
        root, carries = math.sqrt(w.shape[-1]), type(self).carry is not TangentOptimizer.carry
        if is_read and not are_ordinary(steps):
            direction, steps = in_units(w, direction, steps)
        is_short = with_remainder and self.retraction.sums_are_short
        model = rounding.rounding_of_step(*w.shape[-2:], w.dim() == 2) if is_short else (1.0, 1.0)
        length, worn, grown = reach(direction, steps, model)
        defect, before = None, 0.0
        if not is_read:
            bucket.require((length < math.inf).all(), AssertionError)  # not where it is NaN
            steps = [step * (root / length).clamp(max=1) for step in steps]
            if not carries and self.retraction.landed(bucket, direction, steps):
                return
        elif not math.isfinite(length + sum(direction.rest_norms)):
            raise too_long(who, group, bucket, length)
        elif length > _LONGEST * root or worn > rounding.HOPELESS:
            exact = rounding.leap(bucket, w, direction, steps, self.retraction.leap)
            if exact is not None:
                self.carry(group, bucket, direction, steps, w, leapt=exact)
            if exact is None or not bucket.is_finite():
                raise too_long(who, group, bucket, length)
            bucket.commit()
            bucket.assign(exact)
            bucket.wear = 0.0
            return
        else:
            before, bound = bucket.wear * grown, rounding.due(*w.shape[-2:], precision)
            if before >= bound and (not with_remainder or before + worn > rounding.MOST * bound):
                defect, norm = measured(bucket, w)
                if not norm <= rounding.LOST * root:
                    raise NotAFrameError(
                        f"{who} needs frames, got one with ||W^H W - I||_F = {norm:.2g}: it was changed from outside; "
                        "assign a frame with sk.assign_."
                    )
                limit = rounding_limit(w.shape[-1], w.dtype)
                before = rounding.wear_left(bucket, norm) + rounding.left_behind(defect, norm, direction, steps) / limit
        made = self.retraction.increment(group, w, direction, steps, defect)
        increment, shorter = made if isinstance(made, tuple | list) and len(made) == 2 else (None, None)
        if not isinstance(increment, Tensor) or increment.shape != w.shape:
            whose = f"{type(self.retraction).__name__}.increment"
            raise not_returned(whose, f"a tensor of shape {tuple(w.shape)} and its length or None", made)
        if carries:
            self.carry(group, bucket, direction, steps, w, increment=increment)
        bucket.commit()
        bucket.add(increment)
        bucket.wear = before + max(worn, 0.0 if with_remainder else rounding.wear_of_rounding(w, precision))
        self.retraction.settle(group, bucket, length if shorter is None else shorter)
