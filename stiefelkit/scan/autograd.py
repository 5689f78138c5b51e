"""The fast scan with its derivative, once differentiable, under autograd, torch.func and compilers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_jit_traced, is_transformed
from stiefelkit.errors import OptionError
from stiefelkit.functional._arithmetic.function import Context, Function
from stiefelkit.functional._arithmetic.product import opaque
from stiefelkit.scan.activations import find_activation
from stiefelkit.scan.checks import SETTINGS, Recurrence, Tensors
from stiefelkit.scan.engines import find_engine
from stiefelkit.scan.engines.problem import Outcome, Problem, segments

TENSORS = Tensors.__match_args__

Arguments = Sequence[Any]
Dims = Sequence[int | None]


def fused_scan(recurrence: Recurrence, tensors: Tensors) -> tuple[Tensor | None, Tensor]:
    """Runs a recurrence with a fast backend; see `scan` for the tensors."""
    out, last, _ = _Scan.of(*tensors, recurrence, _may_be_differentiated(tensors))
    return None if recurrence.last_only else out, last


def _may_be_differentiated(tensors: Tensors) -> bool:
    """Returns whether a backward pass may come; asked here, as grad mode is off inside of forward."""
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
    def tangent(ctx: object, *tangents: object) -> None:
        raise OptionError('scan needs backend="reference" for forward mode, got a fast one.')


class _Scan(_Fast):
    """The states, or with `last_only` the checkpoints; the last states; and what is saved besides them."""

    @staticmethod
    def forward(x, w, h0, u, bias, activation_bias, recurrence, keep) -> tuple[Tensor, Tensor, Tensor]:
        return scan_forward(x, w, h0, u, bias, activation_bias, *recurrence, keep)

    @staticmethod
    def setup_context(ctx: Context, inputs: Arguments, output: tuple[Tensor, Tensor, Tensor]) -> None:
        out, _, saved = output
        *tensors, ctx.recurrence, _ = inputs
        ctx.save_for_backward(out, saved, *tensors)
        ctx.mark_non_differentiable(*((out, saved) if ctx.recurrence.last_only else (saved,)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, g_out: Tensor | None, g_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g_out is None and g_last is None:
            return (None,) * (len(TENSORS) + 2)
        out, saved, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[: len(TENSORS)]
        gradients = _ScanBackward.of(*tensors, ctx.recurrence, out, saved, g_out, g_last, needs)
        return (*(g if needed else None for g, needed in zip(gradients, needs, strict=True)), None, None)

    @staticmethod
    def vmap(info, in_dims: Dims, *args) -> tuple[tuple[Tensor, ...], Dims]:
        return _one_by_one(_Scan.of, info.batch_size, in_dims, args)


class _ScanBackward(_Fast):
    """Refuses to be differentiated; torch's once_differentiable gives zero under torch.func."""

    @staticmethod
    def forward(x, w, h0, u, bias, activation_bias, recurrence, out, saved, g_out, g_last, needs) -> tuple[Tensor, ...]:
        states = out, saved, g_out, g_last
        return tuple(scan_backward(x, w, h0, u, bias, activation_bias, *recurrence, *states, needs))

    @staticmethod
    def backward(ctx: object, *gradients: object) -> tuple[Tensor, ...]:
        raise OptionError('scan needs backend="reference" for second derivatives, got a fast one.')

    @staticmethod
    def vmap(info, in_dims: Dims, *args) -> tuple[tuple[Tensor, ...], Dims]:
        return _one_by_one(_ScanBackward.of, info.batch_size, in_dims, args)


ARGUMENTS = f"Tensor x, Tensor w, Tensor h0, Tensor? u, Tensor? bias, Tensor? activation_bias, {SETTINGS}"
STATES = "Tensor out, Tensor saved, Tensor? g_out, Tensor? g_last"


def _split(args: Arguments) -> tuple[Tensors, Recurrence, Arguments]:
    end = len(TENSORS) + len(Recurrence.__match_args__)
    return Tensors(*args[: len(TENSORS)]), Recurrence(*args[len(TENSORS) : end]), args[end:]


def _like_forward(*args) -> tuple[Tensor, Tensor, Tensor]:
    (x, w, h0, *_), recurrence, (keep,) = _split(args)
    n, rows = h0.shape[-1], x.shape[:-1]
    width, dtype = find_activation(recurrence.activation, w.is_complex()).saved_like(n, w.dtype)
    # Between checkpoints everything is worked out again.
    saved = rows if keep and not recurrence.last_only else (0, *rows[1:])
    if recurrence.last_only:
        steps, count = x.shape[0] if recurrence.sizes is None else len(recurrence.sizes), 0
        if keep:  # of a symbolic number of steps, some number
            count = len(segments(steps)) if isinstance(steps, int) else torch.library.get_ctx().new_dynamic_size()
        rows = (count, *h0.shape[:-1])
    return x.new_empty(*rows, n, dtype=h0.dtype), h0.new_empty(h0.shape), x.new_empty(*saved, width, dtype=dtype)


@opaque(_like_forward, dims=None, schema=f"({ARGUMENTS}, bool keep) -> (Tensor, Tensor, Tensor)")
def scan_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns all states or checkpoints, the last ones, and (with `keep`) what the derivative needs besides."""
    tensors, recurrence, (keep,) = _split(args)
    return find_engine(recurrence).forward(Problem(recurrence, tensors), keep)


def _like_backward(*args) -> list[Tensor]:
    tensors, needs = args[: len(TENSORS)], args[-1]
    return _wanted(needs, tensors, [None if t is None else t.new_empty(t.shape) for t in tensors])


def _wanted(needs: Sequence[bool], tensors: Arguments, gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [
        gradient if needed and t is not None and gradient is not None else tensors[0].new_empty(0)
        for needed, t, gradient in zip(needs, tensors, gradients, strict=True)
    ]


@opaque(_like_backward, dims=None, schema=f"({ARGUMENTS}, {STATES}, bool[] needs) -> Tensor[]")
def scan_backward(*args: Any) -> list[Tensor]:
    """Returns the gradients by the six tensors of `scan_forward`, empty ones where none is needed."""
    tensors, recurrence, (*states, needs) = _split(args)
    gradients = find_engine(recurrence).backward(Problem(recurrence, tensors), Outcome(*states), needs)
    return _wanted(needs, tensors, gradients)


def _one_by_one(
    call: Callable[..., Sequence[Tensor]], count: int, in_dims: Dims, args: Arguments
) -> tuple[tuple[Tensor, ...], Dims]:
    """Calls a function for each index of the new dimension, and stacks what it returns."""
    results = [
        call(*(arg.select(dim, i) if isinstance(dim, int) else arg for dim, arg in zip(in_dims, args, strict=True)))
        for i in range(count)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)
