"""POGO: a step along the tangent space and Newton steps back, in nothing but products."""

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.errors import OptionError
from stiefelkit.functional import norms_of, riemannian_gradient
from stiefelkit.metrics import defect as defect_of
from stiefelkit.metrics import rounding_limit
from stiefelkit.optim.bucket import Bucket
from stiefelkit.optim.frame_optimizer import FrameOptimizer
from stiefelkit.optim.steps import TINY, bounded_steps, check_moments, second_moments

__all__ = ["POGO"]

BASES = ("sgd", "adam")
LONGEST = 0.5
"""||X^H X - I||_F to which a step is shortened, well within the reach of a step back."""


class POGO(FrameOptimizer):
    r"""Moves frames without a retraction: X = W - lr R, then W <- X - X (X^H X - I) / 2. Only products, no inverse.

    R is the Riemannian gradient of what a linear base optimizer makes of G: momentum, or Adam with one second moment
    for each matrix. X is off the manifold by lr^2 R^H R, and the step back leaves 3/4 of the square of that.

    In precision "fast" this is the published algorithm with one step back: ||W^H W - I||_2 is about 3/4 (lr ||R||_2)^4
    after each step, which does not accumulate. In "exact" further steps back, in float64, bring the frame within 2
    rounding limits. The moment is one of the ambient space, as published; nothing takes it along, so that long steps
    with much of it may end in a cycle around the optimum where `CayleySGD` does not. Steps that leave
    ||X^H X - I||_F > 1/2 are shortened. Other groups are moved by torch.optim.Adam.

    For where products are all that is cheap. `CayleySGD` takes as few of them, and ends nearer to a frame, while
    lr ||R||_2 is below 0.1.

    Args:
        params: groups, as `sk.optim.parameter_groups` gives them.
        lr: learning rate.
        base: of the frames: "sgd", momentum on R's Euclidean source, or "adam".
        betas: decays of the moments: the first is the momentum of either base, dampened in "adam" only.
        eps: added to the roots of second moments.
        weight_decay: of the groups without a manifold.
        amsgrad: of the groups without a manifold.
        precision: "exact" or "fast".
        foreach: of the groups without a manifold.
        maximize: ascend instead.

    Raises:
        OptionError: a setting is out of range.
        ShapeError, NotAFrameError: a parameter of a manifold is no frame.
        OptimizerError: a frame stands in a group without a manifold.

    References:
        Javaloy, Vergari, An embarrassingly simple way to optimize orthogonal matrices at scale, ICML 2026.
        Ablin, Peyre, Fast and accurate optimization on the orthogonal manifold without retraction, AISTATS 2022.

    >>> import stiefelkit as sk
    >>> layer = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "stiefel")
    >>> optimizer = POGO(sk.optim.parameter_groups(layer, lr=1e-2))
    >>> layer(torch.ones(4)).square().sum().backward()
    >>> optimizer.step()
    """

    plain: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        base: str = "sgd",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        precision: str = "exact",
        foreach: bool | None = None,
        maximize: bool = False,
    ):
        own = dict(
            lr=lr,
            base=base,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            precision=precision,
            foreach=foreach,
            maximize=maximize,
        )
        super().__init__(params, own)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["base"] not in BASES:
            raise OptionError(f"POGO needs base in {BASES}, got {group['base']!r}.")
        check_moments("POGO", group)

    def _increment(
        self, group: dict[str, Any], bucket: Bucket, w: Tensor, g: Tensor, defect: Tensor | None
    ) -> tuple[Tensor, float]:
        metric, adam = group["manifold"].partition(":")[2], group["base"] == "adam"
        first, second = group["betas"]
        moment = bucket.state("exp_avg").mul(first).add_(g, alpha=1 - first if adam else 1.0)
        direction = riemannian_gradient(w, moment, metric)
        self._check_direction(direction, bucket)
        bucket.set_state("exp_avg", moment)
        scales = [1.0] * len(direction.rotation_norms)
        if adam:
            counts, squares = second_moments(bucket, norms_of(g)[0], second)
            scales = [
                1 / max((1 - first**k) * ((v / (1 - second**k)) ** 0.5 + group["eps"]), TINY)
                for k, v in zip(counts, squares, strict=True)
            ]
        steps, length = bounded_steps(w, direction, scales, {**group, "q": math.inf})
        increment = direction.vector(w) * -steps
        moved = w + increment
        left = defect_of(moved)
        norm = max(norms_of(left)[0])
        if norm > LONGEST:
            # X^H X - I grows as the square of the step
            shorter = (0.9 * LONGEST / norm) ** 0.5
            increment, length = increment * shorter, length * shorter
            moved = w + increment
            left = defect_of(moved)
        return increment.sub_((moved @ left).mul_(0.5)), length

    def _settle(self, group: dict[str, Any], bucket: Bucket, length: float) -> None:
        bucket.moved = 0.0  # every step has measured X^H X - I
        if group["precision"] == "fast":
            return
        target = 0.3 * rounding_limit(bucket.params[0].shape[-1], bucket.params[0].dtype)
        left = math.inf
        while left > target:
            left = 0.75 * self._polish(bucket) ** 2
