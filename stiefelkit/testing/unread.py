"""The laws of devices: nothing waits for a value, and everything runs where there are none."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stiefelkit._torch import TorchDispatchMode
from stiefelkit.contract.param import coordinate_dtypes
from stiefelkit.functional._arithmetic.reads import without_reads
from stiefelkit.metrics import working_dtype
from stiefelkit.testing.cases import Case
from stiefelkit.testing.require import require, require_same_frame, require_within

READS = frozenset(
    "_linalg_check_errors _linalg_eigh _linalg_eigvals _linalg_svd _local_scalar_dense _unique2 equal is_nonzero item "
    "linalg_eig linalg_lstsq linalg_matrix_exp masked_select nonzero unique_consecutive unique_dim".split()
)
"""Operators for whose result, or for whose checks, a GPU is waited for."""
_ON_THE_HOST = (Tensor.tolist, Tensor.numpy)
"""What reads a CPU's memory without an operator."""


class _RefusedOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        require(name not in READS and not masked, f"{name} reads a value")
        return func(*args, **(kwargs or {}))


class _RefusedMethods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        require(func not in _ON_THE_HOST, f"{getattr(func, '__name__', func)} reads a value")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def refusing_reads() -> Iterator[None]:
    """Context that takes on a CPU the road of other devices, and raises LawBroken where a value is read."""
    with without_reads(), _RefusedOperators(), _RefusedMethods():
        yield


def law_reads(case: Case) -> None:
    """Forward and backward read no value but on a CPU, and give what they give there."""
    param, coordinates = case.random(1.0)
    leaves = [c.detach().requires_grad_() for c in coordinates]
    g = case.normal(12)

    def run() -> tuple[Tensor, ...]:
        w = param(*leaves)
        return w.detach(), *torch.autograd.grad(w, leaves, g)

    with refusing_reads():
        w, *gradients = run()
    expected, *expected_gradients = run()
    require_same_frame(case, param, coordinates, w, expected, "unread, the frame is off by")
    for name, ours, theirs in zip(param.coordinates, gradients, expected_gradients, strict=True):
        off = torch.dist(ours, theirs).item() / max(torch.linalg.vector_norm(g).item(), 1e-30)
        bound = 1e-10 if case.dtype == working_dtype(case.dtype) else 1e-4
        require_within(off, bound, f"unread, the gradient of {name} is off by, relative to dL/dW,")


def law_meta(case: Case) -> None:
    """Forward and backward run on the meta device, where tensors have a shape and no values."""
    param = case.cls(case.shape, dtype=case.dtype, device="meta", **dict(case.options))
    dtypes = coordinate_dtypes(param)
    like: dict[str, Any] = {"device": "meta", "requires_grad": True}
    leaves = [torch.empty(shape, dtype=dtypes[name], **like) for name, shape in param.coordinates.items()]
    w = param(*leaves)
    require(w.is_meta and w.shape == case.shape and w.dtype == case.dtype, f"it gives {tuple(w.shape)}, {w.dtype}")
    for name, leaf, g in zip(param.coordinates, leaves, torch.autograd.grad(w, leaves, w.detach()), strict=True):
        alike = g.is_meta and g.shape == leaf.shape and g.dtype == leaf.dtype
        require(alike, f"the gradient of {name} is {tuple(g.shape)}, {g.dtype}")
