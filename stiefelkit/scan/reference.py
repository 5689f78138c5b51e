"""The recurrence as an autograd loop: slow, differentiable any number of times, the yardstick of faster ones."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from stiefelkit.errors import OptionError
from stiefelkit.functional._arithmetic.function import Function
from stiefelkit.functional._arithmetic.product import FullPrecision, is_lowered, product
from stiefelkit.scan.activations import find_activation
from stiefelkit.scan.checks import Recurrence, Tensors

Step = Callable[[Tensor, Tensor], Tensor]
"""Takes projected inputs and a state, both (B, .), to the next state."""


def reference_scan(recurrence: Recurrence, tensors: Tensors) -> tuple[Tensor | None, Tensor]:
    """Runs a recurrence step by step; see `scan` for the tensors, which are checked there."""
    x, w, h0, u, bias, activation_bias = tensors
    with FullPrecision(x.device):
        times = loop_product(x.device)
        rows = x.to(w.dtype).contiguous()
        rows = rows if u is None else times(rows, u.mT)
        rows = rows if bias is None else rows + bias
        add = _HalfGradient.of if recurrence.half else torch.addmm
        wt, function = w.mT.contiguous(), find_activation(recurrence.activation, w.is_complex()).function
        inner = () if activation_bias is None else (activation_bias,)

        def step(row: Tensor, h: Tensor) -> Tensor:
            moved = add(row, h, wt) if recurrence.half or times is not product else row + product(h, wt)
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


class _HalfGradient(Function):
    """row + h @ wt, whose derivative by wt has no Im h: wt as the first block row of a free [[Re, Im], [-Im, Re]]."""

    @staticmethod
    def forward(row: Tensor, h: Tensor, wt: Tensor) -> Tensor:
        return row + product(h, wt) if torch.compiler.is_compiling() else torch.addmm(row, h, wt)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, h, wt = inputs
        ctx.save_for_backward(h, wt)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, ...]:
        return g, *_HalfGradientBackward.of(g, *ctx.saved_tensors)

    @staticmethod
    def tangent(ctx: object, *tangents: object) -> None:
        raise OptionError('scan needs gradient="exact" for forward mode, got "half".')


class _HalfGradientBackward(Function):
    """Refuses to be differentiated; torch's once_differentiable gives zero under torch.func."""

    @staticmethod
    def forward(g: Tensor, h: Tensor, wt: Tensor) -> tuple[Tensor, Tensor]:
        real = h.real.mT
        return product(g, wt.mH), torch.complex(product(real, g.real), product(real, g.imag))

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, ...]:
        raise OptionError('scan needs gradient="exact" for second derivatives, got "half".')
