"""The last states alone: states are kept about every T^(1/2) steps, and the ones between are found again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.scan.engines.chunks import segments
from stiefelkit.scan.engines.engine import Engine
from stiefelkit.scan.engines.problem import Gradients, Problem

__all__ = ["last_backward", "last_forward"]


def last_forward(engine: Engine, p: Problem, keep: bool) -> tuple[Tensor, Tensor]:
    """The last state of each sequence, and (with `keep`) the states before each segment of about T^(1/2) steps.

    Returns:
        h_n (B, n) and the checkpoints (segments, B, n).
    """
    ended = p.h0.clone(memory_format=torch.contiguous_format)
    marks = []
    for part in _parts(p):
        sub = p.segment(part, ended)
        if keep:
            marks.append(ended.clone())
        ended[: sub.h0.shape[0]] = engine.forward(sub, False)[1]
    return ended, torch.stack(marks) if marks else p.h0.new_empty(0, *p.h0.shape)


def last_backward(
    engine: Engine, p: Problem, g_last: Tensor, marks: Tensor, needs: Sequence[bool], half: bool = False
) -> Gradients:
    """Gradients from those by the last states: each segment is run once more from its checkpoint."""
    total = Gradients(x=torch.zeros_like(p.x, memory_format=torch.contiguous_format) if needs[0] else None)
    carry = g_last.clone(memory_format=torch.contiguous_format)
    parts = _parts(p)
    for part, mark in reversed(list(zip(parts, marks, strict=True))):
        sub = p.segment(part, mark)
        batch = sub.h0.shape[0]
        out, _, saved = engine.forward(sub, True)
        found = engine.backward(sub, None, carry[:batch], out, saved, needs, half)
        assert found.h0 is not None
        carry[:batch] = found.h0
        if total.x is not None and found.x is not None:
            total.x[p.rows(part)].copy_(found.x)
        for name in ("w", "u", "bias", "activation_bias"):
            more, before = getattr(found, name), getattr(total, name)
            setattr(total, name, more if before is None else before.add_(more))
    total.h0 = carry
    return total


def _parts(p: Problem) -> list[slice]:
    """Segments of steps, in the order in which they run."""
    parts = segments(len(p.sizes))
    return parts[::-1] if p.reverse else parts
