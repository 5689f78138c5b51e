"""The recurrence as an autograd loop: slow, differentiable any number of times, the yardstick of faster ones."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit.errors import DtypeError, OptionError, ShapeError, did_you_mean
from stiefelkit.functional._activations import find_activation
from stiefelkit.functional._function import Function

__all__ = ["scan"]

GRADIENTS = ("exact", "reference")


def scan(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    *,
    u: Tensor | None = None,
    bias: Tensor | None = None,
    activation_bias: Tensor | None = None,
    activation: str = "modrelu",
    batch_sizes: Sequence[int] | None = None,
    reverse: bool = False,
    last_only: bool = False,
    gradient: str = "exact",
) -> tuple[Tensor | None, Tensor]:
    """Runs h_t = act(x_t u^T + bias + h_{t-1} w^T) over time.

    Args:
        x: inputs, time-major, shape (T, B, m), real or complex; m = n without `u`. With `batch_sizes`, the packed
            rows (sum of sizes, m) of torch's PackedSequence.
        w: recurrent matrix, shape (n, n).
        h0: first state, shape (B, n).
        u: input matrix, shape (n, m).
        bias: added to the input projection, shape (n,).
        activation_bias: second argument of the activation, shape (n,): modReLU's real bias.
        activation: a name in `stiefelkit.functional.ACTIVATIONS`.
        batch_sizes: rows alive at each step, not increasing, for sequences of different lengths.
        reverse: run from the last step to the first; outputs stay at their own steps.
        last_only: return None for the outputs.
        gradient: "exact", or "reference": the half of dL/dw that the code of Wisdom et al. 2016 takes, the sum over
            time of dL/dy_t Re(h_t)^T instead of dL/dy_t h_t^H, with y_t = w h_t. Complex w only, and only once
            differentiable; dL/dh is exact in both.

    Returns:
        Outputs of shape (T, B, n), packed rows with `batch_sizes`, and the last state of every sequence, (B, n).

    Raises:
        ShapeError: sizes do not fit together.
        OptionError: `gradient` is neither.
        DtypeError: half of the gradient of a real w.
    """
    _check_shapes(x, w, h0, u, batch_sizes)
    if gradient not in GRADIENTS:
        raise OptionError(f"scan knows no gradient {gradient!r}{did_you_mean(gradient, GRADIENTS)}")
    if gradient == "reference" and not w.is_complex():
        raise DtypeError(f'scan needs a complex w with gradient="reference", got {w.dtype}.')
    step = torch.addmm if gradient == "exact" else _HalfGradient.apply
    act = find_activation(activation, w.is_complex())
    rows = x.to(w.dtype).contiguous()
    rows = rows if u is None else rows @ u.mT
    rows = rows if bias is None else rows + bias
    wt = w.mT.contiguous()
    packed = batch_sizes is not None
    steps = rows.split(list(batch_sizes)) if batch_sizes is not None else rows.unbind(0)
    h, outputs, ended = (h0[: steps[-1 if reverse else 0].shape[0]] if packed else h0), [], []
    for row in reversed(steps) if reverse else steps:
        if packed and (alive := row.shape[0]) != h.shape[0]:
            ended.append(h[alive:])
            h = torch.cat([h[:alive], h0[h.shape[0] : alive]])
        h = act(step(row, h, wt), activation_bias)
        outputs.append(h)
    last = torch.cat([h, *reversed(ended)]) if ended else h
    if last_only:
        return None, last
    ordered = outputs[::-1] if reverse else outputs
    return (torch.cat(ordered) if packed else torch.stack(ordered)), last


class _HalfGradient(Function):
    """row + h @ wt, whose derivative by wt leaves out Im h: wt as the first block row of a free [[Re, Im], [-Im, Re]].

    Rows [Re h | Im h] times that matrix are [Re y | Im y], so its first block row meets Re h only.
    """

    @staticmethod
    def forward(row: Tensor, h: Tensor, wt: Tensor) -> Tensor:  # type: ignore[override]
        return torch.addmm(row, h, wt)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, h, wt = inputs
        ctx.save_for_backward(h, wt)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return g, *_HalfGradientBackward.apply(g, *ctx.saved_tensors)


class _HalfGradientBackward(Function):
    """Refuses to be differentiated; torch's once_differentiable gives zero under torch.func."""

    @staticmethod
    def forward(g: Tensor, h: Tensor, wt: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        real = h.real.mT
        return g @ wt.mH, torch.complex(real @ g.real, real @ g.imag)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        raise OptionError('scan needs gradient="exact" for second derivatives, got "reference".')


def _check_shapes(x: Tensor, w: Tensor, h0: Tensor, u: Tensor | None, batch_sizes: Sequence[int] | None) -> None:
    n = w.shape[-1]
    if w.dim() != 2 or w.shape[0] != n:
        raise ShapeError(f"scan needs a square w, got shape {tuple(w.shape)}.")
    if x.dim() != (3 if batch_sizes is None else 2) or x.shape[0] == 0:
        wanted = "(T, B, m) with T >= 1" if batch_sizes is None else "(rows, m) with batch_sizes"
        raise ShapeError(f"scan needs x of shape {wanted}, got {tuple(x.shape)}.")
    if u is not None and u.shape != (n, x.shape[-1]):
        raise ShapeError(f"scan needs u of shape {(n, x.shape[-1])}, got {tuple(u.shape)}.")
    if u is None and x.shape[-1] != n:
        raise ShapeError(f"scan without u needs x of width n = {n}, got {x.shape[-1]}.")
    batch = x.shape[1] if batch_sizes is None else batch_sizes[0]
    if h0.shape != (batch, n):
        raise ShapeError(f"scan needs h0 of shape {(batch, n)}, got {tuple(h0.shape)}.")
    if batch_sizes is not None and any(b > a or b < 1 for a, b in itertools.pairwise(batch_sizes)):
        raise ShapeError(f"scan needs batch_sizes that do not increase, got {list(batch_sizes)}.")
