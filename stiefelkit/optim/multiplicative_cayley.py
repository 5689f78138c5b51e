"""The multiplicative Cayley update, and RMSprop for everything else."""

import torch
from torch import Tensor

from stiefelkit.functional import Tangent
from stiefelkit.functional._arithmetic.devices import may_sync_host
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.optim.batch import Bucket, Group
from stiefelkit.optim.settings import MOMENTUM, RATE, SHARED, SWITCH, WEIGHT_DECAY, Setting, at_least, one_of
from stiefelkit.optim.steps import TangentOptimizer, gradient_with_momentum, rate

_PRECONDITION = """"rmsprop" divides each entry of G by the root of its mean square before it is projected, real and
imaginary parts apart, as the paper does on pixel-by-pixel MNIST; where dL/dW is normal to the manifold and not zero,
as at principal components, that leads away from an optimum. None does not."""


class MultiplicativeCayley(TangentOptimizer):
    r"""Moves frames by :math:`W ← (I + lr B / 2)^{-1} (I - lr B / 2) W`, other groups by RMSprop.

    :math:`B = G W^H - W G^H`; :math:`B W` is the Riemannian gradient in the canonical metric, and the update its Cayley
    retraction. It is computed in p x p matrices only, by four n x p x p products for a tall frame or four n x n x n for
    a square one at steps :math:`lr ‖B‖_2 ≤ 0.1`, two more beyond. In the euclidean metric, "stiefel:euclidean", the
    part of B within the columns of W counts half.

    References:
        Wisdom, Powers, Hershey, Le Roux, Atlas, Full-capacity unitary recurrent neural networks, NIPS 2016.
        Wen, Yin, A feasible method for optimization with orthogonality constraints, 2013.
    """

    free_optimizer = torch.optim.RMSprop

    settings = (
        Setting("lr", 1e-3, RATE, "learning rate; frames are best given one of their own, `stiefel=dict(lr=1e-4)`."),
        Setting("precondition", None, one_of(None, "rmsprop"), _PRECONDITION),
        Setting("alpha", 0.9, at_least(0, below=1.0), "decay of the mean squares, for frames and others."),
        Setting("eps", 1e-8, at_least(0), "added to their roots."),
        Setting("momentum", 0.0, MOMENTUM, "factor of the last direction, of frames projected on each tangent space."),
        WEIGHT_DECAY,
        Setting("centered", False, SWITCH, "of the groups without a manifold, as in torch.optim.RMSprop."),
        *SHARED,
    )
    examples = (
        {},
        {"precision": "fast"},
        {"precondition": "rmsprop", "momentum": 0.5, "centered": True},
    )

    def direction(self, group: Group, bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        if group["precondition"]:
            g, squares = _preconditioned(g, bucket.state("square_avg"), group["alpha"], group["eps"])
            bucket.stage("square_avg", squares)
        direction = gradient_with_momentum(group, bucket, w, g)
        return direction, [rate(group)] * len(direction.rotation_norms)


def _preconditioned(g: Tensor, squares: Tensor, alpha: float, eps: float) -> tuple[Tensor, Tensor]:
    """Returns G over the root of the mean squares of its entries, and these; OverflowError if one is not finite."""
    if not g.is_complex():
        squares = squares.mul(alpha).addcmul_(g, g, value=1 - alpha)
        if may_sync_host(squares) and not torch.isfinite(squares).all():
            raise OverflowError
        return g / squares.sqrt().add_(eps), squares
    real, real_squares = (torch.view_as_real(t.resolve_conj().contiguous()) for t in (g, squares))
    scaled, squares = _preconditioned(real, real_squares, alpha, eps)
    return torch.view_as_complex(scaled), torch.view_as_complex(squares)
