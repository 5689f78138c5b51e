"""Adam on the Stiefel manifold by the iterative Cayley transform."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, riemannian_gradient
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.optim.batch import Bucket, Group
from stiefelkit.optim.settings import BETAS, BOUNDED, OF_FREE, RATE, SHARED, SWITCH, WEIGHT_DECAY, Setting, at_least
from stiefelkit.optim.steps import TangentOptimizer, adam_scales, bounded_steps, metric_of, rate


class CayleyAdam(TangentOptimizer):
    r"""Adam for frames, with one second moment for each matrix, and a Cayley step along the projected first moment.

    :math:`M ← b_1 M + (1 - b_1) G`, projected on the tangent space, :math:`v ← b_2 v + (1 - b_2) ‖G‖_F^2`,
    :math:`r = (1 - b_1^k) (v / (1 - b_2^k) + eps)^{1/2}`, and a step of length :math:`a = min(lr, 2 q / ‖A / r‖_F)`
    along :math:`A / r`, where A is the n x n skew generator of M, :math:`A W = M`, never formed. Other groups are moved
    by torch.optim.Adam.

    Metrics, and what differs from the published algorithm, are as in `CayleySGD`.

    References:
        Li, Fuxin, Todorovic, Efficient Riemannian optimization on the Stiefel manifold via the Cayley transform, ICLR
        2020, algorithm 2.
    """

    free_optimizer = torch.optim.Adam

    settings = (
        Setting("lr", 1e-3, RATE, "learning rate; a frame moves by about :math:`lr ‖M‖_F / r ≤ lr` at each step."),
        Setting("betas", (0.9, 0.99), BETAS, "decays (b1, b2) of the two moments."),
        Setting("eps", 1e-8, at_least(0), "added to second moments of frames, and to roots of those of others."),
        WEIGHT_DECAY,
        Setting("amsgrad", False, SWITCH, OF_FREE),
        *BOUNDED,
        *SHARED,
    )
    examples = ({}, {"q": math.inf, "precision": "fast"}, {"amsgrad": True})
    steady: ClassVar = {"q": math.inf}

    def direction(self, group: Group, bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        metric = metric_of(group)
        moment = bucket.averaged("exp_avg", g, group["betas"][0])
        direction = riemannian_gradient(w, moment, metric)
        bucket.stage("exp_avg", direction.covector(w, metric))
        scales = adam_scales(bucket, g, group["betas"], group["eps"], is_inside=True)
        return direction, bounded_steps(direction.generator_norms(), scales, rate(group), group["q"])
