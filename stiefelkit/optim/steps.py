"""The engine of the optimizers: steps along tangent vectors, how long they are, and what rounding does to frames.

An optimizer says along which tangent vector frames go, and how far, in `TangentOptimizer.direction`; all else is here.
"""

import functools
import math
import operator
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.errors import NonFiniteError, NotAFrameError, OptimizerError, RankError
from stiefelkit.functional import Tangent, cayley_increment, nearest_frame, norms_of, riemannian_gradient
from stiefelkit.functional._arithmetic.devices import may_sync_host
from stiefelkit.functional._arithmetic.norms import Norms, probes
from stiefelkit.functional._arithmetic.product import plus_product
from stiefelkit.functional._cayley.quotient import SHORT
from stiefelkit.functional._kernels.launch import adam_in_one, frame_step, takes
from stiefelkit.functional._polar import rounded_defect
from stiefelkit.metrics import defect as defect_of
from stiefelkit.metrics import working_dtype
from stiefelkit.optim.batch import EXTERNAL_CHANGE, Bucket, Group, limit_of
from stiefelkit.optim.checks import not_finite, too_long
from stiefelkit.optim.frame_optimizer import FrameOptimizer

__all__ = [
    "CayleyStep", "Retraction", "TangentOptimizer", "adam_scales", "as_factor", "bounded_steps", "corrections",
    "count_steps", "fit_float32_range", "gradient_with_momentum", "have_squares", "inverse", "metric_of", "rate",
    "shares", "step_length_and_error",
]  # fmt: skip

PROMISED = {"exact": 2.0, "fast": 30.0, "float64": 20.0}
"""Largest ||W^H W - I||_F after any step, in rounding limits; below p = 16 one eps more. "float64" in both."""
LEAP_ABOVE = 100.0
"""Accumulated error above which a step is made in float64: one polish takes away a defect of some 800 limits."""
LARGEST = torch.finfo(torch.float64).max
"""Norm up to which a direction that is not read counts as finite."""
ROUNDING = 4.0
"""Bound of the rounding in the tangent part of a gradient, over eps sqrt(p) and its norm; of an entry, over eps."""
_LONGEST = 2.0  # length of a step over sqrt(p) above which it is made in float64
_MAX_POLISHES = 3  # polishes that take any defect below `EXTERNAL_CHANGE` to the rounding limit
_MOST = 2.8  # error that a step of frames with a remainder may leave, over the threshold for a polish; else 2
_THRESHOLD = {"exact": 0.6, "fast": 5.0}
"""Accumulated error from which the next increment takes it away, if it would leave more than `_MOST`."""
_THRESHOLD_OF_SMALL = {"exact": 0.07, "fast": 1.0}
"""The same over sqrt(p), up to twice that for tall frames: small frames of few columns turn far by short steps."""
_ROUNDS = {"exact": 8, "fast": 16}  # steps after which a polish comes at the latest, if there is no remainder
_ROUNDS_OF_SMALL = 6  # the same of frames of fewer than 32 rows
_SMALLEST_PROBED = 128  # columns from which an estimate of what is left of a defect costs little beside the defect
_ORDINARY = 2.0**24
"""Factor of a direction up to which, and from whose inverse on, fourth powers of one that makes a step of length 1 stay
in the range of float32."""


