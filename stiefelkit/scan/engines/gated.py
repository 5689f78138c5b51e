"""The gated orthogonal recurrence, with gradients by hand; only the states are kept.

Its weights are stacked: w = [q; w_r; w_g], u = [u_r; u_g; u_c].

Chunk by chunk one buffer is [q h | r | g | u_c x], filled by one product a step; going back, all states are known, and
one product a chunk fills it again. As the gradient by a state enters that by every row of [q; r; g; c] linearly, the
factors are worked out for the whole chunk, and a step back costs one product too. On a GPU all steps are one launch
each way, for up to 128 units, in exact float32; products over all steps stand before and behind it.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.functional._kernels.launch import start
from stiefelkit.scan.activations import Activation
from stiefelkit.scan.engines import launch
from stiefelkit.scan.engines.inplace import Sums
from stiefelkit.scan.engines.launch import Steps, choose
from stiefelkit.scan.engines.problem import Chunk, Gradients, Outcome, Problem, shaped
from stiefelkit.scan.engines.triton import projected, states_before

WIDEST = 128
"""The most units: three matrices have to fit the registers of a multiprocessor."""


def supports(device: torch.device, dtype: torch.dtype, units: int, activation: Activation) -> str | None:
    """Returns what the kernels need and do not find, "..., got ...", or None; see `launch.supports`."""
    return (
        f"at most {WIDEST} units, got {units}" if units > WIDEST else launch.supports(device, dtype, units, activation)
    )


class GatedTriton:
    """The recurrence of `goru_scan` as two kernels; see `Engine`, and `Gated` for its stacked weights."""

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all states, the last one of each sequence, and nothing more: `keep` has no effect."""
        z = projected(p)
        out, last = z.new_empty(len(z), p.n), p.first
        if len(p.first):
            steps = Steps(p, z)
            _run("forward", p, z, steps, out)
            last = out[steps.ends(not p.reverse)]
        return out.view(*p.x.shape[:-1], p.n), last.clone(), p.saved_like(False)

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        """Gradients from those by the states and by the last ones; the pre-activations come again by one product."""
        needs_x, needs_w, _, needs_u, needs_bias, needs_inner = needs
        out, _, g_out, g_last = outcome
        h, n = out.reshape(-1, p.n), p.n
        before = states_before(p, h)
        # [q h | z_r + w_r h | z_g + w_g h | z_c] of states h before, which become the gradients by them.
        d = torch.empty(len(h), 4 * n, dtype=h.dtype, device=h.device)
        d[:, :n] = 0
        d[:, n:] = projected(p)
        d[:, : 3 * n].addmm_(before, p.wt)
        dh0, c = torch.empty_like(p.first), None if p.activation_bias is None else torch.empty_like(h)
        if len(p.first):
            outside = (None if g is None else g.reshape(-1, n).contiguous() for g in (g_out, g_last))
            _run("back", p, d, Steps(p, d), h.contiguous(), *outside, dh0, c)
        gradients, x = Gradients(h0=dh0), p.x.reshape(-1, p.x.shape[-1])
        if needs_w:
            gradients.w = d[:, : 3 * n].mT @ before
        if p.u is not None and needs_u:
            gradients.u = d[:, n:].mT @ x
        if p.u is not None and needs_x:
            gradients.x = (d[:, n:] @ p.u).view(p.x.shape)
        if needs_bias and p.bias is not None:
            gradients.bias = d[:, n:].sum(0)
        if needs_inner and c is not None:
            gradients.activation_bias = p.activation.bias_gradient(c, d[:, 3 * n :]).sum(0)
        return gradients


