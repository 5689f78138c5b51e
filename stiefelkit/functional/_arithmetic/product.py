"""Float32 work in full precision, whatever TF32, autocast and their like are set to."""

import functools
import threading
from collections.abc import Callable
from typing import Any

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
from stiefelkit.errors import ShapeError
from stiefelkit.functional._arithmetic.function import Function, keep
from stiefelkit.tensors import check_tensors

SHORT = 64
"""Terms of the sums of `short_product`."""


def _flags(device: torch.device) -> Any:
    return torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


class _Lowering:
    """How float32 products on one kind of device are lowered, and how many contexts hold that off at the moment.

    The setting is the process's, not a thread's: the first context to be entered takes it down and the last to be left
    puts it back.
    """

    def __init__(self, device: torch.device):
        self.flags = _flags(device)
        self.lock = threading.Lock()
        self.holders = 0
        self.asked: str | None = None

    @property
    def is_asked(self) -> bool:
        """Whether products are lowered, or would be if no context held it off."""
        return self.asked is not None or self._is_set()

    def _is_set(self) -> bool:
        return self.flags.fp32_precision not in ("ieee", "none")

    def take_down(self) -> None:
        """Switches the lowering of products off; the caller holds the lock."""
        self.asked = self.flags.fp32_precision  # before anything is changed, for `is_asked` in other threads
        self.flags.fp32_precision = "none"
        if self._is_set():  # inherited from a wider flag: stays so
            self.asked = "none"
        self.flags.fp32_precision = "ieee"

    def put_back(self) -> None:
        """Restores the lowering that was set; the caller holds the lock."""
        if not self._is_set():  # else somebody has set it since, and that stands
            self.flags.fp32_precision = self.asked
        self.asked = None


_LOWERINGS = {kind: _Lowering(torch.device(kind)) for kind in ("cpu", "cuda")}


def _lowering(device: torch.device) -> _Lowering:
    return _LOWERINGS["cuda" if device.type == "cuda" else "cpu"]


def is_lowered(device: torch.device) -> bool:
    """Returns whether float32 products on a device are lowered to TF32 or bfloat16, outside of any `FullPrecision`."""
    return _lowering(device).is_asked


@constant_in_traced_code
def _has_autocast(kind: str) -> bool:
    """Returns whether a kind of device has autocast, which "meta" has not; torch 2.11 cannot trace the question."""
    return torch.amp.is_autocast_available(kind)


def is_autocast(device: torch.device) -> bool:
    """Returns whether autocast is on for a device."""
    return _has_autocast(device.type) and torch.is_autocast_enabled(device.type)


class FullPrecision:
    """Context in which float32 products on a device are not lowered to TF32 or bfloat16, and autocast is off.

    Any number of threads may be in one at a time. Has no effect in traced code, where a flag that is set and reset
    leaves no trace: use `opaque` there.
    """

    def __init__(self, device: torch.device):
        self._lowering = _LOWERINGS["cuda" if device.type == "cuda" else "cpu"]
        self._autocast = None
        kind = device.type
        if (kind == "cpu" or _has_autocast(kind)) and torch.is_autocast_enabled(kind):
            self._autocast = torch.autocast(device.type, enabled=False)

    def __enter__(self) -> None:
        # Neither set nor held off by another context: there is nothing that this one would have to keep so.
        lowering = self._lowering
        is_lowered = lowering.asked is not None or lowering.flags.fp32_precision not in ("ieee", "none")
        self._holds = is_lowered and not torch.compiler.is_compiling()
        if self._holds:
            with lowering.lock:
                lowering.holders += 1
                # also looked at when others hold it: somebody may have set it since
                if lowering.flags.fp32_precision not in ("ieee", "none"):
                    lowering.take_down()
        if self._autocast is not None:
            self._autocast.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(*exception)
        if self._holds:
            lowering = self._lowering
            with lowering.lock:
                lowering.holders -= 1
                if lowering.holders == 0 and lowering.asked is not None:
                    lowering.put_back()


