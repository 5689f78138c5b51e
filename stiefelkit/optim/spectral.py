"""What optimizers by the spectral norm share: their settings, their momentum and the step to the nearest frame."""

from typing import Any

from torch import Tensor

from stiefelkit.functional import Tangent, polar_increment, riemannian_gradient
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.optim.base.batch import Bucket
from stiefelkit.optim.base.tangent_optimizer import Retraction
from stiefelkit.optim.settings import RATE, Setting, at_least
from stiefelkit.optim.steps import above_rounding, as_factor, have_squares

BEFORE = (
    Setting("lr", 0.02, RATE, "learning rate: the angle, nearly, by which the columns of a frame turn at each step."),
    Setting("momentum", 0.95, at_least(0, below=1.0), "decay of the mean gradient M <- momentum M + (1 - momentum) G."),
)


class PolarStep(Retraction):
    """To the frame nearest to :math:`W - step`; the direction may be any whose :math:`W - step` has full rank."""

    def increment(
        self, group: dict[str, Any], w: Tensor, direction: Tangent, steps: Norms, defect: Tensor | None
    ) -> tuple[Tensor, Any]:
        """See `Retraction`."""
        return polar_increment(w, direction, as_factor(steps, w), defect=defect), None

    def leap(self, w: Tensor, direction: Tangent, steps: Norms) -> Tensor:
        """See `Retraction`."""
        return direction.vector(w) * (-as_factor(steps, w))  # the nearest frame follows


def averaged_gradient(group: dict[str, Any], bucket: Bucket, w: Tensor, g: Tensor) -> Tangent:
    """Stages the mean of the gradients, which is of the ambient space, and returns its tangent part.

    Raises:
        OverflowError: it is not finite.
    """
    momentum = group["momentum"]
    if momentum:
        g = bucket.state("momentum_buffer").mul(momentum).add_(g, alpha=1 - momentum)
        bucket.stage("momentum_buffer", g)
    gradient = riemannian_gradient(w, g, "euclidean")
    if bucket.is_read and not have_squares(gradient, g.dtype):
        raise OverflowError
    return above_rounding(gradient, g)