class Retraction(ABC):
    """Moves a frame along a tangent vector, and polishes the result.

    W + increment is a frame but for rounding in proportion to the increment; `finish` takes away what else is left of
    :math:`W^H W - I`. Derive from this class, not from `CayleyStep`, whose other methods speak of its own increment.
    """

    polishes: ClassVar[int] = 1
    """Polishes after a step of length :math:`√p`, where no value can be read to count them."""
    sums_are_short: ClassVar[bool] = False
    """True if increments are products in sums of at most 64 terms, which round less (`rounding_of_step`)."""

    @abstractmethod
    def increment(self, group: Group, w: Tensor, direction: Tangent, steps: Norms, defect: Tensor | None) -> Tensor:
        """Returns what is added to W, shape (*, n, p).

        `direction` and `steps` are what `TangentOptimizer.direction` gives; a defect, if given, is taken away as well.
        """

    def leap(self, w: Tensor, direction: Tangent, steps: Norms) -> Tensor:
        """Returns what is added to exact frames, in float64 or complex128, where a step is no small increment.

        The frame nearest to that is taken.
        """
        return cayley_increment(w, direction, as_factor(steps, w))

    def landed(self, bucket: Bucket, direction: Tangent, steps: Norms) -> bool:
        """Tries to do a step and its polishes, where no value is read, by one launch; False where it takes several."""
        return False

    def finish(self, group: Group, bucket: Bucket, length: float) -> None:
        """Polishes after an increment of some length what cannot wait for the next increment to take it away."""
        if not bucket.may_sync_host:
            land(bucket, group["precision"], self.polishes)
            return
        threshold = polish_threshold(*bucket.params[0].shape[-2:], group["precision"])
        if bucket.accumulated_error <= threshold * (_MOST if bucket.lo is not None else 2):
            return
        for _ in range(_MAX_POLISHES):
            polish(bucket)
            if bucket.accumulated_error == 0:
                return


class CayleyStep(Retraction):
    """Moves frames by the Cayley transform."""

    sums_are_short = True

    def increment(self, group: Group, w: Tensor, direction: Tangent, steps: Norms, defect: Tensor | None) -> Tensor:
        return cayley_increment(w, direction, as_factor(steps, w), defect=defect)

    def landed(self, bucket: Bucket, direction: Tangent, steps: Norms) -> bool:
        if direction.rest is not None or bucket.w.shape[-2] != bucket.w.shape[-1]:
            return False
        return landed_along(bucket, direction.rotation, steps, self.polishes, "cayley")


