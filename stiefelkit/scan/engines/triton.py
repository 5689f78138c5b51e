"""All steps in one kernel, on CUDA devices: the products that need no recurrence stand before and behind it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.scan.blocks import from_blocks, row_blocks
from stiefelkit.scan.engines import launch
from stiefelkit.scan.engines.problem import Gradients, Outcome, Problem


class Triton:
    """The recurrence as two kernels; see `Engine`.

    Args:
        layout: of the work; that of the table when None.
    """

    def __init__(self, layout: launch.Layout | None = None):
        self.layout = layout

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all states, the last of each sequence, and (with `keep`) what the derivative needs besides."""
        z, saved, last = projected(p), p.saved_like(keep), p.first
        if len(last):
            bias = None if p.activation_bias is None else p.activation_bias.contiguous()
            args = last.contiguous(), bias, saved.flatten(0, -2) if saved.numel() else None
            # States take the place of projections.
            steps = launch.run("forward", p, self.layout, z, p.wt, args)
            last = z[steps.ends(not p.reverse)]
        return p.row_gradient(z).view(*p.x.shape[:-1], p.n), p.row_gradient(last.clone()), saved

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        """Returns the gradients from those by the states (like `out`) and by the last ones (B, n)."""
        needs_x, needs_w, _, needs_u, needs_bias, needs_inner = needs
        delta, dh0, h = self._back(p, outcome)
        gradients = Gradients(h0=p.row_gradient(dh0))
        if needs_w:
            gradients.w = p.matrix_gradient(_by_states(p, delta, h), True, p.half)
        if needs_u and p.u is not None:
            x = row_blocks(p.x).flatten(0, -2)
            gradients.u = p.matrix_gradient(delta.mT @ x, p.x.is_complex())
        if needs_x:
            dx = delta if p.ut is None else delta @ p.ut.mT
            gradients.x = (from_blocks(dx) if p.x.is_complex() else dx[:, : p.x.shape[-1]].contiguous()).view(p.x.shape)
        if needs_bias and p.bias is not None:
            gradients.bias = p.row_gradient(delta.sum(0))
        if needs_inner and p.activation_bias is not None:
            gradients.activation_bias = p.activation.bias_gradient(h, delta).sum(0)
        return gradients

    def deltas(self, p: Problem, outcome: Outcome) -> tuple[Tensor, Tensor]:
        """Returns the gradients by all pre-activations, like `out`, and by the first states (B, n)."""
        delta, dh0, _ = self._back(p, outcome)
        return p.row_gradient(delta).view(outcome.out.shape), p.row_gradient(dh0)

    def _back(self, p: Problem, outcome: Outcome) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by all pre-activations, delta_t = act'(g_t + delta_{t+1} w), and by h0; and the states as rows."""
        out, saved, g_out, g_last = outcome
        h = row_blocks(out).flatten(0, -2)
        delta = torch.empty_like(h)
        if not len(p.first):
            return delta, torch.empty_like(p.first), h
        outside = (None if g is None else row_blocks(g).flatten(0, -2) for g in (g_out, g_last))
        args = *outside, h, saved.flatten(0, -2) if saved.numel() else None
        steps = launch.run("back", p, self.layout, delta, p.rows_w, args)
        return delta, delta[steps.ends(p.reverse)] @ p.rows_w, h


def projected(p: Problem) -> Tensor:
    """Returns the projected inputs of all steps, (rows, N), in memory of their own."""
    x = row_blocks(p.x).flatten(0, -2)
    if p.ut is not None:
        return x @ p.ut if p.row_bias is None else torch.addmm(p.row_bias, x, p.ut)
    if p.is_complex and not p.x.is_complex():
        x = torch.cat([x, torch.zeros_like(x)], 1)
    return x.clone() if p.row_bias is None else x + p.row_bias


def _by_states(p: Problem, delta: Tensor, h: Tensor) -> Tensor:
    """Returns the sum over all rows of delta_t^T h_{t-1}, (N, N)."""
    sizes = p.sizes
    if not p.is_packed:
        first, later, before = slice(0, sizes[0]), slice(sizes[0], None), slice(0, len(h) - sizes[0])
        if p.reverse:
            first, later, before = slice(len(h) - sizes[0], None), before, later
        return torch.addmm(delta[first].mT @ p.first, delta[later].mT, h[before])
    return delta.mT @ states_before(p, h)


def states_before(p: Problem, h: Tensor) -> Tensor:
    """Returns the states before each of all rows of states, both (rows, N)."""
    sizes = p.sizes
    if not p.is_packed:
        steps = (h[sizes[0] :], p.first) if p.reverse else (p.first, h[: len(h) - sizes[0]])
        return torch.cat(steps)
    steps = h.split(sizes)
    if p.reverse:
        # A sequence starts at its own last step.
        ahead = [torch.cat([step, p.first[len(step) : size]]) for size, step in zip(sizes, steps[1:], strict=False)]
        rows = [*ahead, p.first[: sizes[-1]]]
    else:
        rows = [p.first[: sizes[0]], *(step[:size] for size, step in zip(sizes[1:], steps, strict=False))]
    return torch.cat(rows)
