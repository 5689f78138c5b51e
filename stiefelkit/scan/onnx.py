"""Recurrences in operators that ONNX has: one Scan node of its standard, for any number of steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit._torch import higher_order_scan
from stiefelkit.errors import OptionError
from stiefelkit.scan.activations import find_activation
from stiefelkit.scan.blocks import matrix_blocks
from stiefelkit.scan.checks import Recurrence, Tensors
from stiefelkit.scan.reference import Step


def exported_scan(recurrence: Recurrence, tensors: Tensors) -> tuple[Tensor | None, Tensor]:
    """Runs a recurrence; see `scan` for the tensors, which are checked there. Complex states go as [Re h | Im h]."""
    x, w, h0, u, bias, inner = tensors
    if recurrence.sizes is not None:  # which a graph cannot hold
        raise OptionError("scan needs sequences of one length for ONNX, got batch_sizes.")
    is_complex = w.is_complex()
    function = find_activation(recurrence.activation, is_complex).of_rows
    if is_complex:
        w, u = matrix_blocks(w).mT, None if u is None else matrix_blocks(u).mT
        x, h0, bias = _parts(x), _parts(h0), None if bias is None else _parts(bias)
    rows = x if u is None else x @ u.mT
    rows = rows if bias is None else rows + bias
    # Detached as real numbers, since ONNX detaches no complex ones.
    rows, wt, h0 = rows.detach(), w.mT.contiguous().detach(), h0.detach()
    biases = () if inner is None else (inner.detach(),)

    def step(row: Tensor, h: Tensor) -> Tensor:
        return function(row + h @ wt, *biases)

    out, last = exported_loop(step, rows, h0, recurrence.reverse)
    if is_complex:
        out, last = (torch.complex(*t.chunk(2, dim=-1)) for t in (out, last))
    return None if recurrence.last_only else out, last


def exported_gates(
    x: Tensor, weights: Sequence[Sequence[Tensor]], *, is_lstm: bool, directions: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs torch's LSTM or GRU with [U, W, b, b'] of every layer and direction from zero; returns outputs, h and c."""
    x, last = x.detach(), []
    for k in range(0, len(weights), directions):
        runs = [_gates(x, layer, is_lstm, i > 0) for i, layer in enumerate(weights[k : k + directions])]
        x = torch.cat([out for out, _ in runs], dim=-1)
        last += [h for _, h in runs]
    h, *c = torch.stack(last).chunk(2 if is_lstm else 1, dim=-1)
    return x, h, c[0] if is_lstm else h


def _gates(x: Tensor, weights: Sequence[Tensor], is_lstm: bool, reverse: bool) -> tuple[Tensor, Tensor]:
    u, w, bias, second = (t.detach() for t in weights)
    n, wt = w.shape[-1], w.mT.contiguous()

    def lstm(row: Tensor, state: Tensor) -> Tensor:
        h, c = state.chunk(2, dim=-1)
        i, f, g, o = (row + second + h @ wt).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.cat([torch.sigmoid(o) * torch.tanh(c), c], dim=-1)

    def gru(row: Tensor, h: Tensor) -> Tensor:
        moved = h @ wt + second
        r, z = torch.sigmoid(row[:, : 2 * n] + moved[:, : 2 * n]).chunk(2, dim=-1)
        new = torch.tanh(row[:, 2 * n :] + r * moved[:, 2 * n :])
        return new + z * (h - new)

    zero = x.new_zeros(x.shape[1], (1 + is_lstm) * n)
    out, last = exported_loop(lstm if is_lstm else gru, x @ u.mT + bias, zero, reverse)
    return out[..., :n], last


def exported_loop(step: Step, rows: Tensor, h0: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Runs any step over projected inputs (T, B, .); torch's scan fails unless all tensors are detached."""

    def combine(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        h = step(row, h)
        return h, h.clone()

    if not torch.compiler.is_dynamo_compiling() and not all(isinstance(size, int) for size in rows.shape):
        # torch compiles its scan; what it has kept of an export at fixed sizes would fix those of this one.
        torch.compiler.reset()
    last, out = higher_order_scan(combine, h0.contiguous(), rows.flip(0) if reverse else rows)
    return (out.flip(0) if reverse else out), last


def _parts(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag if z.is_complex() else torch.zeros_like(z)], dim=-1)
