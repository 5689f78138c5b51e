"""Float32 work in full precision, whatever TF32, autocast and their like are set to."""

import functools
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from stiefelkit._torch import (
    constant_in_traced_code,
    is_exported,
    is_in_forward_mode,
    is_jit_traced,
    is_traced,
    is_transformed,
)
from stiefelkit.errors import ShapeError, needs
from stiefelkit.functional._arithmetic.function import Context, Function, keep
from stiefelkit.tensors import check_tensors

P = ParamSpec("P")
R = TypeVar("R")


class _Lowering:
    """Lowers float32 products on a kind of device, process-wide, unless some context disables that."""

    def __init__(self, backend: ModuleType):
        self.flags = backend.matmul
        self.lock = threading.Lock()
        self.holders = 0
        self.setting: str | None = None  # the flag that `restore` sets again; None while products are not disabled

    def is_set(self) -> bool:
        return self.flags.fp32_precision not in ("ieee", "none")

    def disable(self) -> None:
        self.setting = self.flags.fp32_precision  # before anything is changed, for `is_lowered` in other threads
        self.flags.fp32_precision = "none"
        if self.is_set():  # inherited from a wider flag: stays so
            self.setting = "none"
        self.flags.fp32_precision = "ieee"

    def restore(self) -> None:
        if not self.is_set():  # else somebody has set it since, and that stands
            self.flags.fp32_precision = self.setting
        self.setting = None


_LOWERINGS = {"cpu": _Lowering(torch.backends.mkldnn), "cuda": _Lowering(torch.backends.cuda)}


def is_lowered(device: torch.device) -> bool:
    """Returns whether float32 products on a device are lowered to TF32 or bfloat16, outside of any `FullPrecision`."""
    lowering = _LOWERINGS["cuda" if device.type == "cuda" else "cpu"]
    return lowering.setting is not None or lowering.is_set()


@constant_in_traced_code
def _has_autocast(kind: str) -> bool:
    # "meta" has none; torch 2.11 cannot trace the question.
    return torch.amp.is_autocast_available(kind)


def is_autocast(device: torch.device) -> bool:
    """Returns whether autocast is on for a device."""
    return _has_autocast(device.type) and torch.is_autocast_enabled(device.type)


class FullPrecision:
    """Context, for any threads, without TF32, bfloat16 products and autocast; not for traced code (see `opaque`)."""

    def __init__(self, device: torch.device):
        self._lowering = _LOWERINGS["cuda" if device.type == "cuda" else "cpu"]
        self._autocast = None
        kind = device.type
        if (kind == "cpu" or _has_autocast(kind)) and torch.is_autocast_enabled(kind):
            self._autocast = torch.autocast(device.type, enabled=False)

    def __enter__(self) -> None:
        # Neither set nor disabled by another context: there is nothing that this one would have to keep so.
        lowering = self._lowering
        is_lowered = lowering.setting is not None or lowering.flags.fp32_precision not in ("ieee", "none")
        self._holds = is_lowered and not torch.compiler.is_compiling()
        if self._holds:
            with lowering.lock:
                lowering.holders += 1
                # also looked at when others disabled it: somebody may have set it since
                if lowering.flags.fp32_precision not in ("ieee", "none"):
                    lowering.disable()
        if self._autocast is not None:
            self._autocast.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(*exception)
        if self._holds:
            lowering = self._lowering
            with lowering.lock:
                lowering.holders -= 1
                if lowering.holders == 0 and lowering.setting is not None:
                    lowering.restore()


