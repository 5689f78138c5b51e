"""The fast scan with its derivative, once differentiable, under autograd, torch.func and compilers."""

from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_jit_traced, is_transformed
from stiefelkit.errors import OptionError
from stiefelkit.functional._function import Function
from stiefelkit.functional._scan.backends import GATED
from stiefelkit.functional._scan.folding import fold, is_foldable, one_by_one, sample_gradients, unfold
from stiefelkit.functional._scan.operators import (
    scan_backward,
    scan_deltas,
    scan_forward,
    scan_last,
    scan_last_backward,
)

__all__ = ["fused_scan"]

TENSORS = ("x", "w", "h0", "u", "bias", "activation_bias")
SETTINGS = ("activation", "sizes", "reverse", "backend")
FORWARD = (*TENSORS, *SETTINGS, "keep", "half")
BACKWARD = ("g_out", "g_last", "out", "saved", *TENSORS, *SETTINGS, "needs", "half")
DELTAS = BACKWARD[:-2]


def fused_scan(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    u: Tensor | None,
    bias: Tensor | None,
    activation_bias: Tensor | None,
    *,
    activation: str,
    sizes: tuple[int, ...] | None,
    reverse: bool,
    backend: str,
    last_only: bool,
    half: bool,
) -> tuple[Tensor | None, Tensor]:
    """Runs a scan with a fast backend; see `scan`."""
    tensors = (x, w, h0, u, bias, activation_bias)
    keep = _may_be_differentiated(tensors)
    settings = (activation, sizes, reverse, backend, keep, half)
    if last_only:
        return None, _LastScan.apply(*tensors, *settings)[0]
    out, last, _ = _Scan.apply(*tensors, *settings[:-2], keep and backend != GATED, half)
    return out, last


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
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise OptionError('scan needs backend="reference" for second derivatives, got a fast one.')


