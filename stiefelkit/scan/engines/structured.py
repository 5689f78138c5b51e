"""Recurrent matrices in factors: the steps of a chunk, and units in the order that a structure takes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.scan.activations import Step
from stiefelkit.scan.engines.engine import Engine
from stiefelkit.scan.engines.loops import Loops
from stiefelkit.scan.engines.problem import Gradients, Outcome, Problem
from stiefelkit.scan.structures import Structure, pairs_first, pairs_in_order

__all__ = ["PairsFirst", "StructuredLoops"]


class StructuredLoops(Loops):
    """Runs the steps of a problem's chunks without its matrix."""

    def forward(self, z: Tensor, saved: Tensor, h: Tensor) -> Tensor:
        """As `Loops.forward`."""
        if self._step is None or self._step[0] != h.shape[0]:
            self._step = h.shape[0], self.p.activation.step(h, self.p.activation_bias)
        return self._run(z, saved, h, self._step[1])

    def forward_carefully(self, z: Tensor, saved: Tensor, h: Tensor) -> Tensor:
        """As `Loops.forward_carefully`."""
        return self._run(z, saved, h, self.p.activation.careful(h, self.p.activation_bias))

    def _run(self, z: Tensor, saved: Tensor, h: Tensor, step: Step) -> Tensor:
        assert self.p.structure is not None
        views, add_ = self.p.activation.views(z, saved), self.p.structure.add_
        for row in reversed(views) if self.p.reverse else views:
            add_(row[0], h)
            step(*row)
            h = row[0]
        return h

    def back(self, delta: Tensor, g: Tensor | None, carry: Tensor, h: Tensor, saved: Tensor) -> Tensor:
        """As `Loops.back`."""
        assert self.p.structure is not None
        factors = self.p.activation.factors(h, saved)
        return _steps_back(delta, g, carry, self.p.structure, factors, self.p.reverse)


def _steps_back(
    delta: Tensor, g: Tensor | None, carry: Tensor, w: Structure, factors: Sequence[Tensor], reverse: bool
) -> Tensor:
    """As `steps_back`, with a structure in the place of the matrix."""
    steps, batch = delta.shape[:2]
    w.start(steps, batch)
    for t in range(steps) if reverse else range(steps - 1, -1, -1):
        row = delta[t]
        if g is not None:
            carry = torch.add(carry, g[t], out=row if len(factors) < 2 else None)
        if not factors:
            row.copy_(carry)
        else:
            torch.mul(carry, factors[0][t], out=row)
        if len(factors) > 1:
            (first, second), (x, y) = carry.chunk(2, -1), row.chunk(2, -1)
            x.addcmul_(second, factors[1][t])
            y.addcmul_(first, factors[1][t])
        carry = w.back(row, t)
    return carry


class PairsFirst:
    """Another engine, with units 0, 2, 4, ... before 1, 3, 5, ...; see `Engine`.

    What is kept for the way back besides the states stays in that order, and so do checkpoints.

    Args:
        engine: the other one.
        keeps_states: whether it returns states, not checkpoints.
    """

    def __init__(self, engine: Engine, keeps_states: bool):
        self.engine, self.keeps_states = engine, keeps_states

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """All states or the checkpoints, the last states, and what the derivative needs besides them."""
        out, last, saved = self.engine.forward(p.rearranged(pairs_first), keep)
        return pairs_in_order(out) if self.keeps_states else out, pairs_in_order(last), saved

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        """Gradients, rearranged."""
        out, saved, g_out, g_last = outcome
        arranged = Outcome(
            pairs_first(out) if self.keeps_states else out,
            saved,
            None if g_out is None else pairs_first(g_out),
            None if g_last is None else pairs_first(g_last),
        )
        gradients = self.engine.backward(p.rearranged(pairs_first), arranged, needs)
        for name in ("h0", "bias", "activation_bias", *(("x",) if p.u is None else ())):
            value = getattr(gradients, name)
            if value is not None:
                setattr(gradients, name, pairs_in_order(value))
        if gradients.u is not None:
            gradients.u = pairs_in_order(gradients.u.mT).mT
        return gradients