def opaque(
    like: Callable[..., object], *, dims: tuple[int, ...] | None = (), schema: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function of tensors an operator that tracing does not look into, in full precision, for a `Function`.

    It may branch on values, takes a tensor first and any batch dimensions, and returns new tensors only. `like` makes
    empty results for tracing; the first arguments have `dims` dimensions that are no batch dimensions, where these
    broadcast (None leaves vmap to the `Function` around it); `schema` replaces the function's annotations.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def in_full_precision(*args: Any) -> R:
            with FullPrecision(args[0].device):
                return cast(Callable[..., R], fn)(*args)

        name = f"stiefelkit::{fn.__name__.lstrip('_')}"
        op = torch.library.custom_op(name, in_full_precision, mutates_args=(), schema=schema)
        op.register_fake(like)
        op.register_autograd(without_gradient)
        if dims is not None:
            op.register_vmap(functools.partial(_batched, op, dims))

        @functools.wraps(fn)
        def call(*args: Any) -> R:
            return in_full_precision(*args) if is_plain(*args) else op(*args)

        return cast(Callable[P, R], call)

    return decorate


def without_gradient(ctx: object, *gradients: Tensor) -> NoReturn:
    """Refuses a backward of an operator that has its gradient from the `Function` around it."""
    raise NotImplementedError(
        "A gradient needs the model itself, got an operator of stiefelkit in a program that was exported from it, "
        "which has none; train the model, and export it then."
    )


def is_plain(*args: object) -> bool:
    """Returns whether this is eager mode with plain tensors: no tracing, no torch.func, no tensor subclass."""
    if is_traced() or is_transformed():
        return False
    for a in args:
        if isinstance(a, Tensor) and type(a) is not Tensor and type(a) is not torch.nn.Parameter:
            return False
    return True


def _batched(
    op: Callable[..., Any], dims: tuple[int, ...], info: Any, in_dims: Sequence[int | None], *args: Any
) -> tuple[Any, object]:
    """Moves the batch dimension of every tensor to the front, where the operator takes it."""
    moved = [
        a if not isinstance(a, Tensor) else a.movedim(d, 0) if d is not None else a.expand(info.batch_size, *a.shape)
        for a, d in zip(args, in_dims, strict=True)
    ]
    # Broadcasting aligns last dimensions: behind the new one all need as many as the longest has.
    given = [(i, k, moved[i]) for i, k in enumerate(dims) if moved[i] is not None]
    most = max((a.dim() - 1 - k for _, k, a in given), default=0)
    for i, k, a in given:
        moved[i] = a.reshape(a.shape[0], *(1,) * (most + 1 + k - a.dim()), *a.shape[1:])
    results = op(*moved)
    return results, (0 if isinstance(results, Tensor) else (0,) * len(results))


@opaque(lambda a, b: a @ b, dims=(2, 2))
def _multiply(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


class _Product(Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _multiply(a, b)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep(ctx, *inputs)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        to_a = product(g, b.mH).sum_to_size(a.shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return to_a, None
        if b.dim() == 2 < a.dim():  # one product, not one for each matrix of the batch and a sum
            a, g = a.flatten(0, -2), g.flatten(0, -2)
        return to_a, product(a.mH, g).sum_to_size(b.shape)

    @staticmethod
    def tangent(ctx: Context, ta: Tensor | None, tb: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        return bilinear_tangent(product, a, b, ta, tb)


def bilinear_tangent(
    times: Callable[..., Tensor], a: Tensor, b: Tensor, ta: Tensor | None, tb: Tensor | None
) -> Tensor:
    """Returns the tangent of a product of A and B by theirs, of which one may be None."""
    if ta is None or tb is None:
        return times(a, tb) if ta is None else times(ta, b)
    return times(ta, b) + times(a, tb)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the matrix product in the full precision of its dtype, differentiable any number of times.

    Args:
        a: matrices of shape (*, m, k), float32, float64, complex64 or complex128.
        b: matrices of shape (*, k, n), same dtype.

    Returns:
        A @ B, shape (*, m, n).
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        check_tensors("product", a, b)
    if a.dim() < 2 or b.dim() < 2:
        got = f"shapes {tuple(a.shape)} and {tuple(b.shape)}; unsqueeze a vector to one"
        needs(False, ShapeError, "product", "matrices", got)
    if a.dtype in (torch.float64, torch.complex128) or is_exported():
        return a @ b
    if may_be_differentiated(a, b):
        return _Product.of(a, b)
    return _multiply(a, b)


def may_be_differentiated(*tensors: Tensor | None) -> bool:
    """Returns whether a derivative may come; outside of `forward`, in which no gradient is enabled."""
    # There requires_grad says nothing of what is mapped, and a tangent may come without it.
    if is_transformed() or is_jit_traced() or (not torch.compiler.is_compiling() and is_in_forward_mode()):
        return True
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def plus_product(c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Returns C + alpha A B, in the precision that products have where it is called."""
    return torch.addmm(c, a, b, alpha=alpha) if c.dim() == 2 else torch.add(c, a @ b, alpha=alpha)


def add_product_(c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Adds alpha A B to C, as `plus_product`."""
    if c.dim() == 2:
        return c.addmm_(a, b, alpha=alpha)
    return c.baddbmm_(a, b, alpha=alpha) if c.dim() == 3 else c.add_(a @ b, alpha=alpha)
