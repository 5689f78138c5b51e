"""The steps of one chunk, forward and back, as torch operators called one after the other."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stiefelkit.scan.activations import Activation, Step
from stiefelkit.scan.engines.problem import Problem
from stiefelkit.scan.structures import Structure

Add = Callable[[Tensor, Tensor], object]
"""Adds to a row, (batch, N), the product of the states before it with the matrix."""


class Loops:
    """Runs the steps of a problem's chunks.

    Args:
        p: the problem.
    """

    def __init__(self, p: Problem):
        self.p = p
        self._scratch: Tensor | None = None

    def forward(self, z: Tensor, saved: Tensor, h: Tensor) -> Tensor:
        """Turns the projections of a chunk (k, batch, N) into states, from h (batch, N) on; returns the last one."""
        return self._run(z, saved, h, self.p.step(h))

    def forward_carefully(self, z: Tensor, saved: Tensor, h: Tensor) -> Tensor:
        """Returns the same with `Activation.careful`."""
        return self._run(z, saved, h, self.p.activation.careful(h, self.p.activation_bias))

    def _run(self, z: Tensor, saved: Tensor, h: Tensor, step: Step) -> Tensor:
        return steps_forward(z, saved, h, self._add, self.p.activation, step, self.p.reverse)

    def _add(self, row: Tensor, h: Tensor) -> None:
        row.addmm_(h, self.p.wt)

    def back(self, delta: Tensor, g: Tensor | None, carry: Tensor, h: Tensor, saved: Tensor) -> Tensor:
        """Gradients by the pre-activations of a chunk; see `steps_back`. Returns the gradient by the state before."""
        if self._scratch is None or self._scratch.shape != carry.shape:
            self._scratch = torch.empty_like(carry)
        factors = self.p.activation.factors(h, saved)
        return steps_back(delta, g, carry, self.p.rows_w, factors, self._scratch, self.p.reverse)


class StructuredLoops(Loops):
    """Runs the steps of a problem's chunks without its matrix, which is in factors."""

    @property
    def _structure(self) -> Structure:
        assert self.p.structure is not None
        return self.p.structure

    def _add(self, row: Tensor, h: Tensor) -> None:
        self._structure.add_(row, h)

    def back(self, delta: Tensor, g: Tensor | None, carry: Tensor, h: Tensor, saved: Tensor) -> Tensor:
        """As `Loops.back`."""
        factors, w = self.p.activation.factors(h, saved), self._structure
        steps, batch = delta.shape[:2]
        w.start(steps, batch)
        for t in range(steps) if self.p.reverse else range(steps - 1, -1, -1):
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


def steps_forward(z: Tensor, saved: Tensor, h: Tensor, add: Add, act: Activation, step: Step, reverse: bool) -> Tensor:
    """Runs the steps of a chunk in place: projections z (k, batch, N) become states; returns the last one."""
    views = act.views(z, saved)
    for row in reversed(views) if reverse else views:
        add(row[0], h)
        step(*row)
        h = row[0]
    return h


def steps_back(
    delta: Tensor, g: Tensor | None, carry: Tensor, w: Tensor, factors: Sequence[Tensor], scratch: Tensor, reverse: bool
) -> Tensor:
    """Runs the steps of a chunk backwards; returns the gradient by the state before it.

    Writes gradients by pre-activations into `delta`, (k, batch, N), from those by the states from outside, `g`, by the
    last state from the steps after it, `carry` (batch, N), and the `Activation.factors`; w is for rows, (N, N), and
    `scratch` room for (batch, N).
    """
    rows, outside = delta.unbind(0), None if g is None else g.unbind(0)
    diagonals, others = [*(factor.unbind(0) for factor in factors), None, None][:2]
    firsts, seconds = (half.unbind(0) for half in delta.chunk(2, -1)) if others else ((), ())
    first, second = scratch.chunk(2, -1) if others else (scratch, scratch)
    d: Tensor | None = None
    for t in range(len(rows)) if reverse else range(len(rows) - 1, -1, -1):
        row = rows[t]
        into = scratch if others else row
        # The gradient by a state: from outside, and from the next step.
        if d is not None:
            torch.mm(d, w, out=into) if outside is None else torch.addmm(outside[t], d, w, out=into)
        elif outside is not None:
            torch.add(carry, outside[t], out=into)
        else:
            into.copy_(carry)
        if diagonals:
            torch.mul(into, diagonals[t], out=row)
        if others:
            firsts[t].addcmul_(second, others[t])
            seconds[t].addcmul_(first, others[t])
        d = row
    assert d is not None
    return d @ w
