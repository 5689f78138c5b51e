"""Steps where no value is read: on devices beside CPUs, which would have to be waited for, and in captured graphs.

What else depends on a number is worked out always and chosen, if it has to be, by `torch.where`: a frame goes by an
inverse and not by a series, every step ends with a polish, and one longer than sqrt(p) is shortened to that. A gradient
with NaN or infinity, or a frame that is none, cannot be an error: then nothing of a group moves, and "refused" in its
states counts that.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit._torch import copy_each
from stiefelkit.functional._polish import rounded_defect
from stiefelkit.metrics import defect as defect_of
from stiefelkit.optim.base.batch import Bucket
from stiefelkit.tensors import local_part

__all__ = ["LOST", "are_sound", "commit", "counted", "is_zero", "land_unread", "refuse", "shortened", "write"]


LOST = 0.1
"""||W^H W - I||_F over sqrt(p) from which a frame has been changed by something else than its optimizer."""


def are_sound(gradients: Sequence[Tensor]) -> Tensor:
    """Returns whether all gradients, and the squares of their norms, are finite: a tensor without dimensions."""
    sound = None
    for g in gradients:
        most = math.sqrt(torch.finfo(g.dtype).max / g.numel())
        here = torch.linalg.vector_norm(g, ord=math.inf) < most  # not where it is NaN
        sound = here if sound is None else sound & here.to(sound.device)
    assert sound is not None
    return sound


def is_zero(lr: float | Tensor) -> bool:
    """Returns whether a rate is known to be zero, as of a step for the states alone; a tensor's is not known."""
    return not isinstance(lr, Tensor) and float(lr) == 0


def counted(bucket: Bucket) -> Tensor:
    """Stages the next count of steps of every frame, and returns it for each matrix of the batch, in float64."""
    after = bucket.counts("step") + 1
    bucket.stage("step", after)
    return after.double().repeat_interleave(math.prod(bucket.params[0].shape[:-2]))


def refuse(bucket: Bucket, sound: Tensor) -> None:
    """Counts a step that is none."""
    bucket.counts("refused").add_(~sound)
    for state in bucket.states:
        state.pop("wear", None)  # as no error model is kept up here


def shortened(steps: list[Tensor], length: Tensor, longest: float) -> list[Tensor]:
    """Steps of which none is longer than permitted."""
    share = (longest / length).clamp(max=1)
    return [step * share for step in steps]


def land_unread(
    w: Tensor, lo: Tensor | None, increment: Tensor, turns: int, exact: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """W + lo + increment after so many polishes, the last one worked out in float64 if `exact`.

    Returns:
        W; lo, what it would have beyond; and whether each was near enough to a frame for that.
    """
    root = math.sqrt(w.shape[-1])
    w, lo = _sum(w, lo, increment)
    near = torch.ones((), dtype=torch.bool, device=w.device)
    for turn in range(turns):
        is_last = turn == turns - 1
        defect = rounded_defect(w, lo) if exact and is_last else defect_of(w)
        if is_last:
            near = torch.linalg.matrix_norm(defect).amax() <= LOST * root
        w, lo = _sum(w, lo, (w @ defect).mul_(-0.5))
    return w, lo, near


def _sum(w: Tensor, lo: Tensor | None, increment: Tensor) -> tuple[Tensor, Tensor | None]:
    """W + lo + increment as what rounds to the dtype, and the rest, if there was one."""
    if lo is None:
        return w + increment, None
    increment = lo + increment
    total = w + increment
    return total, increment + (w - total)


def write(bucket: Bucket, sound: Tensor, w: Tensor, lo: Tensor | None) -> None:
    """Has the frames be W, and their remainders lo, where that is sound; in place, as all that a graph writes."""
    if bucket.is_stacked:
        copy_each(bucket.params, torch.where(sound, w, bucket.frames()).reshape(-1, *bucket.params[0].shape).unbind())
    else:
        _choose(sound, bucket.scatter(w), bucket.params)
    if lo is not None:
        _choose_state(bucket, sound, "lo", lo)


def commit(bucket: Bucket, sound: Tensor) -> None:
    """Writes what was staged, where that is sound."""
    for key, value in bucket.taken():
        assert isinstance(value, Tensor)
        _choose_state(bucket, sound, key, value)


def _choose_state(bucket: Bucket, sound: Tensor, key: str, value: Tensor) -> None:
    whole = bucket.whole(key)
    if whole is not None:
        torch.where(sound, value.reshape(whole.shape).to(whole.dtype), whole, out=whole)
    else:
        olds = [state[key] for state in bucket.states]
        _choose(sound, bucket.scatter(value, olds), olds)


def _choose(sound: Tensor, parts: Sequence[Tensor], olds: Sequence[Tensor]) -> None:
    for part, old in zip(parts, [local_part(old).detach() for old in olds], strict=True):
        torch.where(sound, part.reshape(old.shape).to(old.dtype), old, out=old)
