"""Landing: along the tangent space and towards the manifold at once, and onto it as often as is asked for."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.errors import NotAFrameError
from stiefelkit.functional import norms_of
from stiefelkit.functional._arithmetic.product import plus_product
from stiefelkit.metrics import defect as defect_of
from stiefelkit.optim.batch import Bucket, Group
from stiefelkit.optim.checks import not_finite
from stiefelkit.optim.frame_optimizer import FrameOptimizer
from stiefelkit.optim.settings import MOMENTUM, OF_ADAM, RATE, SHARED, Setting, at_least, integer
from stiefelkit.optim.steps import (
    LARGEST,
    ROUNDING,
    as_factor,
    count_steps,
    divided,
    fit_float32_range,
    is_still,
    land,
    landed_along,
    metric_of,
    rate,
    units_of,
)

FURTHEST = 0.5  # ||W^H W - I||_F that no step goes beyond
_POLISHES = 6  # from there they leave 0.19, 0.03, 6e-4, 3e-7, 6e-14 and nothing


class Landing(FrameOptimizer):
    r"""Descends without a retraction, by products only: :math:`W ← W - a F`.

    :math:`F = T + attraction W E` with :math:`E = W^H W - I`. :math:`T = G W^H W - W G^H W`, tangent to the set of all
    matrices with this :math:`W^H W`, is the Riemannian gradient at a frame, and :math:`W E`, normal to that set, the
    gradient of :math:`‖E‖_F^2 / 4`: one goes downhill, the other home. The step a is the rate, or less, so that
    :math:`‖E‖_F` stays below 1/2: with :math:`d = ‖E‖_F`, :math:`b = attraction d (1 - d)` and :math:`f = ‖F‖_F`,
    :math:`a = min(lr, (b + (b^2 + f^2 (1/2 - d))^{1/2}) / f^2, 1 / (2 attraction))`. The papers have half of this T: a
    rate of theirs is half as large here, and attraction twice.

    Every step ends with Newton steps back that take E away, to the rounding limit, as those of `POGO`, and attraction
    has nothing to do. With every=k that is done after each k-th step only, which is the published algorithm (k
    infinite): it saves three products of seven, and in between W is not a frame, but as near to one as :math:`‖E‖_F <
    1/2` says. Code that reads the weight gets it so; saving or copying its module lands it first. End, and save, at
    a multiple of k. In "stiefel:euclidean" the part of T within the columns of W counts half. Other groups are moved by
    torch.optim.Adam.

    References:
        Ablin, Peyre, Fast and accurate optimization on the orthogonal manifold without retraction, AISTATS 2022.
        Ablin, Vary, Gao, Absil, Infeasible deterministic, stochastic, and variance-reduction algorithms for
        optimization under orthogonality constraints, JMLR 2024.
    """

    free_optimizer = torch.optim.Adam

    settings = (
        Setting("lr", 1e-3, RATE, "learning rate."),
        Setting("momentum", 0.0, MOMENTUM, "factor of the last direction, projected on each tangent space."),
        Setting("attraction", 1.0, at_least(0), "how strongly the manifold pulls, where steps do not end on it."),
        Setting("every", 1, integer(1), "steps from one landing to the next; above 1, W is not a frame in between."),
        *OF_ADAM,
        *SHARED,
    )
    examples = ({}, {"momentum": 0.5, "precision": "fast"}, {"momentum": 0.9, "amsgrad": True})
    steady: ClassVar = {"momentum": 0.0}

    def move(self, group: Group, bucket: Bucket) -> None:
        """See `FrameOptimizer`."""
        who, on_host = type(self).__name__, bucket.may_sync_host
        w, attraction = bucket.w, group["attraction"] if group["every"] > 1 else 0.0
        off, g = defect_of(w), -bucket.g if group["maximize"] else bucket.g
        if group["momentum"]:
            g = g.add(bucket.state("momentum_buffer"), alpha=group["momentum"])
        s = w.mH @ g
        if group["momentum"]:
            bucket.stage("momentum_buffer", plus_product(g, w, s + s.mH, -0.5))
        field = _field(group, w, g, s, off, attraction * off if on_host or attraction else None)
        distances, lengths, normal = norms_of(off, field, s)
        size, most = ([sum(lengths)], torch.finfo(w.dtype).max ** 0.5) if on_host else (lengths, LARGEST)
        bucket.require_at_most(size, most, lambda: not_finite(who, [bucket]))
        bucket.require_at_most(
            distances,
            FURTHEST + 1e-3,
            lambda: NotAFrameError(
                f"{who} needs matrices near frames, got one with ||W^H W - I||_F = {max(distances):.2g}: it was "
                "changed from outside; assign a frame with sk.assign_."
            ),
        )
        counts = count_steps(bucket)
        bucket.accumulated_error = 0.0
        if is_still(group, bucket):
            return
        noise, lr = ROUNDING * torch.finfo(w.dtype).eps * w.shape[-1] ** 0.5, rate(group)
        each = [(d, f, noise * x) for d, f, x in zip(distances, lengths, normal, strict=True)]
        if on_host:
            steps = [_safe(float(lr), d, f, attraction, x) for d, f, x in each]
        else:
            steps = [_safe_on_device(lr, d, f, attraction, x) for d, f, x in each]
        if on_host and not fit_float32_range(steps):
            units = units_of(lengths)
            g = divided(g, units)
            s = w.mH @ g
            field = _field(group, w, g, s, off, divided(attraction * off, units))
            every = zip(units, distances, *norms_of(field, s), strict=True)
            steps = [_safe(float(lr) * u, d, f, attraction / u, noise * x) for u, d, f, x in every]
        if not on_host and group["every"] == 1 and landed_along(bucket, field, steps, _POLISHES):
            return
        bucket.add(field * (-as_factor(steps, w)))
        # A frame without a gradient in some of the steps has a count of its own.
        turns = [(k % group["every"] == 0) * 1.0 for k in counts] if group["every"] > 1 else [1.0]
        if not on_host or any(turns):
            lands = as_factor(turns, w)
            land(bucket, group["precision"], _POLISHES, lands=lands if isinstance(lands, Tensor) else None)


def _field(group: Group, w: Tensor, g: Tensor, s: Tensor, off: Tensor, pull: Tensor | None) -> Tensor:
    """F of frames with W^H W - I = `off`, of G and S = W^H G; `pull` is `off` times attraction, None for 0."""
    within = s.mH if metric_of(group) == "canonical" else (s + s.mH) / 2
    field = plus_product(g, g, off)
    return plus_product(field, w, within, -1) if pull is None else plus_product(field, w, pull - within)


def _safe(lr: float, d: float, f: float, attraction: float, noise: float) -> float:
    """Returns a step that stays near the manifold, of a field of norm f at the distance d; 0 of no field.

    By 2 a of the noise, the rounding of a field that is not tangent, it goes further than a tangent one would.
    """
    pull = attraction * d * (1 - d) - noise
    if f == 0:
        return 0.0
    room = max(FURTHEST - d, 0.0)
    root = math.hypot(pull, f * math.sqrt(room))
    lr = min(lr, (pull + root) / f / f if pull > 0 else room / (root - pull) if root > pull else lr)
    return min(lr, 0.5 / attraction) if attraction else lr


def _safe_on_device(lr: float | Tensor, d: Tensor, f: Tensor, attraction: float, noise: Tensor) -> Tensor:
    """Returns the same of all matrices of a batch."""
    room = (FURTHEST - d).clamp(min=0)
    if not attraction:  # F = 0 is as short after any step
        return (room / (torch.hypot(noise, f * room.sqrt()) + noise)).clamp(max=lr)
    pull = attraction * d * (1 - d) - noise
    root = torch.hypot(pull, f * room.sqrt())
    longest = torch.where(pull > 0, (pull + root) / f / f, room / (root - pull))
    return torch.where(f > 0, longest, 0.0).clamp(max=lr).clamp(max=0.5 / attraction)
