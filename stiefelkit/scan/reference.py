"""The recurrence as an autograd loop: slow, differentiable any number of times, the yardstick of faster ones."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit.errors import OptionError
from stiefelkit.functional._activations import find_activation
from stiefelkit.functional._function import Function
from stiefelkit.functional._product import FullPrecision, is_lowered, product

__all__ = ["multiplication", "reference_scan"]


def reference_scan(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    u: Tensor | None,
    bias: Tensor | None,
    activation_bias: Tensor | None,
    *,
    activation: str,
    sizes: Sequence[int] | None,
    reverse: bool,
    last_only: bool,
    half: bool,
) -> tuple[Tensor | None, Tensor]:
    """Runs a scan step by step; see `scan` for the arguments, which are checked there."""
    with FullPrecision(x.device):
        return _loop(x, w, h0, u, bias, activation_bias, activation, sizes, reverse, last_only, half)


def _loop(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    u: Tensor | None,
    bias: Tensor | None,
    activation_bias: Tensor | None,
    activation: str,
    sizes: Sequence[int] | None,
    reverse: bool,
    last_only: bool,
    half: bool,
) -> tuple[Tensor | None, Tensor]:
    times = multiplication(x.device)
    step = _HalfGradient.apply if half else torch.addmm
    if not half and times is product:
        step = _full_step
    act = find_activation(activation, w.is_complex())
    rows = x.to(w.dtype).contiguous()
    rows = rows if u is None else times(rows, u.mT)
    rows = rows if bias is None else rows + bias
    wt = w.mT.contiguous()
    steps = rows.unbind(0) if sizes is None else rows.split(list(sizes))
    h, outputs, ended = (h0 if sizes is None else h0[: steps[-1 if reverse else 0].shape[0]]), [], []
    for row in reversed(steps) if reverse else steps:
        if sizes is not None and (alive := row.shape[0]) != h.shape[0]:
            ended.append(h[alive:])
            h = torch.cat([h[:alive], h0[h.shape[0] : alive]])
        h = act(step(row, h, wt), activation_bias)
        outputs.append(h)
    last = torch.cat([h, *reversed(ended)]) if ended else h
    if last_only:
        return None, last
    ordered = outputs[::-1] if reverse else outputs
    return (torch.stack(ordered) if sizes is None else torch.cat(ordered)), last


def multiplication(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """The matrix product for a loop: one whose derivatives, which are taken later, are in full precision too.

    Where products are not lowered at all that is torch's own, which is lighter.
    """
    return product if torch.compiler.is_compiling() or is_lowered(device) else torch.matmul


def _full_step(row: Tensor, h: Tensor, wt: Tensor) -> Tensor:
    return row + product(h, wt)


class _HalfGradient(Function):
    """row + h @ wt, whose derivative by wt leaves out Im h: wt as the first block row of a free [[Re, Im], [-Im, Re]].

    Rows [Re h | Im h] times that matrix are [Re y | Im y], so its first block row meets Re h only.
    """

    @staticmethod
    def forward(row: Tensor, h: Tensor, wt: Tensor) -> Tensor:  # type: ignore[override]
        return row + product(h, wt) if torch.compiler.is_compiling() else torch.addmm(row, h, wt)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, h, wt = inputs
        ctx.save_for_backward(h, wt)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return g, *_HalfGradientBackward.apply(g, *ctx.saved_tensors)

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Any:
        raise OptionError('scan needs gradient="exact" for forward mode, got "reference".')


class _HalfGradientBackward(Function):
    """Refuses to be differentiated; torch's once_differentiable gives zero under torch.func."""

    @staticmethod
    def forward(g: Tensor, h: Tensor, wt: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        real = h.real.mT
        return product(g, wt.mH), torch.complex(product(real, g.real), product(real, g.imag))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        raise OptionError('scan needs gradient="exact" for second derivatives, got "reference".')
