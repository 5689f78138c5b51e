"""Moments, moves and writes of an optimizer's step, in few launches where Triton programs run."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.product import is_plain
from stiefelkit.functional._kernels.launch import PACKAGE, is_at_hand, start

MOST_PAIRS = 8
"""Tensors that one launch of `commit` writes."""
MOST_BOUNDS = 8
"""Tensors that one launch of `commit` looks at."""
BLOCK = 1024


def commit(
    pairs: Sequence[tuple[Tensor, Tensor]],
    refused: Tensor,
    bounds: Sequence[tuple[Tensor, float]],
    holds: Tensor | None = None,
) -> None:
    """Writes tensors over others if all values are at most their bounds, none NaN, and something holds.

    Args:
        pairs: what is written over, and by what; of one shape each.
        refused: float32 numbers, to which 1 is added where nothing is written.
        bounds: values and the most that they may be.
        holds: a tensor of one truth value.
    """
    pairs = [(old, new.to(old.dtype).resolve_conj()) for old, new in pairs]
    tensors = [t for pair in (*pairs, *bounds, (refused,)) for t in pair if isinstance(t, Tensor)]
    are_few = len(pairs) <= MOST_PAIRS and len(bounds) <= MOST_BOUNDS and is_at_hand(refused)
    if are_few and is_plain(*tensors) and all([t.is_contiguous() for t in tensors]):
        olds, news = ([_words(pair[side]) for pair in pairs] for side in range(2))
        counts, values = [t.numel() for t in olds], [values for values, _ in bounds]
        looked = tuple(values), tuple(t.numel() for t in values), tuple(most for _, most in bounds), holds
        arguments = tuple(olds), tuple(news), tuple(counts), *looked, refused, refused.numel()
        blocks = -(-max(refused.numel(), *counts, 1) // BLOCK)
        start(PACKAGE, "run_commit", blocks, refused, *arguments, BLOCK=BLOCK)
        torch.autograd.graph.increment_version([old for old, _ in pairs if not old.is_inference()])
        return
    for values, most in bounds:
        fit = (values <= most).all()
        holds = fit if holds is None else holds & fit
    for old, new in pairs:
        old.copy_(new) if holds is None else torch.where(holds, new, old, out=old)
    if holds is not None:
        refused.add_(holds.logical_not())


def adam_in_one(
    counts: Tensor,
    betas: tuple[float, float],
    moments: tuple[Tensor, Tensor, float, float] | None,
    matrices: int,
    rate: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns counts of steps and second moments after one more, and factors of steps; None where no program runs.

    Args:
        counts: of each frame, float32, shape (b,).
        betas: decays of the moments.
        moments: norms of gradients, float64, second moments, float32, of each matrix, and what is added to them and to
            their roots; None for the corrections of moments of entries: of their roots, and of first moments.
        matrices: of each frame.
        rate: by which factors are multiplied.
    """
    norms, seen, inner, outer = moments or (None, None, 0.0, 0.0)
    if not is_at_hand(counts) or not is_plain(counts) or not (seen is None or seen.dtype == torch.float32):
        return None
    batch, counted = counts.numel() * matrices, torch.empty_like(counts)
    mixed, scales = counts.new_empty(batch), counts.new_empty(batch, dtype=torch.float64)
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    values = norms, None if seen is None else seen.contiguous(), counts.contiguous(), mixed, counted, scales
    rule = (*logs, 1 - betas[1], inner, outer, rate)
    start(PACKAGE, "run_moments", -(-batch // BLOCK), counts, *values, batch, matrices, *rule, N=BLOCK)
    return counted, mixed, scales


def _words(t: Tensor) -> Tensor:
    """Returns the memory of a tensor as integers of 32 bits."""
    return (torch.view_as_real(t) if t.is_complex() else t).reshape(-1).view(torch.int32)
