"""The optimizer of learned rotations under its published name and call, by exact steps."""

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, norms_of
from stiefelkit.functional._arithmetic.devices import may_sync_host
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.numbers import as_python_number, optional
from stiefelkit.optim.batch import Bucket, Group
from stiefelkit.optim.settings import (
    BOUND,
    MOMENTUM,
    OF_FREE,
    OF_SGD,
    RATE,
    SHARED,
    WEIGHT_DECAY,
    Setting,
    at_least,
    one_of,
)
from stiefelkit.optim.steps import TangentOptimizer, as_factor, gradient_with_momentum, rate, shares

_ACCEPTED = replace(WEIGHT_DECAY, words=f"{OF_FREE[:-1]}; without effect on frames with stiefel=True.")


class SGDG(TangentOptimizer):
    r"""Moves rotations as the SGDG of Li et al. does, which SpinQuant and others copy: the same call, exact steps.

    :math:`W ← (I + a A / 2)^{-1} (I - a A / 2) W` with the n x n skew generator A of :math:`M ← momentum M + G`
    projected on the tangent space, and :math:`a = min(lr, 2 q / ‖A‖_1)`, :math:`‖A‖_1` the largest sum of absolute
    values in a column. That is for square frames; for tall ones the norm is the Frobenius norm, as A is not formed. In
    groups without stiefel=True torch.optim.SGD moves everything.

    What differs from the published code: the Cayley transform is exact, where five iterations of a fixed point are not;
    nothing is drawn at random, where one step in 101 takes a QR decomposition; float32 frames stay within two rounding
    limits at every step; and the momentum is kept from step to step, where the code writes it to a copy. Wide matrices
    and matrices that are no frames are refused.

    References:
        Li, Fuxin, Todorovic, Efficient Riemannian optimization on the Stiefel manifold via the Cayley transform, ICLR
        2020.
        Liu, Zhao, Fedorov, Soran, Choudhary, Krishnamoorthi, Chandra, Tian, Blankevoort, SpinQuant: LLM quantization
        with learned rotations, ICLR 2025.

    >>> rotation = torch.nn.Parameter(torch.eye(4))
    >>> optimizer = SGDG([rotation], lr=1.5, stiefel=True)
    >>> rotation.pow(4).sum().backward()
    >>> optimizer.step()
    """

    free_optimizer = torch.optim.SGD
    positional: ClassVar[int] = 8

    settings = (
        Setting("lr", 1.5, RATE, "learning rate; the published class has no default."),
        Setting("momentum", 0.0, MOMENTUM, "factor of the last direction."),
        *(setting if setting is not WEIGHT_DECAY else _ACCEPTED for setting in OF_SGD),
        Setting("stiefel", False, one_of(False, True), 'whether groups are of frames, on "stiefel:euclidean".'),
        Setting("omega", 0.0, at_least(0), "factor of a penalty: accepted, without effect on a frame."),
        Setting("grad_clip", None, optional(BOUND), "bounds :math:`‖G‖_F` of each frame; without effect as published."),
        Setting("q", 0.5, BOUND, "bounds the step of a frame, :math:`a ‖A‖_1 ≤ 2 q`; infinity for no bound."),
        *SHARED,
    )
    examples = ({}, {"grad_clip": 0.5, "q": math.inf, "precision": "fast"}, {"momentum": 0.9, "nesterov": True})
    steady: ClassVar = {"q": math.inf}

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group, one of frames if it has stiefel=True or names a manifold; see `FrameOptimizer`."""
        default = self.defaults["stiefel"]
        if isinstance(param_group, dict) and as_python_number(param_group.get("stiefel", default)) is True:
            param_group = {"manifold": "stiefel:euclidean", **param_group}
            if param_group["manifold"] is not None:
                param_group["weight_decay"] = 0.0
        super().add_param_group(param_group)

    def direction(self, group: Group, bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        clip = group["grad_clip"]
        if clip is not None:
            g = g * as_factor(shares(norms_of(g)[0], clip, 1.0), g)
        direction = gradient_with_momentum(group, bucket, w, g)
        return direction, shares(_generator_norms(direction), 2 * group["q"], rate(group))


def _generator_norms(direction: Tangent) -> Norms:
    """||A||_1 of the generators W Omega W^H of square frames, on the side where they are Omega; else ||A||_F."""
    if direction.rest is not None:
        return direction.generator_norms()
    norms = torch.linalg.matrix_norm(direction.rotation, ord=1).reshape(-1)
    return norms.tolist() if may_sync_host(norms) else [norms.double()]