class TangentOptimizer(FrameOptimizer):
    """Moves frames along tangent vectors; a subclass says along which and how far, in `direction`.

    A step adds an increment to W. In precision "exact" a float32 or complex64 frame has a remainder `lo` of the same
    dtype in the optimizer's state, and :math:`W + lo` is what moves; increments are rounded as they are small. What
    their rounding leaves of :math:`W^H W - I` is computed in float64 before an error model says that it may come to
    more than 1.7 rounding limits, and is taken away with that increment. So :math:`‖W^H W - I‖_F` stays within 2
    rounding limits, however many steps are taken. "fast" has no remainder, does this at 5 limits, after 16 steps at
    most, and stays within 30. float64 and complex128 frames have no remainder; "exact" polishes them every 8 steps at
    least, and both keep them within 20 limits. Of fewer than 32 rows, what has no remainder is polished after 6 steps
    at most. To each of these bounds comes one eps below 16 columns. On devices whose values are not read, and with
    `capturable=True`, every step ends with a polish, and steps longer than :math:`√p` are shortened to it.
    """

    retraction: ClassVar[Retraction] = CayleyStep()
    """The retraction that moves a frame along its tangent vector."""

    @abstractmethod
    def direction(self, group: Group, bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, Norms]:
        """Returns a tangent vector, and how far against it each matrix of the batch goes; stages what it keeps.

        w and g, of shape (*, n, p), are the frames and the gradients of the objective that is minimized. May raise
        OverflowError where a square overflows; nothing is written then.
        """

    def transport(
        self, group: Group, bucket: Bucket, direction: Tangent, steps: Norms, w: Tensor, **to: Tensor
    ) -> None:
        """Stages what goes along to W + `increment`, to where W has `leapt`, or else to W; here nothing."""

    def move(self, group: Group, bucket: Bucket) -> None:
        w, g = bucket.w, -bucket.g if group["maximize"] else bucket.g
        try:
            direction, steps = self.direction(group, bucket, w, g)
            if bucket.may_sync_host and not have_squares(direction, w.dtype):
                raise OverflowError
        except OverflowError:
            raise not_finite(type(self).__name__, [bucket]) from None
        lr = group["lr"]
        if (lr == 0) if lr.__class__ is float else is_still(group, bucket):  # it must not so much as polish
            if not bucket.may_sync_host:
                bucket.require_at_most(direction.norms("euclidean"), LARGEST, AssertionError)
            self.transport(group, bucket, direction, steps, w)
        elif bucket.may_sync_host:
            self._move_on_host(group, bucket, w, direction, steps)
        else:
            self._move_on_device(group, bucket, w, direction, steps)

    def _move_on_device(self, group: Group, bucket: Bucket, w: Tensor, direction: Tangent, steps: Norms) -> None:
        (lengths,), longest = direction.norms("euclidean"), math.sqrt(w.shape[-1])
        bucket.require_at_most([lengths], LARGEST, AssertionError)
        steps = [(longest / lengths).clamp(max=steps[0])]
        if not self.retraction.landed(bucket, direction, steps):
            self._increment(group, bucket, w, direction, steps, None)
            self.retraction.finish(group, bucket, longest)
        elif type(self).transport is not TangentOptimizer.transport:
            self.transport(group, bucket, direction, steps, w, leapt=bucket.w)

    def _move_on_host(self, group: Group, bucket: Bucket, w: Tensor, direction: Tangent, steps: Norms) -> None:
        precision, (n, p) = group["precision"], w.shape[-2:]
        with_remainder = precision == "exact" and bucket.is_narrow
        if not fit_float32_range(steps):
            direction, steps = in_units(w, direction, steps)
        is_short = with_remainder and self.retraction.sums_are_short
        model = rounding_of_step(n, p, w.dim() == 2) if is_short else (1.0, 1.0)
        length, added, grown = step_length_and_error(direction, steps, model)
        if not math.isfinite(length + sum(direction.rest_norms)):
            raise too_long(type(self).__name__, group, bucket, length)
        if length > _LONGEST * math.sqrt(p) or added > LEAP_ABOVE:
            self._leap(group, bucket, w, direction, steps, length)
            return
        defect, before, threshold = None, bucket.accumulated_error * grown, polish_threshold(n, p, precision)
        if before >= threshold and (not with_remainder or before + added > _MOST * threshold):
            defect, norm, before = measured(bucket)
            if not norm <= EXTERNAL_CHANGE * math.sqrt(p):
                raise NotAFrameError(
                    f"{type(self).__name__} needs frames, got one with ||W^H W - I||_F = {norm:.2g}: it was changed "
                    "from outside; assign a frame with sk.assign_."
                )
            before += left_behind(defect, norm, direction, steps) / limit_of(p, w.dtype)
        self._increment(group, bucket, w, direction, steps, defect)
        if not with_remainder:  # so that a polish comes in time
            added = max(added, threshold / ((_ROUNDS[precision] if n >= 32 else _ROUNDS_OF_SMALL) - 0.5))
        bucket.accumulated_error = before + added
        self.retraction.finish(group, bucket, length)

    def _increment(
        self, group: Group, bucket: Bucket, w: Tensor, direction: Tangent, steps: Norms, defect: Tensor | None
    ) -> None:
        """Adds the retraction's increment."""
        increment = self.retraction.increment(group, w, direction, steps, defect)
        if increment.shape != w.shape:  # which would be broadcast
            raise OptimizerError(
                f"{type(self.retraction).__name__}.increment needs to return a tensor of shape {tuple(w.shape)}, got "
                f"{tuple(increment.shape)}."
            )
        bucket.add(increment)
        if type(self).transport is not TangentOptimizer.transport:
            self.transport(group, bucket, direction, steps, w, increment=increment)

    def _leap(self, group: Group, bucket: Bucket, w: Tensor, direction: Tangent, steps: Norms, length: float) -> None:
        """Makes a step that is no small increment: in float64, to the nearest frame."""
        wide, lo = working_dtype(w.dtype), bucket.lo
        exact = nearest_frame(w.to(wide) if lo is None else w.to(wide) + lo)
        rest = None if direction.rest is None else direction.rest.to(wide)
        if rest is not None:
            rest = rest - exact @ (exact.mH @ rest)
        tangent = Tangent(direction.rotation.to(wide), rest, direction.rotation_norms, direction.rest_norms)
        try:
            leapt = nearest_frame(exact + self.retraction.leap(exact, tangent, steps))
        except (NonFiniteError, RankError):  # not finite, or many frames are equally near
            raise too_long(type(self).__name__, group, bucket, length) from None
        self.transport(group, bucket, direction, steps, w, leapt=leapt)
        if not bucket.is_finite():
            raise too_long(type(self).__name__, group, bucket, length)
        bucket.assign(leapt)
        bucket.accumulated_error = 0.0


