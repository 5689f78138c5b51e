"""Recurrences in operators that ONNX has: one Scan node of its standard, for any number of steps."""

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
