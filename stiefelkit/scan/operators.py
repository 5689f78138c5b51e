"""The fast scan as operators that tracing does not look into, in full precision."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._product import FullPrecision, is_plain
from stiefelkit.scan.backends import engine, plain_engine
from stiefelkit.scan.engines.checkpoints import last_backward, last_forward
from stiefelkit.scan.engines.chunks import segments
from stiefelkit.scan.pointwise import saved_like
from stiefelkit.scan.engines.problem import Gradients, Problem

__all__ = ["scan_backward", "scan_deltas", "scan_forward", "scan_last", "scan_last_backward"]

NAMES = ("x", "w", "h0", "u", "bias", "activation_bias")


def _operator(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function that allocates what it returns an operator; in plain eager mode it is called directly."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def in_full_precision(*args: Any) -> Any:
            with FullPrecision(next(a.device for a in args if isinstance(a, Tensor))):
                return fn(*args)

        op = torch.library.custom_op(f"stiefelkit::{fn.__name__}", in_full_precision, mutates_args=())
        op.register_fake(fake)

        @functools.wraps(fn)
        def call(*args: Any) -> Any:
            return in_full_precision(*args) if is_plain(*args) else op(*args)

        return call

    return decorate


def _states_like(x: Tensor, h0: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], h0.shape[-1], dtype=h0.dtype)


def _fake_forward(
    x: Tensor, w: Tensor, h0: Tensor, u: Any, bias: Any, b: Any, activation: str, sizes: Any, reverse: bool, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    keep = rest[-1]
    width, dtype = saved_like(activation, h0.shape[-1], w.dtype)
    rows = x.shape[:-1] if keep else (0, *x.shape[1:-1])
    return _states_like(x, h0), h0.new_empty(h0.shape), x.new_empty(*rows, width, dtype=dtype)


@_operator(_fake_forward)
def scan_forward(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    u: Tensor | None,
    bias: Tensor | None,
    activation_bias: Tensor | None,
    activation: str,
    sizes: list[int] | None,
    reverse: bool,
    backend: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """All states, the last ones, and what the derivative needs besides them (with `keep`)."""
    return engine(backend).forward(Problem(x, w, h0, u, bias, activation_bias, activation, sizes, reverse), keep)


def _fake_last(
    x: Tensor, w: Tensor, h0: Tensor, u: Any, bias: Any, b: Any, activation: str, sizes: Any, reverse: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    keep = rest[-1]
    return h0.new_empty(h0.shape), h0.new_empty(_marks(x.shape[0] if sizes is None else len(sizes), keep), *h0.shape)


def _marks(steps: Any, keep: bool) -> Any:
    """How many checkpoints there are; of a symbolic number of steps, some number."""
    if not keep:
        return 0
    return len(segments(steps)) if isinstance(steps, int) else torch.library.get_ctx().new_dynamic_size()


@_operator(_fake_last)
def scan_last(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    u: Tensor | None,
    bias: Tensor | None,
    activation_bias: Tensor | None,
    activation: str,
    sizes: list[int] | None,
    reverse: bool,
    backend: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """The last states, and the checkpoints (with `keep`)."""
    p = Problem(x, w, h0, u, bias, activation_bias, activation, sizes, reverse)
    return last_forward(engine(backend), p, keep)


def _fake_backward(
    g_out: Any,
    g_last: Any,
    kept: Any,
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    u: Tensor | None,
    bias: Tensor | None,
    b: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    return _filled(rest[-2], [x, w, h0, u, bias, b], None)


def _filled(needs: list[bool], arguments: list[Tensor | None], found: Gradients | None) -> list[Tensor]:
    """One tensor an argument: its gradient, or an empty one if it is not wanted."""
    like = next(t for t in arguments if t is not None)
    tensors = []
    for name, needed, argument in zip(NAMES, needs, arguments, strict=True):
        if not needed or argument is None:
            tensors.append(like.new_empty(0))
        elif found is None:
            tensors.append(argument.new_empty(argument.shape))
        else:
            tensors.append(getattr(found, name))
    return tensors


@_operator(lambda g_out, g_last, kept, *rest: _fake_backward(g_out, g_last, kept, *rest[1:]))
def scan_backward(
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
    sizes: list[int] | None,
    reverse: bool,
    backend: str,
    needs: list[bool],
    half: bool,
) -> list[Tensor]:
    """Gradients by the six tensors of `scan_forward`, empty ones where none is needed."""
    p = Problem(x, w, h0, u, bias, activation_bias, activation, sizes, reverse)
    found = engine(backend).backward(p, g_out, g_last, out, saved, needs, half)
    return _filled(needs, [x, w, h0, u, bias, activation_bias], found)


@_operator(lambda g_last, marks, *rest: _fake_backward(None, g_last, marks, *rest))
def scan_last_backward(
    g_last: Tensor,
    marks: Tensor,
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    u: Tensor | None,
    bias: Tensor | None,
    activation_bias: Tensor | None,
    activation: str,
    sizes: list[int] | None,
    reverse: bool,
    backend: str,
    needs: list[bool],
    half: bool,
) -> list[Tensor]:
    """The same from the gradient by the last states alone."""
    p = Problem(x, w, h0, u, bias, activation_bias, activation, sizes, reverse)
    found = last_backward(engine(backend), p, g_last, marks, needs, half)
    return _filled(needs, [x, w, h0, u, bias, activation_bias], found)


def _fake_deltas(g_out: Any, g_last: Any, out: Tensor, saved: Any, x: Any, w: Any, h0: Tensor, *rest: Any) -> Any:
    return out.new_empty(out.shape), h0.new_empty(h0.shape)


@_operator(_fake_deltas)
def scan_deltas(
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
    sizes: list[int] | None,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Gradients by the pre-activations, like `out`, and by h0."""
    p = Problem(x, w, h0, u, bias, activation_bias, activation, sizes, reverse)
    return plain_engine(backend).deltas(p, g_out, g_last, out, saved)
