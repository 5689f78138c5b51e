"""Adam on the Stiefel manifold by the iterative Cayley transform."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, norms_of, riemannian_gradient
from stiefelkit.optim.bucket import Bucket
from stiefelkit.optim.checks import check_bound, check_moments
from stiefelkit.optim.frame_optimizer import FrameOptimizer
from stiefelkit.optim.steps import bounded_steps, inverse, second_moments

__all__ = ["CayleyAdam"]


class CayleyAdam(FrameOptimizer):
    r"""Adam for frames, with one second moment for each matrix, and a Cayley step along the projected first moment.

    M <- b1 M + (1 - b1) G, projected on the tangent space, v <- b2 v + (1 - b2) ||G||_F^2,
    r = (1 - b1^k) (v / (1 - b2^k) + eps)^(1/2), and a step of length a = min(lr, 2 q / ||A||_F) along A / r, where A is
    the n x n skew generator of M, A W = M, never formed. Other groups are moved by torch.optim.Adam.

    In "stiefel:euclidean" this is the published algorithm, except that nothing is drawn at random: what rounding does
    to orthogonality is taken away as `FrameOptimizer` tells. In "stiefel:canonical" the part of A within the columns of
    W counts double.

    Args:
        params: groups, as `sk.optim.parameter_groups` gives them.
        lr: learning rate; a frame moves by about lr ||M||_F / r <= lr at each step.
        betas: decays (b1, b2) of the two moments.
        eps: added to the second moment of a frame, and to the root of that of other parameters.
        weight_decay: of the groups without a manifold.
        amsgrad: of the groups without a manifold.
        q: bounds the step of a frame, a ||A||_F / r <= 2 q; infinity for no bound.
        tolerance: relative error that the Cayley transform of a square frame may have, as far as it stays a frame;
            16 eps when None, and for tall frames, whose p x p part costs little.
        precision: "exact" or "fast", see `FrameOptimizer`.
        foreach: of the groups without a manifold.
        maximize: ascend instead.

    Raises:
        OptionError: a setting is out of range.
        ShapeError, NotAFrameError: a parameter of a manifold is no frame.
        OptimizerError: a frame stands in a group without a manifold.

    References:
        Li, Fuxin, Todorovic, Efficient Riemannian optimization on the Stiefel manifold via the Cayley transform, ICLR
        2020, algorithm 2.

    >>> import stiefelkit as sk
    >>> layer = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "stiefel")
    >>> optimizer = CayleyAdam(sk.optim.parameter_groups(layer, lr=1e-2))
    >>> layer(torch.ones(4)).square().sum().backward()
    >>> optimizer.step()
    """

    plain: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        q: float = 0.5,
        tolerance: float | None = None,
        precision: str = "exact",
        foreach: bool | None = None,
        maximize: bool = False,
    ):
        own = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            q=q,
            tolerance=tolerance,
            precision=precision,
            foreach=foreach,
            maximize=maximize,
        )
        super().__init__(params, own)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_moments(type(self).__name__, group)
        check_bound(type(self).__name__, group)

    def _direction(self, group: dict[str, Any], bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, list[float]]:
        metric = group["manifold"].partition(":")[2]
        first, second = group["betas"]
        moment = bucket.state("exp_avg").mul(first).add_(g, alpha=1 - first)
        direction = riemannian_gradient(w, moment, metric)
        bucket.stage("exp_avg", direction.covector(w, metric))
        scales = [
            inverse((1 - first**k) * (v / (1 - second**k) + group["eps"]) ** 0.5)
            for k, v in second_moments(bucket, norms_of(g)[0], second)
        ]
        return direction, bounded_steps(direction, scales, float(group["lr"]), group["q"])
