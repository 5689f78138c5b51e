"""The gated recurrence on a GPU: all steps in one launch each way, for up to 128 units, in exact float32.

Products over all steps stand before and behind the launch. Weights are stacked: w = [q; w_r; w_g], as in
`stiefelkit.scan.gated.loops`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._kernels.launch import start
from stiefelkit.scan.activations import Activation
from stiefelkit.scan.engines.problem import Gradients, Outcome, Problem
from stiefelkit.scan.engines.triton import states_before, step_sizes
from stiefelkit.scan.kernels import launch
from stiefelkit.scan.kernels.launch import Steps
from stiefelkit.scan.kernels.layouts import choose

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
        z = _projected(p)
        out, last = z.new_empty(len(z), p.n), p.first
        if len(p.first):
            steps = Steps(z, len(p.first), step_sizes(p))
            _run("forward", p, z, steps, out)
            last = out[steps.ends(not p.reverse)]
        return out.view(*p.x.shape[:-1], p.n), last.clone(), p.saved_like(False)

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        """Gradients from those by the states and by the last ones; the pre-activations come again by one product."""
        needs_x, needs_w, _, needs_u, needs_bias, needs_inner = needs
        out, _, g_out, g_last = outcome
        h, n, keep = out.reshape(-1, p.n), p.n, p.activation_bias is not None
        before = states_before(p, h)
        # [q h | z_r + w_r h | z_g + w_g h | z_c] of states h before, which become the gradients by them.
        d = torch.empty(len(h), 4 * n, dtype=h.dtype, device=h.device)
        d[:, :n] = 0
        d[:, n:] = _projected(p)
        d[:, : 3 * n].addmm_(before, p.wt)
        dh0, c = torch.empty_like(p.first), torch.empty_like(h) if keep else d
        if len(p.first):
            outside = (d if g is None else g.reshape(-1, n).contiguous() for g in (g_out, g_last))
            steps = Steps(d, len(p.first), step_sizes(p))
            given: dict[str, Any] = {"KEEP": keep, "HAS_OUT": g_out is not None, "HAS_LAST": g_last is not None}
            _run("back", p, d, steps, h.contiguous(), *outside, dh0, c, **given)
        gradients, x = Gradients(h0=dh0), p.x.reshape(-1, p.x.shape[-1])
        if needs_w:
            gradients.w = d[:, : 3 * n].mT @ before
        if p.u is not None and needs_u:
            gradients.u = d[:, n:].mT @ x
        if p.u is not None and needs_x:
            gradients.x = (d[:, n:] @ p.u).view(p.x.shape)
        if needs_bias and p.bias is not None:
            gradients.bias = d[:, n:].sum(0)
        if needs_inner and keep:
            gradients.activation_bias = p.activation.bias_gradient(c, d[:, 3 * n :]).sum(0)
        return gradients


def _run(way: str, p: Problem, rows: Tensor, steps: Steps, *args: Tensor, **options: Any) -> None:
    """Runs a program, each of which takes a sequence, on rows of all steps and its own arguments."""
    layout = choose("gated", p.n, steps.batch, launch.multiprocessors(rows.device))
    fixed = launch.settings(layout, p.n, p.n, p.activation) | {"REVERSE": p.reverse, "PACKED": steps.is_packed}
    fixed |= options | ({"AHEAD": layout.size < WIDEST} if way == "back" else {})
    # For rows of states, or for those of gradients.
    parts = (part.mT if way == "forward" else part for part in p.w.chunk(3))
    matrices = torch.cat([launch.blocked(part, fixed) for part in parts])
    bias = rows if p.activation_bias is None else p.activation_bias.contiguous()
    places = steps.starts, steps.lengths, p.activation.slope, steps.count, steps.batch
    given = (rows, matrices, p.first.contiguous(), bias, *args, *places)
    start(launch.PACKAGE, f"gates_{way}", steps.batch, rows, *given, **fixed)


def _projected(p: Problem) -> Tensor:
    """Returns [r | g | c] of all rows, (rows, 3n)."""
    assert p.ut is not None
    assert p.row_bias is not None
    return torch.addmm(p.row_bias, p.x.reshape(-1, p.x.shape[-1]), p.ut)
