"""The recurrence as an autograd loop, differentiable any number of times, and as one node of an ONNX file.

The loop is slow, and the yardstick of faster ones; the node is the Scan of ONNX's standard, for any number of steps.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stiefelkit._torch import higher_order_scan
from stiefelkit.errors import OptionError
from stiefelkit.functional._arithmetic.product import FullPrecision, is_lowered, product
from stiefelkit.scan.activations import find_activation
from stiefelkit.scan.checks import Recurrence, Tensors
from stiefelkit.scan.structures.structure import from_blocks, matrix_blocks, row_blocks

Step = Callable[[Tensor, Tensor], Tensor]  # takes projected inputs and a state, both (B, .), to the next state


def reference_scan(recurrence: Recurrence, tensors: Tensors) -> tuple[Tensor | None, Tensor]:
    """Runs a recurrence step by step; see `scan` for the tensors, which are checked there."""
    x, w, h0, u, bias, activation_bias = tensors
    with FullPrecision(x.device):
        times = loop_product(x.device)
        rows = x.to(w.dtype).contiguous()
        rows = rows if u is None else times(rows, u.mT)
        rows = rows if bias is None else rows + bias
        wt, function = w.mT.contiguous(), find_activation(recurrence.activation, w.is_complex()).function
        inner = () if activation_bias is None else (activation_bias,)

        def step(row: Tensor, h: Tensor) -> Tensor:
            moved = torch.addmm(row, h, wt) if times is not product else row + product(h, wt)
            return function(moved, *inner)

        return loop(step, rows, h0, recurrence.sizes, recurrence.reverse, recurrence.last_only)


def loop(
    step: Step,
    rows: Tensor,
    h0: Tensor,
    batch_sizes: Sequence[int] | None = None,
    reverse: bool = False,
    last_only: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """Runs any step over projected inputs (T, B, .), or packed ones; arguments and results are those of `scan`."""
    sizes = batch_sizes
    steps = rows.unbind(0) if sizes is None else rows.split(list(sizes))
    h, outputs, ended = (h0 if sizes is None else h0[: steps[-1 if reverse else 0].shape[0]]), [], []
    for row in reversed(steps) if reverse else steps:
        if sizes is not None and (alive := row.shape[0]) != h.shape[0]:
            ended.append(h[alive:])
            h = torch.cat([h[:alive], h0[h.shape[0] : alive]])
        h = step(row, h)
        outputs.append(h)
    last = torch.cat([h, *reversed(ended)]) if ended else h
    if last_only:
        return None, last
    ordered = outputs[::-1] if reverse else outputs
    return (torch.stack(ordered) if sizes is None else torch.cat(ordered)), last


def loop_product(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a product with derivatives in full precision; torch's own, which is lighter, where none is lowered."""
    return product if torch.compiler.is_compiling() or is_lowered(device) else torch.matmul


def exported_scan(recurrence: Recurrence, tensors: Tensors) -> tuple[Tensor | None, Tensor]:
    """Runs a recurrence; see `scan` for the tensors, which are checked there. Complex states go as [Re h | Im h]."""
    x, w, h0, u, bias, inner = tensors
    if recurrence.sizes is not None:  # which a graph cannot hold
        raise OptionError("scan needs sequences of one length for ONNX, got batch_sizes.")
    is_complex = w.is_complex()
    function = find_activation(recurrence.activation, is_complex).of_rows
    if is_complex:
        w, u = matrix_blocks(w).mT, None if u is None else matrix_blocks(u).mT
        x = row_blocks(x) if x.is_complex() else torch.cat([x, torch.zeros_like(x)], -1)
        h0, bias = row_blocks(h0), None if bias is None else row_blocks(bias)
    rows = x if u is None else x @ u.mT
    rows = rows if bias is None else rows + bias
    # Detached as real numbers, since ONNX detaches no complex ones.
    rows, wt, h0 = rows.detach(), w.mT.contiguous().detach(), h0.detach()
    biases = () if inner is None else (inner.detach(),)

    def step(row: Tensor, h: Tensor) -> Tensor:
        return function(row + h @ wt, *biases)

    out, last = exported_loop(step, rows, h0, recurrence.reverse)
    if is_complex:
        out, last = from_blocks(out), from_blocks(last)
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
