"""The recurrence chunk by chunk: one buffer is projection, pre-activation and state in turn, gradients by hand.

Only the states are kept. The derivative of the activation is worked out for a whole chunk at once, a step back costs
one product and one multiplication, and the gradients by matrices take one product a chunk, while it is in the cache.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from stiefelkit.scan.engines.problem import Gradients, Outcome, Problem
from stiefelkit.scan.structures.structure import read_blocks, row_blocks


class InPlace:
    """The recurrence chunk by chunk."""

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all states, the last of each sequence, and (with `keep`) what the derivative needs besides."""
        # Rows of sequences that are not alive in a chunk stay: they have ended, or wait for their first step.
        out = p.x.new_empty(*p.x.shape[:-1], p.n, dtype=p.w.dtype)
        state, saved, act = p.first.clone(), p.saved_like(keep), p.activation
        add = partial(Tensor.addmm_, mat2=p.wt) if p.structure is None else p.structure.add_
        outs, kept = p.parts(out), p.parts(saved) if keep else p.rooms(saved.shape[-1], saved.dtype)
        zs = p.rooms(p.width) if p.is_complex else outs
        for z, x, part, into in zip(zs, p.inputs(), kept, outs, strict=True):
            p.project(z, x)
            h = state[: z.shape[1]]
            views = act.views(z, part)
            views = views[::-1] if p.reverse else views
            last = p.loop(h)(views, h, add)
            if act.is_ill(part):
                p.project(z, x)
                last = act.careful(h, p.activation_bias)(views, h, add)
            h.copy_(last)
            if p.is_complex:
                torch.complex(*z.chunk(2, -1), out=into)
        return out, p.row_gradient(state), saved

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        """Returns the gradients by those of x, w, h0, u, bias and activation bias that are wanted."""
        sums = _Sums(p, needs)
        dx = torch.empty_like(p.x, memory_format=torch.contiguous_format) if needs[0] else None
        # The gradients by the last states, (B, N), become those by the first ones.
        carry = torch.zeros_like(p.first) if outcome.g_last is None else row_blocks(outcome.g_last).clone()
        outs, saved, outside, dxs = map(p.parts, (outcome.out, outcome.saved, outcome.g_out, dx))
        # Without an input matrix, the gradient by pre-activations is that by the inputs.
        direct = dx is not None and p.u is None and not p.is_complex
        deltas, states = dxs if direct else p.rooms(p.width), p.rooms(p.width, more=1)
        room = p.rooms(p.width) if p.is_complex else outside
        for i in reversed(range(len(p.chunks))):
            (h, before), delta = p.states(outs, i, states[i]), deltas[i]
            g = None if outcome.g_out is None else read_blocks(outside[i], room[i]) if p.is_complex else outside[i]
            # Rows beyond this chunk's batch belong to sequences that are not alive in it: their carry waits.
            alive = carry[: delta.shape[1]]
            alive.copy_(_back(p, delta, g, alive, p.activation.factors(h, saved[i])))
            sums.add(i, delta, h, before, saved[i])
            if dx is not None and not direct:
                _write_input_gradient(p, dxs[i], delta)
        return sums.gradients(dx, carry)


def _write_input_gradient(p: Problem, dx: Tensor, delta: Tensor) -> None:
    ut = p.ut
    if ut is not None and not p.x.is_complex():
        torch.mm(delta.flatten(0, 1), ut.mT, out=dx.flatten(0, 1))
        return
    d = delta if ut is None else (delta.flatten(0, 1) @ ut.mT).unflatten(0, delta.shape[:2])
    if p.x.is_complex():
        torch.complex(*d.chunk(2, -1), out=dx)
    else:
        dx.copy_(d[..., : dx.shape[-1]])


def _back(p: Problem, delta: Tensor, g: Tensor | None, carry: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Writes a chunk's gradients by pre-activations to `delta`, from those by states; returns the next `carry`."""
    rows, outside = delta.unbind(0), None if g is None else g.unbind(0)
    w = p.rows_w if p.structure is None else None
    diagonals, others = [*map(torch.unbind, factors), None, None][:2]
    firsts, seconds = map(torch.unbind, delta.chunk(2, -1)) if others else ((), ())
    scratch = torch.empty_like(carry) if others else carry
    first, second = scratch.chunk(2, -1) if others else (scratch, scratch)
    if p.structure is not None:
        p.structure.start(*delta.shape[:2])
    d: Tensor | None = None
    for t in range(len(rows)) if p.reverse else range(len(rows) - 1, -1, -1):
        row = rows[t]
        into = scratch if others else row
        # The gradient by a state: from outside, and from the next step.
        if d is not None and w is not None:
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
        if p.structure is not None:
            carry = p.structure.back(row, t)
    return carry if d is None or w is None else d @ w


class _Sums:
    """Gradients by w, u and the biases, where they are needed, summed chunk by chunk."""

    def __init__(self, p: Problem, needs: Sequence[bool]):
        self.p = p
        _, self.needs_w, _, needs_u, needs_bias, needs_inner = needs
        parts, columns, zeros = 1 + p.is_complex, p.x.shape[-1] * (1 + p.x.is_complex()), p.first.new_zeros
        self.w = zeros(p.width, p.width) if self.needs_w and p.structure is None else None
        self.u = zeros(p.width, columns) if needs_u and p.u is not None else None
        self.bias = zeros(parts * len(p.bias)) if needs_bias and p.bias is not None else None
        self.inner = zeros(p.n) if needs_inner and p.activation_bias is not None else None
        self.xs = p.parts(p.x)
        self.rooms = p.rooms(columns) if self.u is not None and p.x.is_complex() else None

    def add(self, i: int, delta: Tensor, h: Tensor, before: Tensor, saved: Tensor) -> None:
        """Adds a chunk's share, from gradients by pre-activations, states and the states before them (k, batch, N)."""
        d = delta.flatten(0, 1)
        if self.w is not None:
            self.w.addmm_(d.mT, before.flatten(0, 1))
        elif self.p.structure is not None and self.needs_w:
            self.p.structure.accumulate(before, delta)
        if self.u is not None:
            x = self.xs[i] if self.rooms is None else read_blocks(self.xs[i], self.rooms[i])
            self.u.addmm_(d.mT, x.flatten(0, 1))
        if self.bias is not None:
            self.bias.addmv_(d.mT, d.new_ones(len(d)))
        if self.inner is not None:
            self.inner += self.p.activation.bias_gradient(h.flatten(0, 1), saved.flatten(0, 1), d).sum(0)

    def gradients(self, x: Tensor | None, h0: Tensor) -> Gradients:
        """Returns all gradients, with those by x and, as rows, by h0; complex ones put together."""
        p, w = self.p, None
        if self.w is not None:
            w = p.matrix_gradient(self.w, True)
        elif p.structure is not None and self.needs_w:
            w = p.structure.gradient()
        return Gradients(
            x=x,
            w=w,
            h0=p.row_gradient(h0),
            u=None if self.u is None else p.matrix_gradient(self.u, p.x.is_complex()),
            bias=None if self.bias is None else p.row_gradient(self.bias),
            activation_bias=self.inner,
        )