def opaque(
    like: Callable[..., Any], *, dims: tuple[int, ...] | None = (), schema: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function of tensors an operator that tracing does not look into, in full precision.

    The function may branch on values. It takes a tensor first, and any number of leading batch dimensions, returns new
    tensors only and has no derivative: call it inside a `Function`. In plain eager mode it is called directly.

    Args:
        like: empty results for given arguments, for tracing.
        dims: how many dimensions of the first arguments, all tensors, are no batch dimensions; to be told where batch
            dimensions broadcast. The others must have the same number of them. None for a function without a vmap rule,
            which is that of the `Function` around it.
        schema: that of the operator; by default the function's annotations.
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def in_full_precision(*args: Any) -> Any:
            with FullPrecision(args[0].device):
                return fn(*args)

        name = f"stiefelkit::{fn.__name__.lstrip('_')}"
        op = torch.library.custom_op(name, in_full_precision, mutates_args=(), schema=schema)
        op.register_fake(like)
        op.register_autograd(without_gradient)
        if dims is not None:
            op.register_vmap(functools.partial(_batched, op, dims))

        @functools.wraps(fn)
        def call(*args: Any) -> Any:
            return in_full_precision(*args) if is_plain(*args) else op(*args)

        return call

    return decorate


def without_gradient(ctx: Any, *gradients: Any) -> Any:
    """The backward of an operator that has its gradient from the `Function` around it."""
    raise NotImplementedError(
        "A gradient needs the model itself, got an operator of stiefelkit in a program that was exported from it, "
        "which has none; train the model, and export it then."
    )


def is_plain(*args: Any) -> bool:
    """Returns whether this is eager mode with plain tensors: no tracing, no torch.func, no tensor subclass."""
    if is_traced() or is_transformed():
        return False
    for a in args:
        if isinstance(a, Tensor) and type(a) is not Tensor and type(a) is not torch.nn.Parameter:
            return False
    return True


def _batched(op: Any, dims: tuple[int, ...], info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """Moves the batch dimension of every tensor to the front, where the operator takes it."""
    moved = [
        a if not isinstance(a, Tensor) else a.movedim(d, 0) if d is not None else a.expand(info.batch_size, *a.shape)
        for a, d in zip(args, in_dims, strict=True)
    ]
    # Broadcasting aligns last dimensions: behind the new one all need as many as the longest has.
    most = max((a.dim() - 1 - k for a, k in zip(moved, dims, strict=False)), default=0)
    for i, k in enumerate(dims):
        a = moved[i]
        moved[i] = a.reshape(a.shape[0], *(1,) * (most + 1 + k - a.dim()), *a.shape[1:])
    results = op(*moved)
    return results, (0 if isinstance(results, Tensor) else (0,) * len(results))


@opaque(lambda a, b: a @ b, dims=(2, 2))
def _multiply(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@opaque(lambda a, b: a @ b @ a, dims=(2, 2))
def _multiply_twice(a: Tensor, b: Tensor) -> Tensor:
    return a @ b @ a


class _Product(Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        return _multiply(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        to_a = product(g, b.mH).sum_to_size(a.shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return to_a, None
        if b.dim() == 2 < a.dim():  # one product, not one for each matrix of the batch and a sum
            a, g = a.flatten(0, -2), g.flatten(0, -2)
        return to_a, product(a.mH, g).sum_to_size(b.shape)

    @staticmethod
    def tangent(ctx: Any, ta: Tensor | None, tb: Tensor | None) -> Tensor:  # type: ignore[override]
        a, b = ctx.saved_tensors
        if ta is None or tb is None:
            return product(a, tb) if ta is None else product(ta, b)  # type: ignore[arg-type]
        return product(ta, b) + product(a, tb)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the matrix product in the full precision of its dtype, differentiable any number of times.

    Args:
        a: matrices of shape (*, m, k), float32, float64, complex64 or complex128.
        b: matrices of shape (*, k, n), same dtype.

    Returns:
        A @ B, shape (*, m, n).

    Raises:
        ShapeError: A or B is a vector or a number.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        check_tensors("product", a, b)
    if a.dim() < 2 or b.dim() < 2:
        raise ShapeError(
            f"product needs matrices, got shapes {tuple(a.shape)} and {tuple(b.shape)}; unsqueeze a vector to one."
        )
    if a.dtype in (torch.float64, torch.complex128) or is_exported():
        return a @ b
    if _may_be_differentiated(a, b):
        return _Product.of(a, b)  # type: ignore[return-value]
    return _multiply(a, b)


def sandwich(a: Tensor, b: Tensor) -> Tensor:
    """Returns A B A of square matrices of one shape, as two of `product`, and at the cost of one call of it."""
    if a.dtype in (torch.float64, torch.complex128) or is_exported() or _may_be_differentiated(a, b):
        return product(product(a, b), a)
    return _multiply_twice(a, b)


def _may_be_differentiated(a: Tensor, b: Tensor) -> bool:
    # There requires_grad says nothing of what is mapped, and a tangent may come without it.
    if is_transformed() or is_jit_traced() or (not torch.compiler.is_compiling() and is_in_forward_mode()):
        return True
    return torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)


def plus_product(c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Returns C + alpha A B, in the precision that products have where it is called."""
    return torch.addmm(c, a, b, alpha=alpha) if c.dim() == 2 else torch.add(c, a @ b, alpha=alpha)


def add_product_(c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Adds alpha A B to C, as `plus_product`."""
    if c.dim() == 2:
        return c.addmm_(a, b, alpha=alpha)
    return c.baddbmm_(a, b, alpha=alpha) if c.dim() == 3 else c.add_(a @ b, alpha=alpha)


def short_product(a: Tensor, b: Tensor, c: Tensor | None = None, share: float = 1.0) -> Tensor:
    """Returns A B + share C of matrices by sums of at most 64 terms, so that no processor rounds as long sums do."""
    if a.dim() != 2:
        return a @ b if c is None else torch.add(a @ b, c, alpha=share)
    k = a.shape[-1]
    if k <= SHORT or not a.is_cpu:
        return torch.mm(a, b) if c is None else torch.addmm(c, a, b, beta=share)
    here = slice(SHORT)
    ab = a[:, here] @ b[here] if c is None else torch.addmm(c, a[:, here], b[here], beta=share)
    for start in range(SHORT, k, SHORT):
        here = slice(start, start + SHORT)
        ab.addmm_(a[:, here], b[here])
    return ab


def with_dense_gradient(w: Tensor) -> Tensor:
    """Returns W itself, whose gradient, if it comes sparse, is passed on as a dense one."""
    return _Dense.of(w)  # type: ignore[return-value]


class _Dense(Function):
    @staticmethod
    def forward(w: Tensor) -> Tensor:  # type: ignore[override]
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g.to_dense() if g.is_sparse else g

    @staticmethod
    def tangent(ctx: Any, t: Tensor) -> Tensor:  # type: ignore[override]
        return t.view_as(t)
