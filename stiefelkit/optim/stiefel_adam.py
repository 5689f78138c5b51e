"""Adam on the Stiefel manifold, entry by entry, with a momentum that stays in the tangent bundle by itself."""

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, norms_of, riemannian_gradient
from stiefelkit.functional._arithmetic.norms import Norms
from stiefelkit.functional._arithmetic.product import plus_product
from stiefelkit.functional._packing import minus_adjoint
from stiefelkit.optim.batch import Bucket, Group
from stiefelkit.optim.settings import BETAS, OF_FREE, RATE, SHARED, SWITCH, WEIGHT_DECAY, Setting, at_least
from stiefelkit.optim.steps import ROUNDING, as_factor, corrections, in_units, metric_of, rate
from stiefelkit.optim.stiefel_sgd import SplitOptimizer, TangentWithMomentum, turned


class StiefelAdam(SplitOptimizer):
    r"""Adam for frames with a second moment of every entry of the momentum's two parts.

    The momentum :math:`W Y + V` is that of `StiefelSGD`, dampened: :math:`Y ← b_1 Y + (1 - b_1) (W^H G - G^H W)` and V
    alike. Its entries are divided by the roots of means of their squares plus eps, both corrected as in Adam; Y stays
    skew by that, and V is projected on the complement of W. Along what comes of it the frame goes as in `StiefelSGD`,
    which takes the momentum along. Complex entries count by their moduli. What cannot be told from rounding is zero:
    entries of :math:`W^H G - G^H W` and of V up to :math:`4 eps ‖G‖`, and steps of entries whose root mean square is no
    larger. Other groups are moved by torch.optim.Adam.

    A step changes each of the entries by about lr, and so is about :math:`lr √{p (n - p / 2)}` long, where that of
    `CayleyAdam` is lr: rates are smaller by that. It depends on the basis, as Adam does.

    References:
        Kong, Wang, Tao, Momentum Stiefel optimizer, with applications to suitably-orthogonal attention, and optimal
        transport, ICLR 2023.
    """

    free_optimizer = torch.optim.Adam
    buffer = "exp_avg"

    settings = (
        Setting("lr", 1e-3, RATE, "learning rate; about what each entry changes by at each step."),
        Setting("betas", (0.9, 0.99), BETAS, "decays (b1, b2) of the two moments."),
        Setting("eps", 1e-8, at_least(0), "added to the roots of second moments."),
        WEIGHT_DECAY,
        Setting("amsgrad", False, SWITCH, OF_FREE),
        *SHARED,
    )
    examples = ({}, {"betas": (0.0, 0.999), "precision": "fast"}, {"amsgrad": True})

    def direction(self, group: Group, bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        metric = metric_of(group)
        betas, on_host = group["betas"], bucket.may_sync_host
        before = bucket.state("exp_avg")
        if on_host or w.shape[-2] != w.shape[-1]:
            gradient, momentum = (riemannian_gradient(w, m, metric) for m in (g, before))
        else:  # of which no norm is asked for
            gradient, momentum = (Tangent(minus_adjoint(w.mH @ m), None, [], []) for m in (g, before))
            if metric == "euclidean":
                gradient.rotation *= 0.5
                momentum.rotation *= 0.5
        most = torch.finfo(w.dtype).max
        norms = zip(gradient.rotation_norms, gradient.rest_norms, strict=True)
        if on_host and not all([o * o + r * r < most for o, r in norms]):
            raise OverflowError
        # Noise would come out as large as anything else: of G, and of what products with W make of the momentum.
        noise = _rounding(g) if on_host else bucket.gradient_norms()[0].view(*w.shape[:-2], 1, 1) * _share(w)
        gradient.rotation = gradient.rotation * (gradient.rotation.abs() > noise)
        if gradient.rest is not None:
            gradient.rest = gradient.rest * (gradient.rest.abs() > noise)
        noise = torch.maximum(noise, _rounding(before))
        momentum.rotation = bucket.mixed(momentum.rotation, gradient.rotation, betas[0])
        if momentum.rest is not None and gradient.rest is not None:
            momentum.rest = bucket.mixed(momentum.rest, gradient.rest, betas[0])
        steps, roots = corrections(bucket, betas, rate(group))
        roots = as_factor(roots, w)

        def divided(key: str, moment: Tensor, part: Tensor, of_columns: bool = False) -> Tensor:
            squares = bucket.state(key, is_real=True, of_columns=of_columns)
            if on_host or part.is_complex():
                squares = squares.mul(betas[1]).add_(part.abs().square_(), alpha=1 - betas[1])
            else:
                squares = torch.lerp(part.square(), squares, betas[1])
            bucket.stage(key, squares)
            root = squares.sqrt() * roots
            return torch.where(root > noise, moment / root.add(group["eps"]), 0.0)

        if momentum.rest is None or gradient.rest is None:
            rotation = divided("exp_avg_sq", momentum.rotation, gradient.rotation)
            (norms,) = norms_of(rotation)
            return TangentWithMomentum(rotation, None, norms, [0.0] * len(norms), momentum=momentum), steps
        rotation = divided("rotation_sq", momentum.rotation, gradient.rotation, of_columns=True)
        rest = divided("exp_avg_sq", momentum.rest, gradient.rest)
        s = w.mH @ rest
        rest = plus_product(rest, w, s, -1)
        along, steps = in_units(
            w, TangentWithMomentum(rotation, rest, *norms_of(rotation, rest, s), momentum=momentum), steps
        )
        along.rest, momentum.rest = turned(group, along, steps, along.rest, momentum.rest)
        return along, steps


def _rounding(x: Tensor) -> Tensor:
    """Returns what rounding leaves of an entry of the tangent part of each matrix, (*, 1, 1)."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) * _share(x)


def _share(x: Tensor) -> float:
    return ROUNDING * torch.finfo(x.dtype).eps