def metric_of(group: Group) -> str:
    """Returns the metric of a group of frames, "canonical" or "euclidean"."""
    return group["manifold"].partition(":")[2]


def rate(group: Group) -> float | Tensor:
    """Returns the learning rate of a group; a tensor that lives on a device stays there."""
    lr = group["lr"]
    return lr if isinstance(lr, Tensor) and not may_sync_host(lr) else float(lr)


def is_still(group: Group, bucket: Bucket) -> bool:
    """Returns whether the rate is known to be zero, as `torch.distributed.checkpoint` has it for the states alone."""
    lr = group["lr"]
    return (bucket.may_sync_host or not isinstance(lr, Tensor)) and float(lr) == 0


def gradient_with_momentum(group: Group, bucket: Bucket, w: Tensor, g: Tensor) -> Tangent:
    """Returns the Riemannian gradient of momentum M + G, and stages it as the next M, if the group has a momentum."""
    metric, momentum = metric_of(group), group["momentum"]
    if momentum:
        g = g.add(bucket.state("momentum_buffer"), alpha=momentum)
    direction = riemannian_gradient(w, g, metric)
    if momentum:
        bucket.stage("momentum_buffer", direction.covector(w, metric))
    return direction


def adam_scales(bucket: Bucket, g: Tensor, betas: tuple[float, float], eps: float, *, is_inside: bool = False) -> Norms:
    """Stages the next count of steps and second moments, and returns the factor of each matrix's first moment.

    With :math:`v ← b_2 v + (1 - b_2) ‖G‖^2`, which raises OverflowError where it is read and not finite, that is
    :math:`1 / ((1 - b_1^k) ((v / (1 - b_2^k))^{1/2} + eps))`, eps under the root if it is inside.
    """
    (first, second), (inner, outer) = betas, (eps, 0.0) if is_inside else (0.0, eps)
    dtype, moments = bucket.dtype.to_real(), bucket.numbers("exp_avg_sq")
    if bucket.may_sync_host:
        squares = []
        for v, x in zip(moments.tolist(), norms_of(g)[0], strict=True):
            squares.append(second * v + (1 - second) * x * x)
            if not squares[-1] < torch.finfo(dtype).max:  # also for NaN
                raise OverflowError
        bucket.stage("exp_avg_sq", torch.tensor(squares, dtype=dtype, device=bucket.params[0].device))
    else:
        norms = bucket.gradient_norms()[0]
        seen = norms, moments, inner, outer
        found = adam_in_one(bucket.numbers("step", of_frames=True), betas, seen, bucket.matrices)
        if found is not None:
            bucket.stage("step", found[0])
            bucket.stage("exp_avg_sq", found[1])
            return [found[2]]
        squares = [second * moments + (1 - second) * norms.square()]
        bucket.stage("exp_avg_sq", squares[0])
    counted = zip(count_steps(bucket), squares, strict=True)
    return [inverse((1 - first**k) * ((v / (1 - second**k) + inner) ** 0.5 + outer)) for k, v in counted]