def _run(way: str, p: Problem, rows: Tensor, steps: Steps, *args: Tensor | None) -> None:
    """Runs a program, each of which takes a sequence, on rows of all steps and its own arguments."""
    layout = choose("gated", p.n, steps.batch, launch.multiprocessors(rows.device))
    fixed = launch.settings(layout, p.n, p.n, p.activation) | {"REVERSE": p.reverse, "PACKED": steps.is_packed}
    if way == "back":
        fixed["AHEAD"] = layout.size < WIDEST
    # For rows of states, or for those of gradients.
    parts = (part.mT if way == "forward" else part for part in p.w.chunk(3))
    matrices = torch.cat([launch.blocked(part, fixed) for part in parts])
    bias = None if p.activation_bias is None else p.activation_bias.contiguous()
    places = steps.starts, steps.lengths, p.activation.slope, steps.count, steps.batch
    given = (rows, matrices, p.first.contiguous(), bias, *args, *places)
    start(launch.PACKAGE, f"gates_{way}", steps.batch, rows, *given, **fixed)


class Gated:
    """The recurrence of `goru_scan` as an engine: w (3n, n), u (3n, m) and bias (3n,) are stacked, and real."""

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all states, the last one of each sequence, and nothing more: `keep` has no effect."""
        out, state = p.states_like(), p.first.clone()
        room, saved = p.buffer(4 * p.n), _Saved(p)
        for chunk in p.chunks:
            z, h = shaped(room, chunk, 4 * p.n), state[: chunk.batch]
            _project(p, z, chunk)
            h.copy_(_steps_forward(p, z, p.part(out, chunk), saved.of(chunk), h))
        return out, state, p.saved_like(False)

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        """Returns the gradients from those by the states and by the last ones; see `Engine`."""
        out, _, g_out, g_last = outcome
        dx = torch.empty_like(p.x, memory_format=torch.contiguous_format) if needs[0] else None
        carry = torch.zeros_like(p.first) if g_last is None else g_last.clone(memory_format=torch.contiguous_format)
        n, sums, room = p.n, Sums(p, needs), _Room(p)
        for i in range(len(p.chunks) - 1, -1, -1):
            chunk = p.chunks[i]
            _, before = p.states(out, i, room.states)
            z, others = room.fill(chunk, before)
            g = None if g_out is None else p.part(g_out, chunk)
            # Rows beyond this chunk's batch belong to sequences that are not alive in it: their carry waits.
            part = carry[: chunk.batch]
            _steps_back(z, others, g, part, shaped(room.gate, chunk, n), p.rows_w, p.reverse)
            d = z.flatten(0, 1)
            sums.add(
                chunk, d[:, : 3 * n], d[:, n:], d[:, 3 * n :], before, shaped(room.c, chunk, n), room.saved.of(chunk)
            )
            if dx is not None and p.u is not None:
                torch.mm(d[:, n:], p.u, out=p.part(dx, chunk).flatten(0, 1))
        return sums.gradients(dx, carry)


class _Room:
    """The buffers of the way back, and what fills them."""

    def __init__(self, p: Problem):
        self.p = p
        self.z, self.states = p.buffer(4 * p.n), p.buffer(p.n, more=1)
        self.gate, self.c, self.rest, self.part = (p.buffer(p.n) for _ in range(4))
        self.saved = _Saved(p)

    def fill(self, chunk: Chunk, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the derivative of [q h; r; g; c], before the gates' and the candidate's functions, by the state h'.

        With pre-activations z_r, z_g, z_c and a = 1 - g: dh' / dz_c = a act'(z_c), that by q h is r times as much, by
        z_r it is r (1 - r) q h times as much, and dh' / dz_g = (h - c) g a. These are factors (k, batch, 4n) of the
        gradient by h'; for activations of pairs there are also those of the other one of the pair. The buffers `gate`
        and `c` then hold g and c.
        """
        n, buffers = self.p.n, (self.gate, self.c, self.rest, self.part)
        gate, c, rest, part = (shaped(buffer, chunk, n) for buffer in buffers)
        z, saved = shaped(self.z, chunk, 4 * n), self.saved.of(chunk)
        _project(self.p, z, chunk)
        z.flatten(0, 1)[:, : 3 * n].addmm_(before.flatten(0, 1), self.p.wt)
        z[..., n : 3 * n].sigmoid_()
        qh, r, g, input_c = z.chunk(4, -1)
        torch.addcmul(input_c, r, qh, out=c)
        rows = c.flatten(0, 1)
        (views,) = self.p.activation.views(rows.unsqueeze(0), saved.flatten(0, 1).unsqueeze(0))
        self.p.step(rows)(*views)
        gate.copy_(g)
        torch.sub(1, gate, out=rest)
        torch.sub(before, c, out=g).mul_(gate).mul_(rest)
        torch.mul(qh, r, out=part).addcmul_(part, r, value=-1)
        qh.copy_(r)
        r.copy_(part)
        factors = self.p.activation.factors(c, saved)
        others = None
        if len(factors) == 2:
            others = z.clone()
            _spread(others, torch.roll(rest, n // 2, -1).mul_(factors[1].repeat(1, 1, 2)))
            others[..., 2 * n : 3 * n] = 0
        _spread(z, rest.mul_(factors[0]) if factors else rest)
        return z, others


def _spread(z: Tensor, factor: Tensor) -> None:
    """Multiplies the blocks of q h and r by a factor (k, batch, n), and puts it in the place of c."""
    qh, r, _, c = z.chunk(4, -1)
    qh.mul_(factor)
    r.mul_(factor)
    c.copy_(factor)


class _Saved:
    """Room for what an activation keeps of a chunk besides its values."""

    def __init__(self, p: Problem):
        self.width, dtype = p.activation.saved_like(p.n, p.dtype)
        self.buffer = p.buffer(self.width, dtype)

    def of(self, chunk: Chunk) -> Tensor:
        """Returns that of a chunk, (k, batch, width)."""
        return shaped(self.buffer, chunk, self.width)


def _project(p: Problem, z: Tensor, chunk: Chunk) -> None:
    """Writes [0 | projected inputs of r, g and c] of a chunk into z (k, batch, 4n)."""
    z[..., : p.n] = 0
    p.project(z[..., p.n :], chunk, None)


def _steps_forward(p: Problem, z: Tensor, out: Tensor, saved: Tensor, h: Tensor) -> Tensor:
    """Runs the steps of a chunk from h (batch, n) on; returns the last state.

    Overwrites z, [0 | projected inputs], (k, batch, 4n); writes the states into `out`, (k, batch, n), and what the
    activation keeps into `saved`.
    """
    n, wt, step = p.n, p.wt, p.step(h)
    blocks = (z[..., : 3 * n], z[..., n : 3 * n], *z.chunk(4, -1), out)
    steps = zip(*(block.unbind(0) for block in blocks), p.activation.views(z[..., 3 * n :], saved), strict=True)
    for product, gates, qh, r, g, c, row, views in reversed(list(steps)) if p.reverse else steps:
        product.addmm_(h, wt)
        gates.sigmoid_()
        c.addcmul_(r, qh)
        step(*views)
        h = torch.lerp(c, h, g, out=row)
    return h


def _steps_back(
    z: Tensor, others: Tensor | None, g: Tensor | None, carry: Tensor, gate: Tensor, w: Tensor, reverse: bool
) -> None:
    """Runs the steps of a chunk backwards.

    z holds factors (k, batch, 4n), which become gradients by [q h; r; g; c], and `others`, of the other one of each
    pair, are like it. `carry` (batch, n) is the gradient by the last state of the chunk from the steps after it, and
    becomes that by the state before the chunk; `g` are those by the states from outside, and `gate` is g of the steps.
    """
    n = carry.shape[-1]
    steps = list(zip(z.unflatten(-1, (4, n)).unbind(0), z[..., : 3 * n].unbind(0), gate.unbind(0), strict=True))
    outside = None if g is None else g.unbind(0)
    pairs = None if others is None else others.unflatten(-1, (4, n)).unbind(0)
    order = list(range(len(steps)) if reverse else range(len(steps) - 1, -1, -1))
    rows = carry.unsqueeze(1)
    if outside is not None:
        carry.add_(outside[order[0]])
    for t, following in itertools.zip_longest(order, order[1:]):
        blocks, product, passed = steps[t]
        blocks.mul_(rows)
        if pairs is not None:
            blocks.addcmul_(pairs[t], torch.roll(rows, n // 2, -1))
        if outside is None or following is None:
            carry.mul_(passed)
        else:
            torch.addcmul(outside[following], carry, passed, out=carry)
        carry.addmm_(product, w)
