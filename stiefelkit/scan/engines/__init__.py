"""Engines, which run a recurrence chunk by chunk or at once, forward and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.scan.checks import Recurrence
from stiefelkit.scan.engines.inplace import InPlace
from stiefelkit.scan.engines.problem import Gradients, Outcome, Problem, segments
from stiefelkit.scan.engines.triton import Triton


class Checkpointed:
    """Another engine, which keeps states before segments of about T^(1/2) steps in the place of all."""

    def __init__(self, engine: InPlace | Triton):
        self.engine = engine

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the checkpoints (segments, B, n), none without `keep`; the last states (B, n); and nothing more."""
        ended = p.h0.clone(memory_format=torch.contiguous_format)
        checkpoints = []
        for part in _segments(p):
            sub = p.segment(part, ended)
            if keep:
                checkpoints.append(ended.clone())
            ended[: sub.h0.shape[0]] = self.engine.forward(sub, False)[1]
        out = torch.stack(checkpoints) if checkpoints else p.h0.new_empty(0, *p.h0.shape)
        return out, ended, p.saved_like(False)

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        """Gradients from those by the last states alone: each segment is run once more from its checkpoint."""
        dx = torch.zeros_like(p.x, memory_format=torch.contiguous_format) if needs[0] else None
        assert outcome.g_last is not None
        carry = outcome.g_last.clone(memory_format=torch.contiguous_format)
        total, needs = Gradients(), [*needs[:2], True, *needs[3:]]
        for part, checkpoint in reversed(list(zip(_segments(p), outcome.out, strict=True))):
            sub = p.segment(part, checkpoint)
            batch = sub.h0.shape[0]
            states, _, saved = self.engine.forward(sub, True)
            gradients = self.engine.backward(sub, Outcome(states, saved, None, carry[:batch]), needs)
            assert gradients.h0 is not None
            carry[:batch] = gradients.h0
            if dx is not None and gradients.x is not None:
                dx[p.rows(part)].copy_(gradients.x)
            sums = (b if a is None or b is None else a.add_(b) for a, b in zip(total, gradients, strict=True))
            total = Gradients(*sums)._replace(x=None, h0=None)
        return total._replace(x=dx, h0=carry)


def _segments(p: Problem) -> list[slice]:
    parts = segments(len(p.sizes))
    return parts[::-1] if p.reverse else parts


def find_engine(recurrence: Recurrence) -> InPlace | Triton | Checkpointed:
    """Returns what runs a recurrence and keeps the states that are asked for."""
    engine = Triton() if recurrence.backend == "triton" else InPlace()
    return Checkpointed(engine) if recurrence.last_only else engine