def corrections(bucket: Bucket, betas: tuple[float, float], lr: float | Tensor) -> tuple[Norms, Norms]:
    """Stages the next count of steps; returns :math:`lr / (1 - b_1^k)` and :math:`(1 - b_2^k)^{-1/2}` of matrices."""
    if not bucket.may_sync_host and isinstance(lr, float):
        found = adam_in_one(bucket.numbers("step", of_frames=True), betas, None, bucket.matrices, lr)
        if found is not None:
            bucket.stage("step", found[0])
            return [found[2]], [found[1]]
    ks = count_steps(bucket)
    return [lr / (1 - betas[0] ** k) for k in ks], [(1 - betas[1] ** k) ** -0.5 for k in ks]


def count_steps(bucket: Bucket) -> Norms:
    """Stages the next count of steps, and returns it for each matrix of the batch: where none is read, a tensor."""
    matrices = bucket.matrices
    if not bucket.may_sync_host:
        after = bucket.numbers("step", of_frames=True) + 1
        bucket.stage("step", after)
        return [(after if matrices == 1 else after.repeat_interleave(matrices)).double()]
    counts = []
    for state in bucket.states:
        counts.append(int(state.get("step", 0)) + 1)  # a tensor where none was read before
    bucket.stage("step", counts)
    return counts if matrices == 1 else [k for k in counts for _ in range(matrices)]


def inverse(x: float | Tensor) -> float | Tensor:
    """Returns 1 / x, and 0 where nothing has been measured yet."""
    if isinstance(x, Tensor):
        return torch.where(x > 0, x.reciprocal(), 0.0)
    return 1 / x if x > 0 else 0.0


def bounded_steps(norms: Norms, scales: Norms, lr: float | Tensor, q: float) -> Norms:
    """Returns steps :math:`min(lr, 2 q / ‖A‖_F)` along a direction whose generators have these norms, times its scales.

    They are factors of the unscaled direction. Where its norm is too small to be told from zero, nothing moves.
    """
    if q == math.inf and isinstance(lr, float) and not isinstance(scales[0], Tensor):
        return [scale * lr for scale in scales]
    if q == math.inf and isinstance(scales[0], Tensor):
        return [scales[0] * lr]
    scaled = [*map(operator.mul, scales, norms)]
    return [*map(operator.mul, scales, shares(scaled, 2 * q, lr))]


def shares(norms: Norms, bound: float, most: float | Tensor) -> Norms:
    """Returns min(most, bound / norm) of each norm, and 0 of those that are 0."""
    if isinstance(norms[0], Tensor):
        taken = bound / norms[0]
        if not isinstance(most, Tensor) and most == math.inf:
            return [torch.where(norms[0] > 0, taken, 0.0)]
        return [taken.clamp(max=most)]
    taken = []
    for norm in norms:
        taken.append(min(most, bound / norm) if norm > 0 else 0.0)
    return taken


def as_factor(steps: Norms, like: Tensor) -> float | Tensor:
    """Returns one number if all are the same, else a tensor (*, 1, 1)."""
    if isinstance(steps[0], Tensor):
        return steps[0].to(like.real.dtype).view((1, 1) if like.dim() == 2 else (-1, 1, 1))
    if len(set(steps)) == 1:
        return steps[0]
    return torch.tensor(steps, dtype=like.real.dtype, device=like.device)[:, None, None]


def landed_along(
    bucket: Bucket, direction: Tangent | Tensor, steps: Norms, turns: int, way: str = "go", most: float = 0.0
) -> bool:
    """Does a step and its polishes by one launch, a `frame_step`, where that is possible."""
    w, step = bucket.w, steps[0]
    if not bucket.is_narrow or not takes(w, w.shape[-2], 1 + w.is_complex()):
        return False
    lo = torch.zeros_like(w) if bucket.lo is None else bucket.lo
    field = direction if isinstance(direction, Tensor) else direction.vector(w)
    return bucket.land(*frame_step(w, lo, field, step if w.dim() > 2 else step[0], turns, way, most))


