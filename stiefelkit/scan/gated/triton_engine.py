"""The gated recurrence in one kernel each way, on CUDA devices; products over all steps stand before and behind it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.scan.engines.problem import Gradients, Outcome, Problem
from stiefelkit.scan.engines.triton import states_before, step_sizes
from stiefelkit.scan.gated import kernel

__all__ = ["GatedTriton"]


class GatedTriton:
    """The recurrence of `goru_scan` as two kernels; see `Engine`, and `Gated` for its stacked weights."""

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all states, the last one of each sequence, and nothing more: `keep` has no effect."""
        z = _projected(p)
        out, last = kernel.forward(z, p.w, p.first, p.activation, p.activation_bias, step_sizes(p), p.reverse)
        return out.view(*p.x.shape[:-1], p.n), last, p.saved_like(False)

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        """Gradients from those by the states and by the last ones; the pre-activations come again by one product."""
        needs_x, needs_w, _, needs_u, needs_bias, needs_inner = needs
        out, _, g_out, g_last = outcome
        h, n = out.reshape(-1, p.n), p.n
        before = states_before(p, h)
        d = torch.empty(len(h), 4 * n, dtype=h.dtype, device=h.device)
        d[:, :n] = 0
        d[:, n:] = _projected(p)
        d[:, : 3 * n].addmm_(before, p.wt)
        bias = p.activation_bias
        dh0, c = kernel.backward(
            d,
            p.w,
            p.first,
            h.contiguous(),
            None if g_out is None else g_out.reshape(-1, n),
            g_last,
            p.activation,
            bias,
            step_sizes(p),
            p.reverse,
        )
        gradients, x = Gradients(h0=dh0), p.x.reshape(-1, p.x.shape[-1])
        if needs_w:
            gradients.w = d[:, : 3 * n].mT @ before
        if p.u is not None and needs_u:
            gradients.u = d[:, n:].mT @ x
        if p.u is not None and needs_x:
            gradients.x = (d[:, n:] @ p.u).view(p.x.shape)
        if needs_bias and p.bias is not None:
            gradients.bias = d[:, n:].sum(0)
        if needs_inner and bias is not None:
            gradients.activation_bias = p.activation.bias_gradient(c, d[:, 3 * n :]).sum(0)
        return gradients


def _projected(p: Problem) -> Tensor:
    """[r | g | c] of all rows, (rows, 3n)."""
    assert p.ut is not None
    assert p.row_bias is not None
    return torch.addmm(p.row_bias, p.x.reshape(-1, p.x.shape[-1]), p.ut)
