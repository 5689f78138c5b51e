"""The recurrence in operators that ONNX has: one Scan node of its standard, for any number of steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import higher_order_scan
from stiefelkit.errors import OptionError
from stiefelkit.scan.activations import find_activation
from stiefelkit.scan.blocks import matrix_blocks
from stiefelkit.scan.checks import GATED, Recurrence

Step = Callable[[Tensor, Tensor], Tensor]
"""Takes a state and projected inputs, both (B, .), to the next state."""


def exported_scan(recurrence: Recurrence, *tensors: Any) -> tuple[Tensor | None, Tensor]:
    """Runs a recurrence; see `scan` for the tensors, which are checked there. Complex states go as [Re h | Im h]."""
    x, w, h0, u, bias, activation_bias = tensors
    if recurrence.sizes is not None:  # which a graph cannot hold
        who = "goru_scan" if recurrence.cell == GATED else "scan"
        raise OptionError(f"{who} needs sequences of one length for ONNX, got batch_sizes.")
    is_complex = w.is_complex()
    function = find_activation(recurrence.activation, is_complex).of_rows
    if is_complex:
        w, u = matrix_blocks(w).mT, None if u is None else matrix_blocks(u).mT
        h0, bias = _parts(h0), None if bias is None else _parts(bias)
        x = _parts(x)
    rows = x if u is None else x @ u.mT
    rows = rows if bias is None else rows + bias
    rows, wt, h0, inner = _constant(rows, w.mT.contiguous(), h0, activation_bias)
    step = (_gated_step if recurrence.cell == GATED else _plain_step)(wt, function, () if inner is None else (inner,))
    out, last = _run(step, rows, h0, recurrence.reverse)
    if is_complex:
        out, last = (torch.complex(*t.chunk(2, dim=-1)) for t in (out, last))
    return None if recurrence.last_only else out, last


def _plain_step(wt: Tensor, function: Callable[..., Tensor], inner: tuple[Tensor, ...]) -> Step:
    def step(h: Tensor, row: Tensor) -> Tensor:
        return function(row + h @ wt, *inner)

    return step


def _gated_step(wt: Tensor, function: Callable[..., Tensor], inner: tuple[Tensor, ...]) -> Step:
    """Of w = [q; w_r; w_g], with rows projected for [r; g; c]."""
    n = len(wt)

    def step(h: Tensor, row: Tensor) -> Tensor:
        moved = h @ wt
        r, g = torch.sigmoid(row[:, : 2 * n] + moved[:, n:]).chunk(2, dim=-1)
        c = function(row[:, 2 * n :] + r * moved[:, :n], *inner)
        return c + g * (h - c)

    return step


def exported_gates(
    x: Tensor, weights: Sequence[Sequence[Tensor]], *, is_lstm: bool, directions: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs torch's LSTM or GRU, which torch itself writes for one number of steps, from zero states.

    Args:
        x: (T, B, m).
        weights: [U, W, b, b'] of every layer and direction, as torch names them.
        is_lstm: whether there are four gates, or three.
        directions: 1 or 2.

    Returns:
        The outputs, the last h and, of an LSTM, the last c.
    """
    (x,), last = _constant(x), []
    for k in range(0, len(weights), directions):
        runs = [_gates(x, _constant(*layer), is_lstm, i > 0) for i, layer in enumerate(weights[k : k + directions])]
        x = torch.cat([out for out, _ in runs], dim=-1)
        last += [h for _, h in runs]
    h, *c = torch.stack(last).chunk(2 if is_lstm else 1, dim=-1)
    return x, h, c[0] if is_lstm else h


def _gates(x: Tensor, weights: Sequence[Tensor], is_lstm: bool, reverse: bool) -> tuple[Tensor, Tensor]:
    u, w, bias, second = weights
    n, wt = w.shape[-1], w.mT.contiguous()

    def lstm(state: Tensor, row: Tensor) -> Tensor:
        h, c = state.chunk(2, dim=-1)
        i, f, g, o = (row + second + h @ wt).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.cat([torch.sigmoid(o) * torch.tanh(c), c], dim=-1)

    def gru(h: Tensor, row: Tensor) -> Tensor:
        moved = h @ wt + second
        r, z = torch.sigmoid(row[:, : 2 * n] + moved[:, : 2 * n]).chunk(2, dim=-1)
        new = torch.tanh(row[:, 2 * n :] + r * moved[:, 2 * n :])
        return new + z * (h - new)

    zero = x.new_zeros(x.shape[1], (1 + is_lstm) * n)
    out, last = _run(lstm if is_lstm else gru, x @ u.mT + bias, zero, reverse)
    return out[..., :n], last


def _run(step: Step, rows: Tensor, h0: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    def combine(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        h = step(h, row)
        return h, h.clone()

    if not torch.compiler.is_dynamo_compiling() and not all(isinstance(size, int) for size in rows.shape):
        # torch compiles its scan; what it has kept of an export at fixed sizes would fix those of this one.
        torch.compiler.reset()
    last, out = higher_order_scan(combine, h0, rows.flip(0) if reverse else rows)
    return (out.flip(0) if reverse else out), last


def _constant(*tensors: Tensor | None) -> Any:
    # torch's scan keeps sizes of the batch for a gradient, and fails over them; ONNX detaches no complex tensors.
    return [t if t is None else t.detach() for t in tensors]


def _parts(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag if z.is_complex() else torch.zeros_like(z)], dim=-1)
