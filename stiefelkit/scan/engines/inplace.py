"""The recurrence chunk by chunk: one buffer is projection, pre-activation and state in turn, gradients by hand.

Only the states are kept. The derivative of the activation is worked out for a whole chunk at once, a step back costs
one product and one multiplication, and the gradients by matrices take one product a chunk, while it is in the cache.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from stiefelkit.scan.blocks import row_blocks
from stiefelkit.scan.engines.problem import Chunk, Gradients, Outcome, Problem, shaped
from stiefelkit.scan.structures import Structure


class InPlace:
    """The recurrence chunk by chunk; see `Engine`."""

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        # Rows of sequences that are not alive in a chunk stay: they have ended, or wait for their first step.
        out, state = p.states_like(), p.first.clone()
        saved = p.saved_like(keep)
        if not p.chunks:
            return out, p.row_gradient(state), saved
        loops = _loops(p)
        room = p.buffer(p.width) if p.is_complex else None
        inputs = p.buffer(2 * p.x.shape[-1]) if p.x.is_complex() else None
        spare = None if keep else p.buffer(saved.shape[-1], saved.dtype)
        for chunk in p.chunks:
            z = p.part(out, chunk) if room is None else shaped(room, chunk, p.width)
            part = p.part(saved, chunk) if spare is None else shaped(spare, chunk, saved.shape[-1])
            h = state[: chunk.batch]
            p.project(z, chunk, inputs)
            last = loops.forward(z, part, h)
            if p.activation.is_ill(part):
                p.project(z, chunk, inputs)
                last = loops.forward(z, part, h, careful=True)
            h.copy_(last)
            if room is not None:
                p.write(out, chunk, z)
        return out, p.row_gradient(state), saved

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        sums = _Sums(p, needs)
        dx = torch.empty_like(p.x, memory_format=torch.contiguous_format) if needs[0] else None
        # Without an input matrix, the gradient by pre-activations is that by the inputs.
        direct = dx is not None and p.u is None and not p.is_complex
        rows = p.buffer(0 if direct else p.width)

        def place(chunk: Chunk) -> Tensor:
            return p.part(dx, chunk) if direct and dx is not None else shaped(rows, chunk, p.width)

        carry = _first_carry(p, outcome)
        for chunk, delta, h, before in _chunks_back(p, outcome, carry, place):
            sums.add(chunk, delta, h, before, p.part(outcome.saved, chunk))
            if dx is not None and not direct:
                _write_input_gradient(p, dx, chunk, delta)
        return sums.gradients(dx, carry)

    def deltas(self, p: Problem, outcome: Outcome) -> tuple[Tensor, Tensor]:
        deltas = torch.empty_like(outcome.out, memory_format=torch.contiguous_format)
        rows = p.buffer(p.width) if p.is_complex else None

        def place(chunk: Chunk) -> Tensor:
            return p.part(deltas, chunk) if rows is None else shaped(rows, chunk, p.width)

        carry = _first_carry(p, outcome)
        for chunk, delta, _, _ in _chunks_back(p, outcome, carry, place):
            if rows is not None:
                p.write(deltas, chunk, delta)
        return deltas, p.row_gradient(carry)


def _first_carry(p: Problem, outcome: Outcome) -> Tensor:
    """Returns the gradients by the last states, (B, N), which become those by the first ones."""
    return torch.zeros_like(p.first) if outcome.g_last is None else row_blocks(outcome.g_last).clone()


def _chunks_back(
    p: Problem, outcome: Outcome, carry: Tensor, place: Callable[[Chunk], Tensor]
) -> Iterator[tuple[Chunk, Tensor, Tensor, Tensor]]:
    """Yields chunks from the last one, gradients by pre-activations, in `place`, and states; changes `carry`."""
    if not p.chunks:
        return
    loops = _loops(p)
    states = p.buffer(p.width, more=1)
    outside = p.buffer(p.width) if p.is_complex else None
    for i in range(len(p.chunks) - 1, -1, -1):
        chunk = p.chunks[i]
        h, before = p.states(outcome.out, i, states)
        g = None if outcome.g_out is None else p.read(outcome.g_out, chunk, outside)
        delta = place(chunk)
        # Rows beyond this chunk's batch belong to sequences that are not alive in it: their carry waits.
        carry[: chunk.batch] = loops.back(delta, g, carry[: chunk.batch], h, p.part(outcome.saved, chunk))
        yield chunk, delta, h, before


def _write_input_gradient(p: Problem, dx: Tensor, chunk: Chunk, delta: Tensor) -> None:
    part, ut = p.part(dx, chunk), p.ut
    if ut is not None and not p.x.is_complex():
        torch.mm(delta.flatten(0, 1), ut.mT, out=part.flatten(0, 1))
        return
    d = delta if ut is None else (delta.flatten(0, 1) @ ut.mT).unflatten(0, delta.shape[:2])
    if p.x.is_complex():
        p.write(dx, chunk, d)
    else:
        part.copy_(d[..., : part.shape[-1]])


class _Loops:
    """Runs the steps of a problem's chunks."""

    def __init__(self, p: Problem):
        self.p = p

    def forward(self, z: Tensor, saved: Tensor, h: Tensor, careful: bool = False) -> Tensor:
        """Turns the projections of a chunk (k, batch, N) into states, from h (batch, N) on; returns the last one."""
        act = self.p.activation
        step, views = act.careful(h, self.p.activation_bias) if careful else self.p.step(h), act.views(z, saved)
        add_product_ = self.product_adder()
        for row in reversed(views) if self.p.reverse else views:
            add_product_(row[0], h)
            step(*row)
            h = row[0]
        return h

    def product_adder(self) -> Callable[[Tensor, Tensor], object]:
        """Returns what adds the product of states with the matrix to a row, both (batch, N)."""
        return partial(Tensor.addmm_, mat2=self.p.wt)

    def back(self, delta: Tensor, g: Tensor | None, carry: Tensor, h: Tensor, saved: Tensor) -> Tensor:
        """Writes a chunk's gradients by pre-activations to `delta`, from those by states; returns the next `carry`."""
        factors, w = self.p.activation.factors(h, saved), self.p.rows_w
        rows, outside = delta.unbind(0), None if g is None else g.unbind(0)
        diagonals, others = [*(factor.unbind(0) for factor in factors), None, None][:2]
        firsts, seconds = (half.unbind(0) for half in delta.chunk(2, -1)) if others else ((), ())
        scratch = torch.empty_like(carry) if others else carry
        first, second = scratch.chunk(2, -1) if others else (scratch, scratch)
        d: Tensor | None = None
        for t in range(len(rows)) if self.p.reverse else range(len(rows) - 1, -1, -1):
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


