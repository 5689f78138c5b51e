"""Averages of weights that stay frames: for `torch.optim.swa_utils.AveragedModel`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from stiefelkit.functional import nearest_frame
from stiefelkit.metrics import working_dtype
from stiefelkit.numbers import at_least
from stiefelkit.tensors import full_tensor, local_part, placed_like
from stiefelkit.weights import optimizer_hooks
from stiefelkit.weights.outside_writes import frame_tensors

Memory = tuple[torch.device, int, tuple[int, ...]]  # where a tensor lies: its device, its address and its shape


def multi_avg_fn(decay: float | None = None) -> Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | int], None]:
    """Returns the `multi_avg_fn` of an `AveragedModel` whose frames stay frames.

    The mean of frames is none. Here every frame that is a coordinate (`"stiefel"`, or without a module) and every base
    of `"rebased"` becomes the frame nearest to the mean, worked out in float64: at the rounding limit, however many
    steps are averaged. Integers (signs, permutations, counters) are taken as they are now. All else is averaged as
    torch does it; free coordinates give frames whatever they are.

        averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=sk.optim.multi_avg_fn(0.999))

    Args:
        decay: of the exponential mean, in [0, 1]; None for the mean of all with equal weights.

    A mean with dependent columns (that of W and -W), to which no frame is nearest, raises RankError when it is made.

    >>> import torch, stiefelkit as sk
    >>> layer = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "stiefel")
    >>> average = multi_avg_fn(0.9)
    >>> averaged = torch.optim.swa_utils.AveragedModel(layer, multi_avg_fn=average)
    >>> averaged.update_parameters(layer)
    """
    if decay is None:
        mean = get_swa_multi_avg_fn()
    else:
        mean = get_ema_multi_avg_fn(at_least(0, most=1).require("An average", "decay", decay))

    @torch.no_grad()
    def update(averaged: Sequence[Tensor], current: Sequence[Tensor], count: Tensor | int) -> None:
        kept, pairs = _kept_frames(), list(zip(averaged, current, strict=True))
        bound = [_bound(mean, a, c, count, kept) for a, c in pairs]
        free = [pair for pair, after in zip(pairs, bound, strict=True) if after is None]
        if free:
            mean([a for a, _ in free], [c for _, c in free], count)
        for (a, _), after in zip(pairs, bound, strict=True):
            if after is not None:
                a.copy_(after)

    return update


def _bound(
    mean: Callable[..., None], averaged: Tensor, current: Tensor, count: Tensor | int, kept: dict[Memory, bool]
) -> Tensor | None:
    """Returns the current integers, or the frame nearest to the mean of two; None for free numbers."""
    if not (averaged.is_floating_point() or averaged.is_complex()):
        return current.clone()
    packed = kept.get(_memory_of(averaged), kept.get(_memory_of(current)))
    if packed is None:
        return None
    total = full_tensor(averaged).to(working_dtype(averaged.dtype), copy=True)
    mean([total], [full_tensor(current).to(total)], count)
    nearest = torch.view_as_real(nearest_frame(torch.view_as_complex(total))) if packed else nearest_frame(total)
    return placed_like(nearest.to(averaged.dtype), averaged)


def _kept_frames() -> dict[Memory, bool]:
    """Returns where each tensor alive that must stay a frame lies, and whether it is complex stored as real."""
    held = [frame_tensors(one.param, one.coordinates) for one in optimizer_hooks.coordinate_lists()]
    alone = {_memory_of(p): False for p in optimizer_hooks.frames_alone()}
    return {_memory_of(c): packed for pairs in held for c, packed in pairs} | alone


def _memory_of(t: Tensor) -> Memory:
    local = local_part(t)
    return (local.device, local.data_ptr(), tuple(local.shape))
