"""Recurrent matrices in factors: the steps of a chunk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.scan.activations import Step
from stiefelkit.scan.engines.loops import Loops
from stiefelkit.scan.structures import Structure

__all__ = ["StructuredLoops"]


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
