"""The autograd functions of this folder: composable with torch.func, and light to call."""

import functools
import traceback
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from stiefelkit._torch import (
    batched,
    dispatch_modes,
    is_batched,
    is_exporting,
    is_in_forward_mode,
    is_transformed,
    levels_of_forward_mode,
    unbatched,
)


class Context(Protocol):
    """Carries tensors, by `keep`, and any attributes from `setup_context` to `backward` and `tangent`."""

    saved_tensors: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: object) -> None: ...


class Function(torch.autograd.Function):
    """An autograd.Function with `setup_context`, a vmap rule and, by a `tangent`, forward mode."""

    generate_vmap_rule = True
    tangent: ClassVar[Callable[..., Any] | None] = None
    _eager: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        """Makes the twin that eager mode applies: Dynamo, which never calls `apply`, refuses classes with a `jvp`."""
        super().__init_subclass__()
        if "_eager" in vars(cls):
            return
        forward = getattr(cls.forward, "__wrapped__", cls.forward)
        backward = _of_batches(cls.backward)
        members: dict[str, Any] = {"_eager": None, "forward": staticmethod(forward), "backward": staticmethod(backward)}
        if cls.tangent is not None:
            members["jvp"] = staticmethod(_of_batches(cls.tangent))
        cls._eager = type(cls.__name__, (cls,), members)
        cls._eager._eager = cls._eager
        cls.forward = staticmethod(_returning_views(forward))

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: object) -> None:
        """Keeps nothing."""

    @classmethod
    def of(cls, *args: Any) -> Any:
        """Applies the function; in plain eager mode without binding arguments by signature, which takes up to 80 us."""
        if torch.compiler.is_compiling():
            # A program that is exported has no backward of ours; by these operations it has a gradient or an error.
            return cls.forward(*args) if is_exporting() else cls.apply(*args)
        if is_transformed():
            _refuse_nested_forward_mode()
            return super(Function, cls._eager).apply(*args)  # type: ignore[misc]
        if dispatch_modes():
            _refuse_linearize()
        return super(torch.autograd.Function, cls._eager).apply(*args)  # type: ignore[misc]


def keep(ctx: Context, *tensors: Tensor | None) -> None:
    """Saves tensors for `backward` and for `tangent`, which both find them in `ctx.saved_tensors`."""
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def by_transposing(backward: Callable[..., tuple[Any, ...]]) -> Any:
    """Makes the `tangent` of a function with one output, of the shape and dtype of the last tensor that it keeps."""

    def tangent(ctx: Context, *tangents: Tensor | None) -> Tensor:
        passed: list[Tensor] = []  # tangents of inputs that have gradients

        def pull_back(g: Tensor) -> tuple[Tensor, ...]:
            pairs = [(x, t) for x, t in zip(backward(ctx, g), tangents, strict=True) if not (x is None or t is None)]
            passed[:] = [t.to(x.dtype) for x, t in pairs]
            return tuple(x for x, _ in pairs)

        push = torch.func.vjp(pull_back, torch.zeros_like(ctx.saved_tensors[-1]))[1]
        return push(tuple(passed))[0]

    return staticmethod(tangent)


def _refuse_nested_forward_mode() -> None:
    # Under two levels of forward mode torch takes the tangent of a custom function for a constant.
    if levels_of_forward_mode() > 1:
        raise NotImplementedError(
            "Forward mode over forward mode needs functions that torch itself differentiates, got one of stiefelkit; "
            "take one of the two in reverse mode: torch.func.hessian, or jacrev(jacfwd(...))."
        )


def _refuse_linearize() -> None:
    # The function that `linearize` returns repeats in-place operations, at every call, on tensors kept from before.
    linearize = torch.func.linearize.__code__
    if is_in_forward_mode() and any(frame.f_code is linearize for frame, _ in traceback.walk_stack(None)):
        raise NotImplementedError(
            "torch.func.linearize needs functions without operations in place, which it repeats at every call, got one "
            "of stiefelkit; call torch.func.jvp for each tangent."
        )


def _returning_views(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns views of what a forward returns: torch 2.11 traces no gradient through one written in place."""

    @functools.wraps(forward)
    def wrapped(*args: object) -> Tensor | tuple[object, ...]:
        found = forward(*args)
        if isinstance(found, Tensor):
            return found.view_as(found)
        return tuple(x.view_as(x) if isinstance(x, Tensor) else x for x in found)

    return wrapped


def _of_batches(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a backward or a tangent by torch.vmap over tensors that torch.autograd has batched, for few operations."""

    @functools.wraps(backward)
    def wrapped(ctx: Context, *gradients: Any) -> Any:
        if torch.compiler.is_compiling() or not any(map(is_batched, gradients)):
            return backward(ctx, *gradients)
        plain, level = list(gradients), 0
        for i, g in enumerate(gradients):
            if is_batched(g):
                plain[i], level = unbatched(g)
        present: list[int] = []

        def of_one(*gradients: Tensor | None) -> tuple[Tensor, ...]:
            one = backward(ctx, *gradients)
            one = one if isinstance(one, tuple) else (one,)
            present[:] = [i for i, x in enumerate(one) if x is not None]
            results[:] = [None] * len(one)
            return tuple(one[i] for i in present)

        results: list[Any] = []
        dims = tuple(0 if is_batched(g) else None for g in gradients)
        for i, x in zip(present, torch.vmap(of_one, in_dims=dims)(*plain), strict=True):
            results[i] = batched(x.contiguous(), level)  # forward mode restrides a tangent, batch first in memory
        return tuple(results) if len(results) > 1 else results[0]

    return wrapped
