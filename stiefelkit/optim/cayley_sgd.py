"""Stochastic gradient descent with momentum on the Stiefel manifold by the iterative Cayley transform."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.functional import Tangent
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.optim.batch import Bucket, Group
from stiefelkit.optim.settings import BOUNDED, MOMENTUM, OF_SGD, RATE, SHARED, Setting
from stiefelkit.optim.steps import TangentOptimizer, bounded_steps, gradient_with_momentum, rate


class CayleySGD(TangentOptimizer):
    """SGD with momentum for frames: :math:`M ← momentum M + G`, projected on the tangent space, and a Cayley step.

    With the n x n skew generator A of the projected M, :math:`A W = M`, the step along it is
    :math:`W ← (I + a A / 2)^{-1} (I - a A / 2) W`, and :math:`a = min(lr, 2 q / ‖A‖_F)` keeps it a contraction. The
    inverse is a power series in p x p matrices, as long as that takes no more than six terms to 16 eps, and exact
    beyond. Other groups are moved by torch.optim.SGD.

    In "stiefel:euclidean" this is the published algorithm, except that nothing is drawn at random: what rounding does
    to orthogonality is taken away as `TangentOptimizer` tells. In "stiefel:canonical" the part of A within the columns
    of W counts double.

    References:
        Li, Fuxin, Todorovic, Efficient Riemannian optimization on the Stiefel manifold via the Cayley transform, ICLR
        2020, algorithm 1.
    """

    free_optimizer = torch.optim.SGD

    settings = (
        Setting("lr", 1e-2, RATE, "learning rate."),
        Setting("momentum", 0.9, MOMENTUM, "factor of the last direction."),
        *OF_SGD,
        *BOUNDED,
        *SHARED,
    )
    examples = ({}, {"momentum": 0.0, "q": math.inf, "precision": "fast"}, {"nesterov": True})
    steady: ClassVar = {"momentum": 0.0, "q": math.inf}

    def direction(self, group: Group, bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        direction = gradient_with_momentum(group, bucket, w, g)
        scales = [1.0] * len(direction.rotation_norms)
        return direction, bounded_steps(direction.generator_norms(), scales, rate(group), group["q"])
