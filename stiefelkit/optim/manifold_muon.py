"""Muon on the Stiefel manifold: the steepest descent among tangent vectors in the spectral norm."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.functional import Tangent
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.functional._stiefel.spectral import steepest
from stiefelkit.optim.base.batch import Bucket
from stiefelkit.optim.base.tangent_optimizer import TangentOptimizer
from stiefelkit.optim.settings import OF_ADAM, SHARED, Setting, integer
from stiefelkit.optim.spectral import BEFORE, PolarStep, averaged_gradient
from stiefelkit.optim.steps import rate


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

    >>> import stiefelkit as sk
    >>> layer = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "stiefel")
    >>> groups = sk.optim.parameter_groups(layer, lr=1e-3, stiefel=dict(lr=0.02))
    >>> optimizer = ManifoldMuon(groups)
    >>> layer(torch.ones(4)).square().sum().backward()
    >>> optimizer.step()
    """

    plain = torch.optim.Adam

    settings = (
        *BEFORE,
        Setting("iterations", 10, integer(1, 10_000), "for the direction of a tall frame, off by 4 % at most."),
        *OF_ADAM,
        *SHARED,
    )
    examples = ({}, {"momentum": 0.0, "precision": "fast"}, {"iterations": 3, "amsgrad": True})
    steady: ClassVar = {"momentum": 0.0}
    retraction = PolarStep()

    def direction(self, group: dict[str, Any], bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        """See `TangentOptimizer`."""
        along, _ = steepest(w, averaged_gradient(group, bucket, w, g), group["iterations"])
        return along, [rate(group)] * len(along.rotation_norms)
