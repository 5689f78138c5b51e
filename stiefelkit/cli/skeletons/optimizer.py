"""Descent along the Riemannian gradient: an optimizer of frames to begin with."""

import torch

from stiefelkit.functional import riemannian_gradient
from stiefelkit.optim import Setting, TangentOptimizer
from stiefelkit.optim.settings import RATE, SHARED, WEIGHT_DECAY, at_least
from stiefelkit.optim.steps import rate


class Skeleton(TangentOptimizer):
    """Descends along the Riemannian gradient at a part of the rate."""

    plain = torch.optim.SGD
    settings = (
        Setting("lr", 1e-2, RATE, "learning rate."),
        Setting("damping", 0.5, at_least(0), "how much of the rate is held back."),
        WEIGHT_DECAY,
        *SHARED,
    )
    examples = ({}, {"damping": 0.0})

    def direction(self, group, bucket, w, g):
        """From frames and gradients to a tangent vector, and how far against it each matrix goes."""
        tangent = riemannian_gradient(w, g, group["manifold"].partition(":")[2])
        return tangent, [rate(group) / (1 + group["damping"])] * len(tangent.rotation_norms)