def step_length_and_error(
    direction: Tangent, steps: Norms, rounding: tuple[float, float] = (1.0, 1.0)
) -> tuple[float, float, float]:
    """Returns the Frobenius norm of the longest of the increments, to first order, and what it does to rounding errors.

    That is what it adds, in rounding limits, the most of a batch, and by what it multiplies those that there are, at
    most. `rounding` has the limits that a unit of length within the columns of W adds, and one out of them.
    """
    longest, added, grown, (within, beyond) = 0.0, 0.0, 1.0, rounding
    along = direction.along_norms or [0.0] * len(steps)
    for t, o, r, s in zip(steps, direction.rotation_norms, direction.rest_norms, along, strict=True):
        length = t * math.hypot(o, r)
        if not (length <= longest or longest != longest):  # a NaN stays
            longest = length
        if not r:
            added = max(added, t * within * o * max(1.0, 0.5 * t * o))
            continue
        added = max(added, t * math.hypot(within * o, beyond * r, s) * max(1.0, 0.5 * t * (o + 0.5 * t * r * r)))
        grown = max(grown, 1 + 2 * t * s)
    return longest, added, grown


def have_squares(direction: Tangent, dtype: torch.dtype) -> bool:
    """Returns whether the squares of a direction's norms are finite in a dtype; not where one is NaN."""
    size = sum(direction.rotation_norms) + sum(direction.rest_norms)
    return size * max(direction.units, default=1.0) < torch.finfo(dtype).max ** 0.5


def fit_float32_range(steps: Norms) -> bool:
    """Returns whether factors are 0 or of a size that leaves powers of directions in the range of their dtype."""
    if 1 / _ORDINARY < min(steps) and max(steps) < _ORDINARY:
        return True
    return all([1 / _ORDINARY < t < _ORDINARY or t == 0 for t in steps])


def units_of(norms: Norms) -> Norms:
    """Returns powers of 2 of the size of norms; 1 for 0."""
    return [2.0 ** max(math.frexp(norm)[1], -1000) for norm in norms]


def divided(x: Tensor, units: Norms) -> Tensor:
    """Returns each matrix over its unit, which need not be in the range of the dtype."""
    unit = torch.tensor(units, dtype=torch.float64, device=x.device).view((-1, 1, 1) if x.dim() == 3 else (1, 1))
    return (x.to(working_dtype(x.dtype)) / unit).to(x.dtype)


def in_units(w: Tensor, direction: Tangent, steps: Norms) -> tuple[Tangent, Norms]:
    """Returns the same steps along directions of length 1 or so, in powers of 2, where factors are extreme."""
    if isinstance(direction.rotation_norms[0], Tensor) or fit_float32_range(steps):
        return direction, steps
    norms = direction.norms("euclidean")
    units = units_of(norms)
    rotation, rest = divided(direction.rotation, units), direction.rest
    if rest is not None:
        rest = divided(rest, units)
        rest = plus_product(rest, w, w.mH @ rest, -1)
    before = direction.units or [1.0] * len(units)
    scaled = replace(
        direction,
        rotation=rotation,
        rest=rest,
        rotation_norms=[o / u for o, u in zip(direction.rotation_norms, units, strict=True)],
        rest_norms=direction.rest_norms if rest is None else norms_of(rest)[0],
        along_norms=[],
        units=[u * v for u, v in zip(units, before, strict=True)],
    )
    return scaled, [t * u if norm else 0.0 for t, u, norm in zip(steps, units, norms, strict=True)]


