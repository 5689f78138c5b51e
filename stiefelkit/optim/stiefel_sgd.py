"""SGD on the Stiefel manifold with a momentum that stays in the tangent bundle by itself."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, riemannian_gradient
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.optim.base.batch import Bucket
from stiefelkit.optim.settings import MOMENTUM, OF_SGD, RATE, SHARED, Setting
from stiefelkit.optim.split import SplitOptimizer, turned
from stiefelkit.optim.steps import in_units, rate


class StiefelSGD(SplitOptimizer):
    r"""SGD whose momentum is a velocity on the manifold: no projection, no transport, and none of it is lost.

    The momentum :math:`W Y + V`, Y skew and :math:`W^H V = 0`, gets the Riemannian gradient, :math:`Y ← momentum Y +
    W^H G - G^H W` and :math:`V ← momentum V + G - W W^H G`. The frame goes within its columns first, :math:`W_1 = W
    cay(-lr Y)`, then out of them, :math:`W ← (W_1 - lr V) (I + lr^2 V^H V)^{-1/2}`, and :math:`V ← (V + lr W_1 V^H V)
    (I + lr^2 V^H V)^{-1/2}`, as the equations of motion have it: without gradients, at momentum 1, the frame goes along
    a geodesic. The last factor is not published, and 1 to first order: with it V keeps its length, without it long
    steps feed on themselves. In "stiefel:euclidean" Y gets half as much, and V turns against Y, where in the authors'
    code it turns with Y. Other groups are moved by torch.optim.SGD.

    `CayleySGD` projects its momentum instead: cheaper, and the same to first order.

    References:
        Kong, Wang, Tao, Momentum Stiefel optimizer, with applications to suitably-orthogonal attention, and optimal
        transport, ICLR 2023; the factor of V Y, 2 a - 1 (a = 0 in the Euclidean metric, 1/2 in the canonical one), is
        that of the Euler-Lagrange equations, where the authors' code has 1 - 3 a / 2.

    >>> import stiefelkit as sk
    >>> layer = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "stiefel")
    >>> optimizer = StiefelSGD(sk.optim.parameter_groups(layer, lr=0.1))
    >>> layer(torch.ones(4)).square().sum().backward()
    >>> optimizer.step()
    """

    plain = torch.optim.SGD

    settings = (
        Setting("lr", 1e-2, RATE, "learning rate."),
        Setting("momentum", 0.9, MOMENTUM, "factor of the last direction."),
        *OF_SGD,
        *SHARED,
    )
    examples = ({}, {"momentum": 0.0, "precision": "fast"}, {"nesterov": True})
    steady: ClassVar = {"momentum": 0.0}

    def direction(self, group: dict[str, Any], bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        """See `TangentOptimizer`."""
        if group["momentum"]:
            g = g.add(bucket.state("momentum_buffer"), alpha=group["momentum"])
        along = riemannian_gradient(w, g, group["manifold"].partition(":")[2])
        along, steps = in_units(w, along, [rate(group)] * len(along.rotation_norms))
        (along.rest,) = turned(group, along, steps, along.rest)
        return along, steps
