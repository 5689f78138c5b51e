"""Stochastic gradient descent with momentum on the Stiefel manifold by the iterative Cayley transform."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, riemannian_gradient
from stiefelkit.optim.bucket import Bucket
from stiefelkit.optim.checks import check_bound, check_number
from stiefelkit.optim.frame_optimizer import FrameOptimizer
from stiefelkit.optim.steps import bounded_steps

__all__ = ["CayleySGD"]


class CayleySGD(FrameOptimizer):
    r"""SGD with momentum for frames: M <- momentum M + G, projected on the tangent space, and a Cayley step along it.

    With the n x n skew generator A of the projected M, A W = M, the step is W <- (I + a/2 A)^-1 (I - a/2 A) W, and
    a = min(lr, 2 q / ||A||_F) keeps it a contraction. The inverse is a power series in p x p matrices, as long as that
    takes no more than six terms to the tolerance, and exact beyond. Other groups are moved by torch.optim.SGD.

    In "stiefel:euclidean" this is the published algorithm, except that nothing is drawn at random: what rounding does
    to orthogonality is taken away as `FrameOptimizer` tells. In "stiefel:canonical" the part of A within the columns of
    W counts double.

    Args:
        params: groups, as `sk.optim.parameter_groups` gives them.
        lr: learning rate.
        momentum: factor of the last direction.
        dampening: of the groups without a manifold, as in torch.optim.SGD.
        weight_decay: of the groups without a manifold.
        nesterov: of the groups without a manifold.
        q: bounds the step of a frame, a ||A||_F <= 2 q; infinity for no bound.
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
        2020, algorithm 1.

    >>> import stiefelkit as sk
    >>> layer = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "stiefel")
    >>> optimizer = CayleySGD(sk.optim.parameter_groups(layer, lr=0.1))
    >>> layer(torch.ones(4)).square().sum().backward()
    >>> optimizer.step()
    """

    plain: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        q: float = 0.5,
        tolerance: float | None = None,
        precision: str = "exact",
        foreach: bool | None = None,
        maximize: bool = False,
    ):
        own = dict(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            q=q,
            tolerance=tolerance,
            precision=precision,
            foreach=foreach,
            maximize=maximize,
        )
        super().__init__(params, own)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_number(type(self).__name__, group, "momentum")
        check_bound(type(self).__name__, group)

    def _direction(self, group: dict[str, Any], bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, list[float]]:
        metric = group["manifold"].partition(":")[2]
        if group["momentum"]:
            g = g.add(bucket.state("momentum_buffer"), alpha=group["momentum"])
        direction = riemannian_gradient(w, g, metric)
        if group["momentum"]:
            bucket.stage("momentum_buffer", direction.covector(w, metric))
        scales = [1.0] * len(direction.rotation_norms)
        return direction, bounded_steps(direction, scales, float(group["lr"]), group["q"])