class _StructuredLoops(_Loops):
    """Runs the steps of a problem's chunks without its matrix, which is in factors."""

    def __init__(self, p: Problem, structure: Structure):
        super().__init__(p)
        self.structure = structure

    def product_adder(self) -> Callable[[Tensor, Tensor], object]:
        return self.structure.add_

    def back(self, delta: Tensor, g: Tensor | None, carry: Tensor, h: Tensor, saved: Tensor) -> Tensor:
        factors, w = self.p.activation.factors(h, saved), self.structure
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


def _loops(p: Problem) -> _Loops:
    return _Loops(p) if p.structure is None else _StructuredLoops(p, p.structure)


class _Sums:
    """Gradients by w, u and the biases, where they are needed, summed chunk by chunk."""

    def __init__(self, p: Problem, needs: Sequence[bool]):
        self.p = p
        _, self.needs_w, _, needs_u, needs_bias, needs_inner = needs
        parts, columns = 1 + p.is_complex, p.x.shape[-1] * (1 + p.x.is_complex())

        def zeros(*shape: int) -> Tensor:
            return p.first.new_zeros(shape)

        self.w = zeros(p.width, p.width) if self.needs_w and p.structure is None else None
        self.u = zeros(p.width, columns) if needs_u and p.u is not None else None
        self.bias = zeros(parts * len(p.bias)) if needs_bias and p.bias is not None else None
        self.inner = zeros(p.n) if needs_inner and p.activation_bias is not None else None
        self.ones = torch.ones_like(p.buffer(1)) if self.bias is not None else None
        self.inputs = p.buffer(columns) if self.u is not None and p.x.is_complex() else None

    def add(self, chunk: Chunk, delta: Tensor, h: Tensor, before: Tensor, saved: Tensor) -> None:
        """Adds a chunk's share, from gradients by pre-activations, states and the states before them (k, batch, N)."""
        d = delta.flatten(0, 1)
        if self.w is not None:
            self.w.addmm_(d.mT, before.flatten(0, 1))
        elif self.p.structure is not None and self.needs_w:
            self.p.structure.accumulate(before, delta)
        if self.u is not None:
            x = self.p.read(self.p.x, chunk, self.inputs)
            self.u.addmm_(d.mT, x.flatten(0, 1))
        if self.bias is not None and self.ones is not None:
            self.bias.addmv_(d.mT, self.ones[: d.shape[0]])
        if self.inner is not None:
            self.inner += self.p.activation.inner_gradient(h.flatten(0, 1), saved.flatten(0, 1), d).sum(0)

    def gradients(self, x: Tensor | None, h0: Tensor) -> Gradients:
        """Returns all gradients, with those by x and, as rows, by h0; complex ones put together."""
        p, w = self.p, None
        if self.w is not None:
            w = p.matrix_gradient(self.w, True, p.half)
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
