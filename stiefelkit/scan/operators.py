"""The fast scan as operators that tracing does not look into, in full precision."""

from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._product import opaque
from stiefelkit.scan.activations import find_activation
from stiefelkit.scan.backends import engine, plain_engine
from stiefelkit.scan.engines.chunks import segments
from stiefelkit.scan.engines.problem import Outcome, Problem
from stiefelkit.scan.recurrence import GATED, SETTINGS, TENSORS, Recurrence

__all__ = ["scan_backward", "scan_deltas", "scan_forward"]

ARGUMENTS = f"Tensor x, Tensor w, Tensor h0, Tensor? u, Tensor? bias, Tensor? activation_bias, {SETTINGS}"
COUNT = len(TENSORS) + len(Recurrence._fields)
STATES = "Tensor out, Tensor saved, Tensor? g_out, Tensor? g_last"


def _split(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Recurrence, tuple[Any, ...]]:
    return args[: len(TENSORS)], Recurrence(*args[len(TENSORS) : COUNT]), args[COUNT:]


def _like_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    (x, w, h0, *_), recurrence, (keep,) = _split(args)
    n, rows = h0.shape[-1], x.shape[:-1]
    width, dtype = find_activation(recurrence.activation, w.is_complex()).saved_like(n, w.dtype)
    # Between checkpoints, and of a gated recurrence, everything is worked out again.
    saved = rows if keep and not recurrence.last_only and recurrence.cell != GATED else (0, *rows[1:])
    if recurrence.last_only:
        steps = x.shape[0] if recurrence.sizes is None else len(recurrence.sizes)
        rows = (_marks(steps, keep), *h0.shape[:-1])
    return x.new_empty(*rows, n, dtype=h0.dtype), h0.new_empty(h0.shape), x.new_empty(*saved, width, dtype=dtype)


def _marks(steps: Any, keep: bool) -> Any:
    """How many checkpoints there are; of a symbolic number of steps, some number."""
    if not keep:
        return 0
    return len(segments(steps)) if isinstance(steps, int) else torch.library.get_ctx().new_dynamic_size()


@opaque(_like_forward, dims=None, schema=f"({ARGUMENTS}, bool keep) -> (Tensor, Tensor, Tensor)")
def scan_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """All states or the checkpoints, the last ones, and what the derivative needs besides them (with `keep`)."""
    tensors, recurrence, (keep,) = _split(args)
    return engine(recurrence).forward(Problem(recurrence, *tensors), keep)


def _like_backward(*args: Any) -> list[Tensor]:
    tensors, needs = args[: len(TENSORS)], args[-1]
    return _wanted(needs, tensors, [None if t is None else t.new_empty(t.shape) for t in tensors])


def _wanted(needs: list[bool], tensors: tuple[Any, ...], gradients: Any) -> list[Tensor]:
    """One tensor an argument: its gradient, or an empty one if it is not wanted."""
    return [
        gradient if needed and t is not None else tensors[0].new_empty(0)
        for needed, t, gradient in zip(needs, tensors, gradients, strict=True)
    ]


@opaque(_like_backward, dims=None, schema=f"({ARGUMENTS}, {STATES}, bool[] needs) -> Tensor[]")
def scan_backward(*args: Any) -> list[Tensor]:
    """Gradients by the six tensors of `scan_forward`, empty ones where none is needed."""
    tensors, recurrence, (*states, needs) = _split(args)
    gradients = engine(recurrence).backward(Problem(recurrence, *tensors), Outcome(*states), needs)
    return _wanted(needs, tensors, [getattr(gradients, name) for name in TENSORS])


def _like_deltas(*args: Any) -> tuple[Tensor, Tensor]:
    (_, _, h0, *_), _, (out, *_) = _split(args)
    return out.new_empty(out.shape), h0.new_empty(h0.shape)


@opaque(_like_deltas, dims=None, schema=f"({ARGUMENTS}, {STATES}) -> (Tensor, Tensor)")
def scan_deltas(*args: Any) -> tuple[Tensor, Tensor]:
    """Gradients by the pre-activations, like `out`, and by h0."""
    tensors, recurrence, states = _split(args)
    return plain_engine(recurrence.backend).deltas(Problem(recurrence, *tensors), Outcome(*states))
