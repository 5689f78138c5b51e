"""The last states alone: states are kept about every T^(1/2) steps, and the ones between are found again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.scan.engines.chunks import segments
from stiefelkit.scan.engines.engine import Engine
from stiefelkit.scan.engines.problem import Gradients, Problem

__all__ = ["Checkpointed"]


class Checkpointed:
    """Another engine, which keeps states before segments of about T^(1/2) steps in the place of all; see `Engine`.

    Args:
        engine: what runs the segments.
    """

    def __init__(self, engine: Engine):
        self.engine = engine

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The checkpoints (segments, B, n), none without `keep`; the last states (B, n); and nothing more."""
        ended = p.h0.clone(memory_format=torch.contiguous_format)
        marks = []
        for part in _parts(p):
            sub = p.segment(part, ended)
            if keep:
                marks.append(ended.clone())
            ended[: sub.h0.shape[0]] = self.engine.forward(sub, False)[1]
        return torch.stack(marks) if marks else p.h0.new_empty(0, *p.h0.shape), ended, p.saved_like(False)

    def backward(
        self,
        p: Problem,
        g_out: Tensor | None,
        g_last: Tensor | None,
        out: Tensor,
        saved: Tensor,
        needs: Sequence[bool],
    ) -> Gradients:
        """Gradients from those by the last states alone: each segment is run once more from its checkpoint."""
        total = Gradients(x=torch.zeros_like(p.x, memory_format=torch.contiguous_format) if needs[0] else None)
        assert g_last is not None
        carry = g_last.clone(memory_format=torch.contiguous_format)
        for part, mark in reversed(list(zip(_parts(p), out, strict=True))):
            sub = p.segment(part, mark)
            batch = sub.h0.shape[0]
            states, _, kept = self.engine.forward(sub, True)
            found = self.engine.backward(sub, None, carry[:batch], states, kept, needs)
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
