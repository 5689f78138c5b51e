"""The gated recurrence on a GPU: all steps in one launch each way, for up to 128 units, in exact float32.

Products over all steps stand before and behind the launch. Weights are stacked: w = [q; w_r; w_g], as in
`stiefelkit.scan.gated.loops`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit.scan.activations import Activation
from stiefelkit.scan.engines.problem import Gradients, Outcome, Problem
from stiefelkit.scan.engines.triton import states_before, step_sizes
from stiefelkit.scan.kernels import launch
from stiefelkit.scan.kernels.launch import Steps, blocked, multiprocessors, run
from stiefelkit.scan.kernels.layouts import Layout, choose

__all__ = ["WIDEST", "GatedTriton", "backward", "forward", "settings", "supports"]


WIDEST = 128
"""The most units: three matrices have to fit the registers of a multiprocessor."""


def supports(device: torch.device, dtype: torch.dtype, units: int, activation: Activation) -> str | None:
    """Returns what the kernels need and do not find, "..., got ...", or None; see `launch.supports`."""
    return (
        f"at most {WIDEST} units, got {units}" if units > WIDEST else launch.supports(device, dtype, units, activation)
    )


def forward(
    z: Tensor,
    w: Tensor,
    h0: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    sizes: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the states (rows, n) and the last one of each sequence (B, n).

    Args:
        z: projections [r | g | c] of all steps, float32 and contiguous, shape (rows, 3n).
        w: [q; w_r; w_g], shape (3n, n).
        h0: first states, shape (B, n).
        activation: one that the programs know.
        bias: of an activation that has it inside, shape (n,).
        sizes: rows alive at each step, int64 on the device, not increasing, shape (T,); None if all are, rows = T B.
        reverse: whether the last step comes first.
    """
    out = z.new_empty(len(z), h0.shape[1])
    if not len(h0):
        return out, h0.clone()
    steps = Steps(z, len(h0), sizes)
    fixed = settings(_layout(h0), h0.shape[1], activation) | {"REVERSE": reverse, "PACKED": steps.is_packed}
    args = (z, _stacked(w, fixed, True), h0.contiguous(), z if bias is None else bias.contiguous(), out)
    run("gates_forward", len(h0), (*args, *_places(steps, activation)), fixed)
    return out, out[steps.ends(not reverse)].clone()


def backward(
    p: Tensor,
    w: Tensor,
    h0: Tensor,
    out: Tensor,
    g_out: Tensor | None,
    g_last: Tensor | None,
    activation: Activation,
    bias: Tensor | None = None,
    sizes: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Turns p (rows, 4n) into the gradients by its numbers, in place.

    `p` is [q h | z_r + w_r h | z_g + w_g h | z_c], of projections z and of states h before, `out` what `forward`
    returned, `g_out` (rows, n) and `g_last` (B, n) the gradients by it, or None; the others are as in `forward`.

    Returns:
        The gradient by h0, (B, n); and with a bias c (rows, n), which it adds to, without one of nothing.
    """
    g_h0, keep = torch.empty_like(h0), bias is not None
    candidates = torch.empty_like(out) if keep else out.new_empty(0)
    if not len(h0):
        return g_h0, candidates
    steps = Steps(p, len(h0), sizes)
    fixed = settings(_layout(h0), h0.shape[1], activation) | {"REVERSE": reverse, "PACKED": steps.is_packed}
    fixed |= {
        "AHEAD": fixed["SIZE"] < WIDEST,
        "KEEP": keep,
        "HAS_OUT": g_out is not None,
        "HAS_LAST": g_last is not None,
    }
    outside = (p if g is None else g.contiguous() for g in (g_out, g_last))
    args = (
        p,
        _stacked(w, fixed, False),
        h0.contiguous(),
        p if bias is None else bias.contiguous(),
        out,
        *outside,
        g_h0,
    )
    run("gates_back", len(h0), (*args, candidates if keep else p, *_places(steps, activation)), fixed)
    return g_h0, candidates


def settings(layout: Layout, units: int, activation: Activation) -> dict[str, Any]:
    """Returns what is fixed when a program is compiled for so many units."""
    return {
        "N": units,
        "ACTIVATION": activation.kernel,
        "PAIRS": activation.is_paired,
        "BLOCKS": layout.blocks,
        "SIZE": layout.size,
        "DEEP": layout.deep,
        "num_warps": layout.warps,
        "enable_fp_fusion": True,
    }


def _layout(h0: Tensor) -> Layout:
    return choose("gated", h0.shape[1], len(h0), multiprocessors(h0.device))


def _places(steps: Steps, activation: Activation) -> tuple[Any, ...]:
    return steps.starts, steps.lengths, activation.slope, steps.count, steps.batch


def _stacked(w: Tensor, fixed: dict[str, Any], is_forward: bool) -> Tensor:
    """Returns the matrices for rows of states, or for those of gradients, as the programs take them."""
    return torch.cat([blocked(part.mT if is_forward else part, fixed) for part in w.chunk(3)])


class GatedTriton:
    """The recurrence of `goru_scan` as two kernels; see `Engine`, and `Gated` for its stacked weights."""

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all states, the last one of each sequence, and nothing more: `keep` has no effect."""
        z = _projected(p)
        out, last = forward(z, p.w, p.first, p.activation, p.activation_bias, step_sizes(p), p.reverse)
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
        dh0, c = backward(
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
