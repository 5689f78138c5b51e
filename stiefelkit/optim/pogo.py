"""POGO: a step along the tangent space and Newton steps back, in nothing but products."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, norms_of, riemannian_gradient
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.metrics import defect as defect_of
from stiefelkit.optim.batch import Bucket, Group
from stiefelkit.optim.settings import BETAS, OF_FREE, RATE, SHARED, SWITCH, WEIGHT_DECAY, Setting, at_least, one_of
from stiefelkit.optim.steps import (
    Retraction,
    TangentOptimizer,
    adam_scales,
    as_factor,
    land,
    landed_along,
    metric_of,
    rate,
)

LONGEST = 0.5  # ||X^H X - I||_F to which a step is shortened, well within the reach of a step back


class StepBack(Retraction):
    """By :math:`X = W - step`, and :math:`W ← X - X (X^H X - I) / 2` as often as it takes."""

    def increment(self, group: Group, w: Tensor, direction: Tangent, steps: Norms, defect: Tensor | None) -> Tensor:
        along = direction.vector(w)
        increment = along * (-as_factor(steps, w))
        left = defect_of(w + increment)
        norms = norms_of(left)[0]
        if isinstance(norms[0], Tensor):
            share = torch.where(norms[0] > LONGEST, (0.9 * LONGEST / norms[0]).sqrt(), 1.0)
            increment = increment * as_factor([share], w)
            left = defect_of(w + increment)
        elif max(norms) > LONGEST:
            # X^H X - I grows as the square of the step.
            shares = [(0.9 * LONGEST / x) ** 0.5 if x > LONGEST else 1.0 for x in norms]
            steps = [s * share for s, share in zip(steps, shares, strict=True)]
            increment = along * (-as_factor(steps, w))
            left = defect_of(w + increment)
        return increment.sub_(((w + increment) @ left).mul_(0.5))

    polishes = 4  # after the one of the increment, which leaves 0.17, these leave 0.02, 3e-4, 1e-7, and nothing

    def landed(self, bucket: Bucket, direction: Tangent, steps: Norms) -> bool:
        return landed_along(bucket, direction, steps, self.polishes + 1, "shorten", LONGEST)

    def finish(self, group: Group, bucket: Bucket, length: float) -> None:
        left = 0.75 * min(length**2, LONGEST) ** 2 if group["precision"] == "fast" else math.inf
        land(bucket, group["precision"], self.polishes, left)


class POGO(TangentOptimizer):
    r"""Moves frames by products only: :math:`X = W - lr R`, then :math:`W ← X - X (X^H X - I) / 2`.

    R is the Riemannian gradient of what a linear base optimizer makes of G: momentum, or Adam with one second moment
    for each matrix. In "stiefel:canonical", the default, :math:`R = G - W G^H W`, twice the direction of the paper and
    of its authors' code, :math:`(G W^H W - W G^H W) / 2`: a rate of theirs is half as large here. X is off the manifold
    by :math:`lr^2 R^H R`, and the step back leaves 3/4 of the square of that.

    The published algorithm takes one step back, after which :math:`‖W^H W - I‖_2` is about :math:`3/4 (lr ‖R‖_2)^4`.
    Here further steps bring the frame within 30 rounding limits (precision "fast", in the frame's dtype) or 2 ("exact",
    in float64). The moment is projected on each tangent space. The published one is of the ambient space
    (moment="ambient"): what is normal to the manifold at one frame then pulls at the next, and where :math:`∂L/∂W` is
    not zero at an optimum, as with principal components, the frame may go round it in a cycle at any rate. Steps that
    leave :math:`‖X^H X - I‖_F > 1/2` are shortened. Other groups are moved by torch.optim.Adam.

    For where products are all that is cheap. `CayleySGD` takes as few of them, and ends nearer to a frame, while
    :math:`lr ‖R‖_2` is below 0.1.

    References:
        Javaloy, Vergari, An embarrassingly simple way to optimize orthogonal matrices at scale, ICML 2026.
        Ablin, Peyre, Fast and accurate optimization on the orthogonal manifold without retraction, AISTATS 2022.
    """

    free_optimizer = torch.optim.Adam

    settings = (
        Setting("lr", 1e-3, RATE, "learning rate."),
        Setting("base", "sgd", one_of("sgd", "adam"), 'of frames: "sgd", momentum on the source of R, or "adam".'),
        Setting("betas", (0.9, 0.999), BETAS, 'decays: the first is the momentum, dampened in "adam" only.'),
        Setting("moment", "tangent", one_of("tangent", "ambient"), 'of frames: "ambient" as published, or "tangent".'),
        Setting("eps", 1e-8, at_least(0), "added to the roots of second moments."),
        WEIGHT_DECAY,
        Setting("amsgrad", False, SWITCH, OF_FREE),
        *SHARED,
    )
    examples = ({}, {"betas": (0.0, 0.999), "precision": "fast"}, {"base": "adam", "moment": "ambient"})
    steady: ClassVar = {"betas": (0.0, 0.999)}
    retraction = StepBack()

    def direction(self, group: Group, bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        metric, betas = metric_of(group), group["betas"]
        if group["base"] == "adam":
            moment = bucket.averaged("exp_avg", g, betas[0])
        elif bucket.may_sync_host:
            moment = bucket.state("exp_avg").mul(betas[0]).add_(g)
        else:
            moment = g.add(bucket.state("exp_avg"), alpha=betas[0])
        direction = riemannian_gradient(w, moment, metric)
        bucket.stage("exp_avg", direction.covector(w, metric) if group["moment"] == "tangent" else moment)
        scales = [1.0] * len(direction.rotation_norms)
        if group["base"] == "adam":
            scales = adam_scales(bucket, g, betas, group["eps"])
        lr, longest = rate(group), math.sqrt(w.shape[-1])
        steps = [s * lr for s in scales]
        if bucket.may_sync_host:  # else every optimizer does it
            norms = direction.norms("euclidean")
            steps = [longest / norm if s * norm > longest else s for s, norm in zip(steps, norms, strict=True)]
        return direction, steps