def measured(bucket: Bucket, coarse: bool = False, lands: Tensor | None = None) -> tuple[Tensor, float, float]:
    """Returns W^H W - I, in the dtype of W if coarse, its norm, and the error that taking it away leaves."""
    defect = defect_of(bucket.w) if coarse else rounded_defect(bucket.w, bucket.lo)
    defect = defect if lands is None else defect * lands
    norm = max(norms_of(defect)[0])
    # A polish leaves 3/4 of the square.
    return defect, norm, 0.0 if norm * norm <= 0.3 * limit_of(defect.shape[-1], bucket.dtype) else math.inf


@functools.lru_cache(maxsize=64)
def rounding_of_step(n: int, p: int, is_one: bool) -> tuple[float, float]:
    """Returns the limits that a Cayley step of unit length adds: within the columns of W, and beyond them.

    Of what sums of 64 terms round in a step within the columns, 6 / sqrt(p) limits reach W^H W - I; of the rounding of
    each entry of a step beyond them 2 / sqrt(p), and that of tall frames by the share that few rows have in the span of
    W, at most 8 p / n.
    """
    within = 7.5 / math.sqrt(p) if is_one or p <= SHORT else 1.0
    return min(1.0, within), min(1.0, 4 / math.sqrt(p) * min(1.0, math.sqrt(8 * p / n)))


@functools.lru_cache(maxsize=64)
def polish_threshold(n: int, p: int, precision: str) -> float:
    """Returns the error of n x p frames that an increment takes away if there is no remainder, or if it has to."""
    return min(_THRESHOLD[precision], _THRESHOLD_OF_SMALL[precision] * math.sqrt(p) * min(2.0, math.sqrt(n / p)))


def left_behind(defect: Tensor, norm: float, direction: Tangent, steps: Norms) -> float:
    """Bounds what an increment leaves of a defect D that it takes away, ||D Y||_F; for large D by 8 rows."""
    p = defect.shape[-1]
    if p < _SMALLEST_PROBED or defect.dim() > 2:
        norms = zip(steps, direction.rotation_norms, direction.rest_norms, strict=True)
        return norm * max([t * o + 0.5 * (t * r) ** 2 for t, o, r in norms])
    rows = probes(p, defect.dtype, defect.device).mT @ (defect * steps[0])
    left = rows @ direction.rotation
    if direction.rest is not None:
        left = plus_product(left, rows @ (direction.rest.mH * steps[0]), direction.rest, 0.5)
    return 1.5 * math.sqrt(p) * norms_of(left)[0][0]


def polish(bucket: Bucket, coarse: bool = False, lands: Tensor | None = None) -> float:
    """Takes W^H W - I away of frames that `lands`, 0 or 1, chooses, and returns how large it was."""
    defect, norm, bucket.accumulated_error = measured(bucket, coarse, lands)
    bucket.add((bucket.w @ defect).mul_(-0.5))
    return norm


def land(bucket: Bucket, precision: str, turns: int, left: float = math.inf, lands: Tensor | None = None) -> None:
    """Polishes frames, at most `left` from the manifold, until they are on it, or `turns` times without reads."""
    exact, p = precision == "exact", bucket.params[0]
    if not bucket.may_sync_host:
        for turn in range(1, turns + 1):
            w = bucket.w
            defect = rounded_defect(w, bucket.lo) if exact and turn == turns else defect_of(w)
            defect = defect if lands is None else defect * lands
            if turn == turns:
                most = EXTERNAL_CHANGE * math.sqrt(p.shape[-1])
                bucket.require_at_most([torch.linalg.matrix_norm(defect)], most, AssertionError)
            bucket.add((w @ defect).mul_(-0.5))
        return
    bucket.accumulated_error = 0.0
    limit = limit_of(p.shape[-1], p.dtype)
    while left > (0.3 * limit if exact else 3 * limit):
        norm = polish(bucket, not exact, lands)
        left = 0.75 * norm * norm
