"""The multiplicative Cayley update as its authors' code makes it, without what takes rounding away."""

from typing import Any

from stiefelkit.functional import cayley_increment
from stiefelkit.optim import MultiplicativeCayley
from stiefelkit.optim.batch import Bucket
from stiefelkit.optim.steps import as_factor

__all__ = ["NAME", "UncorrectedCayley"]

NAME = "uncorrected_cayley"


class UncorrectedCayley(MultiplicativeCayley):
    """The multiplicative Cayley update in working precision, whose rounding errors add up."""

    def move(self, group: dict[str, Any], bucket: Bucket) -> None:
        """See `FrameOptimizer`."""
        bucket.refresh(False)
        w = bucket.frames()
        direction, steps = self.direction(group, bucket, w, bucket.gradients())
        bucket.commit()
        bucket.add(cayley_increment(w, direction, as_factor(steps, w)))
