"""The fast scan with its derivative, once differentiable, under autograd, torch.func and compilers."""

from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_jit_traced, is_transformed
from stiefelkit.errors import OptionError
from stiefelkit.functional._function import Function
from stiefelkit.scan.folding import fold, is_foldable, one_by_one, sample_gradients, unfold
from stiefelkit.scan.operators import scan_backward, scan_deltas, scan_forward
from stiefelkit.scan.recurrence import GATED, TENSORS, Recurrence

__all__ = ["fused_scan"]

FORWARD = (*TENSORS, "recurrence", "keep")
BACKWARD = (*TENSORS, "recurrence", "out", "saved", "g_out", "g_last", "needs")
DELTAS = BACKWARD[:-1]


def fused_scan(recurrence: Recurrence, *tensors: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Runs a recurrence with a fast backend; see `scan` for the tensors."""
    out, last, _ = _Scan.apply(*tensors, recurrence, _may_be_differentiated(tensors))
    return None if recurrence.last_only else out, last


def _may_be_differentiated(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether a backward pass may come; asked here, as grad mode is off inside of forward."""
    if is_jit_traced():
        return True
    if not torch.is_grad_enabled():
        return False
    # A tensor that is mapped over does not say whether the one it stands for requires a gradient.
    is_mapped = not torch.compiler.is_compiling() and is_transformed()
    return is_mapped or any(t is not None and t.requires_grad for t in tensors)


# Dynamo tells a forward without ctx from one with it by the number of its arguments: none may be starred.


class _Fast(Function):
    """A function with a backward of its own and a vmap rule, and without tangents."""

    generate_vmap_rule = False

    @staticmethod
    def tangent(ctx: Any, *tangents: Any) -> Any:
        raise OptionError('scan needs backend="reference" for forward mode, got a fast one.')


class _Once(_Fast):
    """A function that refuses to be differentiated; torch's once_differentiable gives zero under torch.func."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise OptionError('scan needs backend="reference" for second derivatives, got a fast one.')


class _Scan(_Fast):
    """The states, or with `last_only` the checkpoints; the last states; and what is saved besides them."""

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, w: Tensor, h0: Tensor, u: Any, bias: Any, activation_bias: Any, recurrence: Recurrence, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return scan_forward(x, w, h0, u, bias, activation_bias, *recurrence, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        out, _, saved = output
        *tensors, ctx.recurrence, _ = inputs
        ctx.save_for_backward(out, saved, *tensors)
        ctx.mark_non_differentiable(*((out, saved) if ctx.recurrence.last_only else (saved,)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g_out: Tensor | None, g_last: Tensor | None, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if g_out is None and g_last is None:
            return (None,) * len(FORWARD)
        out, saved, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[: len(TENSORS)]
        gradients = _ScanBackward.apply(*tensors, ctx.recurrence, out, saved, g_out, g_last, needs)
        return (*(g if needed else None for g, needed in zip(gradients, needs, strict=True)), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:  # type: ignore[override]
        if not is_foldable(in_dims, FORWARD, args):
            return one_by_one(_Scan.apply, info, in_dims, args)
        out, last, saved = _Scan.apply(*fold(info, in_dims, FORWARD, args))
        return (unfold(info, out, 1), unfold(info, last, 0), unfold(info, saved, 1)), (1, 0, 1)


class _ScanBackward(_Once):
    @staticmethod
    def forward(x, w, h0, u, bias, activation_bias, recurrence, out, saved, g_out, g_last, needs) -> tuple[Tensor, ...]:
        states = out, saved, g_out, g_last
        return tuple(scan_backward(x, w, h0, u, bias, activation_bias, *recurrence, *states, needs))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:  # type: ignore[override]
        recurrence = args[len(TENSORS)]
        if (
            recurrence.cell == GATED
            or recurrence.structure
            or recurrence.last_only
            or not is_foldable(in_dims, BACKWARD, args)
        ):
            return one_by_one(_ScanBackward.apply, info, in_dims, args)
        folded = dict(zip(BACKWARD, fold(info, in_dims, BACKWARD, args), strict=True))
        delta, dh0 = _Deltas.apply(*(folded[name] for name in DELTAS))
        rows = {name: unfold(info, folded[name], 1) for name in ("x", "out", "saved")}
        h0 = unfold(info, folded["h0"], 0)
        gradients = sample_gradients(recurrence, unfold(info, delta, 1), h0=h0, u=folded["u"], **rows)
        gradients["h0"] = unfold(info, dh0, 0)
        dims: dict[str, int | None] = {name: 1 if name == "x" else 0 for name in TENSORS}
        for name, needed in zip(TENSORS, folded["needs"], strict=True):
            if not needed or folded[name] is None:
                gradients[name], dims[name] = delta.new_empty(0), None
        return tuple(gradients[name] for name in TENSORS), tuple(dims[name] for name in TENSORS)


class _Deltas(_Once):
    @staticmethod
    def forward(x, w, h0, u, bias, activation_bias, recurrence, out, saved, g_out, g_last) -> tuple[Tensor, Tensor]:
        return scan_deltas(x, w, h0, u, bias, activation_bias, *recurrence, out, saved, g_out, g_last)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:  # type: ignore[override]
        if not is_foldable(in_dims, DELTAS, args):
            return one_by_one(_Deltas.apply, info, in_dims, args)
        delta, dh0 = _Deltas.apply(*fold(info, in_dims, DELTAS, args))
        return (unfold(info, delta, 1), unfold(info, dh0, 0)), (1, 0)
