"""Interface of the fast backends, the one for a recurrence, and one for the last states alone on top of any other."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from stiefelkit.scan.checks import GATED, Recurrence
from stiefelkit.scan.engines.gated import Gated, GatedTriton
from stiefelkit.scan.engines.graphs import GraphLoops
from stiefelkit.scan.engines.inplace import InPlace, Loops, StructuredLoops
from stiefelkit.scan.engines.problem import Gradients, Outcome, Problem, segments
from stiefelkit.scan.engines.triton import Triton


class Engine(Protocol):
    """A way to run the recurrence and to go back through it."""

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all states, the last of each sequence, and (with `keep`) what the derivative needs besides."""
        ...

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        """Returns the gradients by those of x, w, h0, u, bias and activation bias that are wanted."""
        ...


class PlainEngine(Engine, Protocol):
    """One of `scan`, whose maps over samples fold into the batch."""

    def deltas(self, p: Problem, outcome: Outcome) -> tuple[Tensor, Tensor]:
        """Returns the gradients by all pre-activations, like `out`, and by the first states (B, n)."""
        ...


class Checkpointed:
    """Another engine, which keeps states before segments of about T^(1/2) steps in the place of all; see `Engine`.

    Args:
        engine: what runs the segments.
    """

    def __init__(self, engine: Engine):
        self.engine = engine

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the checkpoints (segments, B, n), none without `keep`; the last states (B, n); and nothing more."""
        ended = p.h0.clone(memory_format=torch.contiguous_format)
        marks = []
        for part in _parts(p):
            sub = p.segment(part, ended)
            if keep:
                marks.append(ended.clone())
            ended[: sub.h0.shape[0]] = self.engine.forward(sub, False)[1]
        return torch.stack(marks) if marks else p.h0.new_empty(0, *p.h0.shape), ended, p.saved_like(False)

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        """Gradients from those by the last states alone: each segment is run once more from its checkpoint."""
        total = Gradients(x=torch.zeros_like(p.x, memory_format=torch.contiguous_format) if needs[0] else None)
        assert outcome.g_last is not None
        carry = outcome.g_last.clone(memory_format=torch.contiguous_format)
        for part, mark in reversed(list(zip(_parts(p), outcome.out, strict=True))):
            sub = p.segment(part, mark)
            batch = sub.h0.shape[0]
            states, _, saved = self.engine.forward(sub, True)
            gradients = self.engine.backward(sub, Outcome(states, saved, None, carry[:batch]), needs)
            assert gradients.h0 is not None
            carry[:batch] = gradients.h0
            if total.x is not None and gradients.x is not None:
                total.x[p.rows(part)].copy_(gradients.x)
            for name in ("w", "u", "bias", "activation_bias"):
                more, before = getattr(gradients, name), getattr(total, name)
                setattr(total, name, more if before is None else before.add_(more))
        total.h0 = carry
        return total


def _parts(p: Problem) -> list[slice]:
    """Segments of steps, in the order in which they run."""
    parts = segments(len(p.sizes))
    return parts[::-1] if p.reverse else parts


def engine(recurrence: Recurrence) -> Engine:
    """Returns the implementation of a recurrence, by its cell, its backend and what is asked of it."""
    if recurrence.structure:
        runner = InPlace(StructuredLoops)
    elif recurrence.cell == GATED:
        runner = GatedTriton() if recurrence.backend == "triton" else Gated()
    else:
        runner = plain_engine(recurrence.backend)
    return Checkpointed(runner) if recurrence.last_only else runner


def plain_engine(backend: str) -> PlainEngine:
    """Returns the implementation of a fast backend of `scan`."""
    if backend == "triton":
        return Triton()
    return InPlace(GraphLoops if backend == "cuda_graphs" else Loops)
