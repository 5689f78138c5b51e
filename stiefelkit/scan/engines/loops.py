"""The steps of one chunk, forward and back, as torch operators called one after the other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.scan.activations import Activation, Step
from stiefelkit.scan.engines.problem import Problem

__all__ = ["Loops", "steps_back", "steps_forward"]


class Loops:
    """Runs the steps of a problem's chunks.

    Args:
        p: the problem.
    """

    def __init__(self, p: Problem):
        self.p = p
        self._step: tuple[int, Step] | None = None
        self._scratch: Tensor | None = None

    def forward(self, z: Tensor, saved: Tensor, h: Tensor) -> Tensor:
        """Turns the projections of a chunk (k, batch, N) into states, from h (batch, N) on; returns the last one."""
        if self._step is None or self._step[0] != h.shape[0]:
            self._step = h.shape[0], self.p.activation.step(h, self.p.activation_bias)
        return steps_forward(z, saved, h, self.p.wt, self.p.activation, self._step[1], self.p.reverse)

    def forward_carefully(self, z: Tensor, saved: Tensor, h: Tensor) -> Tensor:
        """Returns the same with `Activation.careful`."""
        step = self.p.activation.careful(h, self.p.activation_bias)
        return steps_forward(z, saved, h, self.p.wt, self.p.activation, step, self.p.reverse)

    def back(self, delta: Tensor, g: Tensor | None, carry: Tensor, h: Tensor, saved: Tensor) -> Tensor:
        """Gradients by the pre-activations of a chunk; see `steps_back`. Returns the gradient by the state before."""
        if self._scratch is None or self._scratch.shape != carry.shape:
            self._scratch = torch.empty_like(carry)
        factors = self.p.activation.factors(h, saved)
        return steps_back(delta, g, carry, self.p.rows_w, factors, self._scratch, self.p.reverse)


def steps_forward(
    z: Tensor, saved: Tensor, h: Tensor, wt: Tensor, act: Activation, step: Step, reverse: bool
) -> Tensor:
    """Runs the steps of a chunk in place: projections z (k, batch, N) become states; returns the last one."""
    views = act.views(z, saved)
    for row in reversed(views) if reverse else views:
        row[0].addmm_(h, wt)
        step(*row)
        h = row[0]
    return h


def steps_back(
    delta: Tensor, g: Tensor | None, carry: Tensor, w: Tensor, factors: Sequence[Tensor], scratch: Tensor, reverse: bool
) -> Tensor:
    """Runs the steps of a chunk backwards; returns the gradient by the state before it.

    Args:
        delta: gradients by pre-activations, (k, batch, N), written here.
        g: gradients by the states from outside, (k, batch, N).
        carry: gradient by the last state of the chunk from the steps after it, (batch, N).
        w: recurrent matrix for rows, (N, N).
        factors: derivative of the activation (`Activation.factors`).
        scratch: room for (batch, N).
        reverse: whether the chunk's first step is its last in time.
    """
    order = range(delta.shape[0]) if reverse else range(delta.shape[0] - 1, -1, -1)
    rows, outside = delta.unbind(0), None if g is None else g.unbind(0)
    d: Tensor | None = None
    if len(factors) < 2:
        diagonals = factors[0].unbind(0) if factors else None
        for t in order:
            row = rows[t]
            _gradient(row, d, None if outside is None else outside[t], carry, w)
            if diagonals is not None:
                row.mul_(diagonals[t])
            d = row
    else:
        diagonals, others = (factor.unbind(0) for factor in factors)
        firsts, seconds = (half.unbind(0) for half in delta.chunk(2, -1))
        first, second = scratch.chunk(2, -1)
        for t in order:
            row, other = rows[t], others[t]
            _gradient(scratch, d, None if outside is None else outside[t], carry, w)
            torch.mul(scratch, diagonals[t], out=row)
            firsts[t].addcmul_(second, other)
            seconds[t].addcmul_(first, other)
            d = row
    assert d is not None
    return d @ w


def _gradient(row: Tensor, d: Tensor | None, g: Tensor | None, carry: Tensor, w: Tensor) -> None:
    """Writes the gradient by a state: from outside and from the next step, which is d @ w or `carry`."""
    if d is None:
        torch.add(carry, g, out=row) if g is not None else row.copy_(carry)
    elif g is None:
        torch.mm(d, w, out=row)
    else:
        torch.addmm(g, d, w, out=row)
