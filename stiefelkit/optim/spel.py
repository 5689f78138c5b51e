"""SPEL: spectral steepest descent and the way back, both by the matrix sign."""

from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, msign
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.functional._stiefel.spectral import split, steepest
from stiefelkit.optim.batch import Bucket, Group
from stiefelkit.optim.manifold_muon import SPECTRAL, PolarStep, averaged_gradient
from stiefelkit.optim.settings import OF_ADAM, SHARED
from stiefelkit.optim.steps import TangentOptimizer, rate


class SPEL(TangentOptimizer):
    r"""Spectral steepest descent with a linear oracle: :math:`W ← msign(W - lr msign(R))`.

    :math:`R = M - W sym(W^H M)`, with :math:`M ← momentum M + (1 - momentum) G`. For a square frame msign(R) is the
    best tangent vector, and the step that of `ManifoldMuon`. For a tall one it is none: per unit of spectral norm it
    gains about nine tenths of what the best does, to first order, at the price of one `msign`, without iterations.
    :math:`W - lr msign(R)` has full rank at any rate, since :math:`W^H msign(R)` has imaginary eigenvalues only, and
    the outer msign is done to rounding (the published code does five steps of it, which leave :math:`‖W^H W - I‖_2` at
    2e-2). Steps do not shrink with the gradient: the rate wants a schedule that ends near zero. The metric of the group
    makes no difference. Other groups are moved by torch.optim.Adam.

    References:
        Yang, Lai, Manifold constrained steepest descent, ICML 2026.
    """

    free_optimizer = torch.optim.Adam

    settings = (*SPECTRAL, *OF_ADAM, *SHARED)
    examples = ({}, {"momentum": 0.0, "precision": "fast"}, {"amsgrad": True})
    steady: ClassVar = {"momentum": 0.0}
    retraction = PolarStep()

    def direction(self, group: Group, bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        gradient = averaged_gradient(group, bucket, w, g)
        if gradient.rest is None:
            along, _ = steepest(w, gradient, 1)
        else:
            along = split(w, msign(gradient.vector(w), precision="fast"), is_tangent=False)
        return along, [rate(group)] * len(along.rotation_norms)
