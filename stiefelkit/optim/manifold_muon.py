"""Muon on the Stiefel manifold: the steepest descent among tangent vectors in the spectral norm."""

from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, norms_of, polar_increment, riemannian_gradient
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.functional._stiefel.spectral import steepest
from stiefelkit.optim.batch import Bucket, Group
from stiefelkit.optim.settings import OF_ADAM, RATE, SHARED, Setting, at_least, integer
from stiefelkit.optim.steps import ROUNDING, Retraction, TangentOptimizer, as_factor, have_squares, landed_along, rate

SPECTRAL = (
    Setting("lr", 0.02, RATE, "learning rate: the angle, nearly, by which the columns of a frame turn at each step."),
    Setting("momentum", 0.95, at_least(0, below=1.0), "decay of the mean gradient M <- momentum M + (1 - momentum) G."),
)
"""Settings of optimizers by the spectral norm."""
_POLISHES = 11  # from a bound of W - step that is `sqrt(p)` times too large they lead to rounding


class PolarStep(Retraction):
    """Moves to the frame nearest to :math:`W - step`; the direction may be any whose :math:`W - step` has full rank."""

    def increment(self, group: Group, w: Tensor, direction: Tangent, steps: Norms, defect: Tensor | None) -> Tensor:
        return polar_increment(w, direction, as_factor(steps, w), defect=defect)

    def landed(self, bucket: Bucket, direction: Tangent, steps: Norms) -> bool:
        return direction.rest is None and landed_along(bucket, direction, steps, _POLISHES, "divide", 1.0)

    def leap(self, w: Tensor, direction: Tangent, steps: Norms) -> Tensor:
        return direction.vector(w) * (-as_factor(steps, w))  # the nearest frame follows


class ManifoldMuon(TangentOptimizer):
    r"""Steepest descent in the spectral norm: :math:`W ← polar(W - lr A)`.

    A is the tangent vector with the largest :math:`⟨M, A⟩`. Among all tangent A with :math:`‖A‖_2 ≤ 1`: no direction in
    which a linear layer's output may change counts more than another. :math:`M ← momentum M + (1 - momentum) G` is a
    mean of gradients, not transported. Every step is as long as the rate says, whatever the size of the gradient, so
    the rate wants a schedule that ends near zero. For a square frame :math:`A = W msign((S - S^H) / 2)`,
    :math:`S = W^H M`; for a tall one `stiefelkit.functional.spectral_direction` iterates in p x p matrices. The metric
    of the group makes no difference. Other groups are moved by torch.optim.Adam.

    A square frame costs one `msign` besides what a `CayleySGD` step does; a tall one as many p x p eigenvalue problems
    as there are iterations, for which `SPEL` is the cheaper half-sister.

    References:
        Bernstein, Modular manifolds, Thinking Machines Lab, 2025.
        Su, Steepest descent on manifolds: 3. Muon + Stiefel, kexue.fm/archives/11221, 2025.
    """

    free_optimizer = torch.optim.Adam

    settings = (
        *SPECTRAL,
        Setting("iterations", 10, integer(1, 10_000), "for the direction of a tall frame, off by 4 % at most."),
        *OF_ADAM,
        *SHARED,
    )
    examples = ({}, {"momentum": 0.0, "precision": "fast"}, {"iterations": 3, "amsgrad": True})
    steady: ClassVar = {"momentum": 0.0}
    retraction = PolarStep()

    def direction(self, group: Group, bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        along, _ = steepest(w, averaged_gradient(group, bucket, w, g), group["iterations"])
        return along, [rate(group)] * len(along.rotation_norms)


def averaged_gradient(group: Group, bucket: Bucket, w: Tensor, g: Tensor) -> Tangent:
    """Stages the mean of the gradients, and returns its tangent part; OverflowError if it is not finite."""
    momentum = group["momentum"]
    if momentum:
        g = bucket.averaged("momentum_buffer", g, momentum)
        bucket.stage("momentum_buffer", g)
    gradient = riemannian_gradient(w, g, "euclidean")
    if bucket.may_sync_host and not have_squares(gradient, g.dtype):
        raise OverflowError
    return above_rounding(gradient, g)


def above_rounding(gradient: Tangent, g: Tensor) -> Tangent:
    """Returns a Riemannian gradient of G, with zeros for a part that cannot be told from rounding."""
    rounding = ROUNDING * torch.finfo(g.dtype).eps * g.shape[-1] ** 0.5
    lost = [rounding * norm for norm in norms_of(g)[0]]
    rotation, rotation_norms = _above(lost, gradient.rotation, gradient.rotation_norms)
    if gradient.rest is None:
        return Tangent(rotation, None, rotation_norms, gradient.rest_norms)
    rest, rest_norms = _above(lost, gradient.rest, gradient.rest_norms)
    return Tangent(rotation, rest, rotation_norms, rest_norms, gradient.along_norms)


def _above(lost: Norms, part: Tensor, norms: Norms) -> tuple[Tensor, Norms]:
    if isinstance(norms[0], Tensor):
        above = norms[0] > lost[0]
        return part * above.view(*part.shape[:-2], 1, 1), [norms[0] * above]
    kept = [norm > bound for norm, bound in zip(norms, lost, strict=True)]
    if all(kept):
        return part, norms
    mask = torch.tensor(kept, device=part.device).view(*part.shape[:-2], 1, 1)
    return part * mask, [norm * keep for norm, keep in zip(norms, kept, strict=True)]
