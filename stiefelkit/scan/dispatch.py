"""`scan`: checks, the choice among backends, and what the fast ones are under autograd, torch.func and compilers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_exported, is_in_forward_mode, is_jit_traced, is_mapped
from stiefelkit.errors import DtypeError, OptionError, ShapeError, UnknownNameError, did_you_mean, needs, shown
from stiefelkit.functional._arithmetic.function import Context, Function
from stiefelkit.functional._arithmetic.product import may_be_differentiated, opaque
from stiefelkit.numbers import integer, optional
from stiefelkit.scan.activations import Activation, find_activation
from stiefelkit.scan.checks import (
    DTYPES,
    SETTINGS,
    Recurrence,
    Tensors,
    check_pairs,
    check_shapes,
    lengths,
    row_counts,
    width_of,
)
from stiefelkit.scan.engines import find_engine
from stiefelkit.scan.engines.problem import Outcome, Problem, segments
from stiefelkit.scan.engines.triton import unsupported
from stiefelkit.scan.reference import exported_scan, reference_scan
from stiefelkit.scan.structures import Factored

BACKENDS = ("auto", "reference", "inplace", "triton")
"""Names that `scan` takes as `backend`."""
MIN_FAST_STEPS = 8  # steps below which a loop is faster
TENSORS = Tensors.__match_args__
Arguments = Sequence[Any]
Dims = Sequence[int | None]


def scan(
    x: Tensor,
    w: Tensor | Factored,
    h0: Tensor,
    *,
    u: Tensor | None = None,
    bias: Tensor | None = None,
    activation_bias: Tensor | None = None,
    activation: str = "modrelu",
    batch_sizes: Sequence[int] | None = None,
    reverse: bool = False,
    backend: str = "auto",
    last_only: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """Runs :math:`h_t = act(x_t U^T + b + h_{t-1} W^T)` over time.

    The fast backends keep the states and nothing else of the forward pass (abs, OPLU and the complex modReLU: at most
    half as much again), work out the derivative of the activation from them, and run in full float32 precision whatever
    TF32 and autocast are set to. With `last_only` they keep about :math:`√T` states and find the others again in the
    backward pass. 16-bit w are computed with in float32, and rounded at the end. Only the backend "reference" is
    differentiable twice and in forward mode; "auto" takes it under torch.func's jvp and vmap, where others go sample by
    sample, and for fewer than eight steps.

    Args:
        x: inputs, time-major, shape (T, B, m), real or complex; :math:`m = n` without `u`. With `batch_sizes`, the
            packed rows (sum of sizes, m) of torch's PackedSequence.
        w: recurrent matrix, shape (n, n), or its factors, which "inplace" applies one after the other, and it alone.
        h0: first state, shape (B, n).
        u: input matrix, shape (n, m).
        bias: added to the input projection, shape (n,).
        activation_bias: second argument of the activation, shape (n,): modReLU's real bias.
        activation: one of `stiefelkit.scan.activations.names()`, or "leaky_relu(0.2)" for a slope.
        batch_sizes: rows alive at each step, not increasing, for sequences of different lengths.
        reverse: run from the last step to the first; outputs stay at their own steps.
        backend: "auto", the fastest that can do it (`scan_backend`); "reference", a loop of autograd's; "inplace",
            chunk by chunk in torch operators, for any device; "triton", one kernel for all steps, CUDA.
        last_only: return None for the outputs.

    Returns:
        Outputs of shape (T, B, n), packed rows with `batch_sizes`, and the last state of every sequence, (B, n).

    >>> w = torch.eye(2)
    >>> out, last = scan(torch.ones(3, 1, 2), w, torch.zeros(1, 2), activation="relu")
    >>> last
    tensor([[3., 3.]])
    """
    structure = ""
    if isinstance(w, Factored):
        structure, w = w.structure, w.factors
    given = Tensors(x, w, h0, u, bias, activation_bias)
    for name, tensor in given._asdict().items():
        if tensor is not None and tensor.is_complex() and not w.is_complex():
            raise DtypeError(f"scan needs a complex w for complex {name}, got {w.dtype}.")
    sizes = row_counts("scan", batch_sizes)
    like = w.new_empty(1, 1).expand(w.shape[-1], w.shape[-1]) if structure else w
    (batch, steps), n, m = lengths("scan", x, sizes), width_of("scan", like), x.shape[-1]
    if u is None and m != n:
        raise ShapeError(f"scan without u needs x of width n = {n}, got {m}.")
    check_shapes("scan", u=(u, (n, m)), bias=(bias, (n,)), activation_bias=(activation_bias, (n,)), h0=(h0, (batch, n)))
    act, name = find_activation(activation, w.is_complex()), activation
    chosen = _find_backend(act, like, steps, backend) if not structure or backend != "auto" else "inplace"
    takes_factors = chosen == "inplace" and not is_exported() and not is_jit_traced()
    what = 'backend "auto" or "inplace" for factors, outside of ONNX and torch.jit'
    needs(not structure or takes_factors, OptionError, "scan", what, shown(backend))
    check_pairs(act, n * (1 + w.is_complex()))
    if act.bias_inside:
        if activation_bias is None:
            name = "identity"
        elif activation_bias.is_complex():
            raise DtypeError(f"scan needs a real activation_bias with {activation}, got {activation_bias.dtype}.")
    elif activation_bias is not None:
        bias, activation_bias = activation_bias if bias is None else bias + activation_bias, None
    dtype, real = DTYPES[w.dtype]
    x = x.to(dtype if x.is_complex() or not dtype.is_complex else real)
    u, bias = (None if t is None else t.to(dtype) for t in (u, bias))
    tensors = Tensors(
        x, w.to(dtype), h0.to(dtype), u, bias, None if activation_bias is None else activation_bias.to(real)
    )
    run = exported_scan if is_exported() else reference_scan if chosen == "reference" else fused_scan
    recurrence = Recurrence(name, sizes, bool(reverse), bool(last_only), chosen, structure)
    out, last = run(recurrence, tensors)
    return None if out is None else out.to(given.w.dtype), last.to(given.w.dtype)


def scan_backend(w: Tensor, steps: int | None = None, *, activation: str = "modrelu", backend: str = "auto") -> str:
    """Returns the name of the backend that `scan` takes.

    Args:
        w: the recurrent matrix, shape (n, n): its device, dtype and size decide.
        steps: T; fewer than eight, such as those of a cell, are left to "reference" outside of compiled code, since a
            fast backend takes longer to start. None for many.
        activation: as in `scan`.
        backend: as in `scan`; one that is named is returned, if it can do it.

    >>> scan_backend(torch.eye(4))
    'inplace'
    """
    width_of("scan_backend", w)
    steps = optional(integer(1)).require("scan_backend", "steps", steps)
    return _find_backend(find_activation(activation, w.is_complex()), w, steps, backend)


def _find_backend(activation: Activation, w: Tensor, steps: int | None, backend: str) -> str:
    """Returns the backend that is asked for, if it can run the scan; for "auto" the fastest that can."""
    if w.dtype not in DTYPES:
        raise DtypeError(f"scan needs w of a floating or complex dtype, got {w.dtype}.")
    if backend not in BACKENDS:
        raise UnknownNameError(f"scan has no backend {shown(backend)}{did_you_mean(backend, BACKENDS)}")
    if backend == "auto" and prefers_loop(steps):
        return "reference"
    if backend in ("reference", "inplace") or (backend == "auto" and w.device.type != "cuda"):
        return "inplace" if backend == "auto" else backend
    reason = unsupported(w.device, DTYPES[w.dtype][0], w.shape[-1] * (1 + w.is_complex()), activation)
    if reason and backend == "triton":
        raise OptionError(f"The scan's backend 'triton' needs {reason}.")
    return "inplace" if reason else "triton"


def prefers_loop(steps: int | None) -> bool:
    """Returns whether "auto" takes the loop: for few steps, in forward mode, and under vmap."""
    if torch.compiler.is_compiling():
        return False
    return (steps is not None and steps < MIN_FAST_STEPS) or is_in_forward_mode() or is_mapped()


def fused_scan(recurrence: Recurrence, tensors: Tensors) -> tuple[Tensor | None, Tensor]:
    """Runs a recurrence with a fast backend; see `scan` for the tensors."""
    out, last, _ = _Scan.of(*tensors, recurrence, may_be_differentiated(*tensors))
    return None if recurrence.last_only else out, last


# Dynamo tells a forward without ctx from one with it by the number of its arguments: none may be starred.


class _Fast(Function):
    """A function with a backward of its own and a vmap rule, and without tangents."""

    generate_vmap_rule = False

    @staticmethod
    def tangent(ctx: object, *tangents: object) -> None:
        raise OptionError('scan needs backend="reference" for forward mode, got a fast one.')

    @classmethod
    def vmap(cls, info, in_dims: Dims, *args) -> tuple[tuple[Tensor, ...], Dims]:
        """Calls itself for each index of the new dimension, and stacks what it returns."""
        results = [
            cls.of(*(a.select(dim, i) if isinstance(dim, int) else a for dim, a in zip(in_dims, args, strict=True)))
            for i in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)


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


class _ScanBackward(_Fast):
    """Refuses to be differentiated; torch's once_differentiable gives zero under torch.func."""

    @staticmethod
    def forward(x, w, h0, u, bias, activation_bias, recurrence, out, saved, g_out, g_last, needs) -> tuple[Tensor, ...]:
        states = out, saved, g_out, g_last
        return tuple(scan_backward(x, w, h0, u, bias, activation_bias, *recurrence, *states, needs))

    @staticmethod
    def backward(ctx: object, *gradients: object) -> tuple[Tensor, ...]:
        raise OptionError('scan needs backend="reference" for second derivatives, got a fast one.')


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