class _Scan(_Fast):
    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor,
        w: Tensor,
        h0: Tensor,
        u: Tensor | None,
        bias: Tensor | None,
        activation_bias: Tensor | None,
        activation: str,
        sizes: tuple[int, ...] | None,
        reverse: bool,
        backend: str,
        keep: bool,
        half: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return scan_forward(x, w, h0, u, bias, activation_bias, activation, sizes, reverse, backend, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        out, _, saved = output
        ctx.save_for_backward(out, saved, *inputs[: len(TENSORS)])
        ctx.settings, ctx.half = inputs[len(TENSORS) : -2], inputs[-1]
        ctx.mark_non_differentiable(saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g_out: Tensor | None, g_last: Tensor | None, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if g_out is None and g_last is None:
            return (None,) * len(FORWARD)
        needs = ctx.needs_input_grad[: len(TENSORS)]
        found = _ScanBackward.apply(g_out, g_last, *ctx.saved_tensors, *ctx.settings, needs, ctx.half)
        return _wanted(found, needs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:  # type: ignore[override]
        if not is_foldable(in_dims, FORWARD, args):
            return one_by_one(_Scan.apply, info, in_dims, args)
        out, last, saved = _Scan.apply(*fold(info, in_dims, FORWARD, args))
        return (unfold(info, out, 1), unfold(info, last, 0), unfold(info, saved, 1)), (1, 0, 1)


class _ScanBackward(_Once):
    @staticmethod
    def forward(  # type: ignore[override]
        g_out: Tensor | None,
        g_last: Tensor | None,
        out: Tensor,
        saved: Tensor,
        x: Tensor,
        w: Tensor,
        h0: Tensor,
        u: Tensor | None,
        bias: Tensor | None,
        activation_bias: Tensor | None,
        activation: str,
        sizes: tuple[int, ...] | None,
        reverse: bool,
        backend: str,
        needs: tuple[bool, ...],
        half: bool,
    ) -> tuple[Tensor, ...]:
        return tuple(
            scan_backward(
                g_out,
                g_last,
                out,
                saved,
                x,
                w,
                h0,
                u,
                bias,
                activation_bias,
                activation,
                sizes,
                reverse,
                backend,
                needs,
                half,
            )
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:  # type: ignore[override]
        if args[BACKWARD.index("backend")] == GATED or not is_foldable(in_dims, BACKWARD, args):
            return one_by_one(_ScanBackward.apply, info, in_dims, args)
        given = dict(zip(BACKWARD, fold(info, in_dims, BACKWARD, args), strict=True))
        delta, dh0 = _Deltas.apply(*(given[name] for name in DELTAS))
        rows = {name: unfold(info, given[name], 1) for name in ("x", "out")}
        found = sample_gradients(
            unfold(info, delta, 1),
            h0=unfold(info, given["h0"], 0),
            u=given["u"],
            reverse=given["reverse"],
            half=given["half"],
            **rows,
        )
        found["h0"] = unfold(info, dh0, 0)
        dims: dict[str, int | None] = {name: 1 if name == "x" else 0 for name in TENSORS}
        for name, needed in zip(TENSORS, given["needs"], strict=True):
            if not needed or given[name] is None:
                found[name], dims[name] = delta.new_empty(0), None
        return tuple(found[name] for name in TENSORS), tuple(dims[name] for name in TENSORS)


class _Deltas(_Once):
    @staticmethod
    def forward(  # type: ignore[override]
        g_out: Tensor | None,
        g_last: Tensor | None,
        out: Tensor,
        saved: Tensor,
        x: Tensor,
        w: Tensor,
        h0: Tensor,
        u: Tensor | None,
        bias: Tensor | None,
        activation_bias: Tensor | None,
        activation: str,
        sizes: tuple[int, ...] | None,
        reverse: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        return scan_deltas(
            g_out, g_last, out, saved, x, w, h0, u, bias, activation_bias, activation, sizes, reverse, backend
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:  # type: ignore[override]
        if not is_foldable(in_dims, DELTAS, args):
            return one_by_one(_Deltas.apply, info, in_dims, args)
        delta, dh0 = _Deltas.apply(*fold(info, in_dims, DELTAS, args))
        return (unfold(info, delta, 1), unfold(info, dh0, 0)), (1, 0)


class _LastScan(_Fast):
    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor,
        w: Tensor,
        h0: Tensor,
        u: Tensor | None,
        bias: Tensor | None,
        activation_bias: Tensor | None,
        activation: str,
        sizes: tuple[int, ...] | None,
        reverse: bool,
        backend: str,
        keep: bool,
        half: bool,
    ) -> tuple[Tensor, Tensor]:
        return scan_last(x, w, h0, u, bias, activation_bias, activation, sizes, reverse, backend, keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1], *inputs[: len(TENSORS)])
        ctx.settings, ctx.half = inputs[len(TENSORS) : -2], inputs[-1]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g_last: Tensor | None, _: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if g_last is None:
            return (None,) * len(FORWARD)
        needs = ctx.needs_input_grad[: len(TENSORS)]
        found = _LastScanBackward.apply(g_last, *ctx.saved_tensors, *ctx.settings, needs, ctx.half)
        return _wanted(found, needs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:  # type: ignore[override]
        if not is_foldable(in_dims, FORWARD, args):
            return one_by_one(_LastScan.apply, info, in_dims, args)
        last, marks = _LastScan.apply(*fold(info, in_dims, FORWARD, args))
        return (unfold(info, last, 0), unfold(info, marks, 1)), (0, 1)


class _LastScanBackward(_Once):
    @staticmethod
    def forward(  # type: ignore[override]
        g_last: Tensor,
        marks: Tensor,
        x: Tensor,
        w: Tensor,
        h0: Tensor,
        u: Tensor | None,
        bias: Tensor | None,
        activation_bias: Tensor | None,
        activation: str,
        sizes: tuple[int, ...] | None,
        reverse: bool,
        backend: str,
        needs: tuple[bool, ...],
        half: bool,
    ) -> tuple[Tensor, ...]:
        return tuple(
            scan_last_backward(
                g_last, marks, x, w, h0, u, bias, activation_bias, activation, sizes, reverse, backend, needs, half
            )
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:  # type: ignore[override]
        return one_by_one(_LastScanBackward.apply, info, in_dims, args)


def _wanted(found: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Any, ...]:
    wanted = [gradient if needed else None for gradient, needed in zip(found, needs, strict=True)]
    return (*wanted, *(None,) * (len(FORWARD) - len(TENSORS)))
