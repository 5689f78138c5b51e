"""The laws of devices: nothing waits for a value, and everything runs where there are none."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stiefelkit._torch import TorchDispatchMode
from stiefelkit.contract.param import coordinate_dtypes
from stiefelkit.functional._arithmetic.reads import without_reads
from stiefelkit.metrics import working_dtype
from stiefelkit.optim.base.rounding import PROMISED
from stiefelkit.testing.cases import Case
from stiefelkit.testing.optimizer_cases import (
    RATE,
    SHAPES,
    OptimizerCase,
    equal,
    error_and_bound,
    give_gradients,
    mixed,
    walk,
)
from stiefelkit.testing.require import require, require_same_frame, require_within

READS = frozenset(
    "_linalg_check_errors _linalg_eigh _linalg_eigvals _linalg_svd _local_scalar_dense _unique2 equal is_nonzero item "
    "linalg_eig linalg_lstsq linalg_matrix_exp masked_select nonzero unique_consecutive unique_dim".split()
)
"""Operators for whose result, or for whose checks, a GPU is waited for."""
_FEW = ((6, 6), (2, 5, 3))
"""A square frame and a batch of tall ones: modes take their time."""
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


def law_of_unread_steps(case: OptimizerCase) -> None:
    """Steps read no value but on a CPU, write in place, keep frames, and go where they go there to 1 % of the way."""
    is_double = case.dtype == working_dtype(case.dtype)
    watched = case.frames(*_FEW)
    refused = case.on(watched)
    for number in range(0 if is_double else 2):  # single precision does all that double does, and more
        give_gradients(watched, number)
        with refusing_reads():
            refused.step()
    shapes = (*SHAPES[:3], (24, 24))
    ws, twins, starts = case.frames(*shapes), case.frames(*shapes), case.frames(*shapes)
    optimizer, reading = case.on(ws), case.on(twins)
    promised = PROMISED["float64" if is_double else dict(case.options).get("precision", "exact")]
    places: list[Any] = []
    for number in range(3):
        with without_reads():
            walk(optimizer, ws, [number])
        walk(reading, twins, [number])
        places.append({p: {key: _place(value) for key, value in optimizer.state[p].items()} for p in ws})
        for w in ws:
            require_within(*error_and_bound(w, promised), "unread, ||W^H W - I||_F =")
    require(places[0] == places[-1], "a state is not written in place, as a graph requires")
    for w, twin, start in zip(ws, twins, starts, strict=True):
        off, way = torch.dist(w, twin).item(), torch.dist(twin, start).item()
        require_within(off, 0.01 * way + 1e-6, f"unread, a frame that has gone {way:.3g} is off by")


def _place(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else None


def law_refusal(case: OptimizerCase) -> None:
    """Where no value is read, NaN or infinity in one gradient leaves its group as it is, and its states count that."""
    for bad in (math.nan, math.inf):
        ws, optimizer = mixed(case)
        with without_reads():
            walk(optimizer, ws, [0])
            before = [w.detach().clone() for w in ws]
            states = [_floats(optimizer, w) for w in ws[:3]]
            give_gradients(ws, 3)
            ws[1].grad.view(-1)[1] = bad  # type: ignore[union-attr]
            optimizer.step()
        require(equal([w.detach() for w in ws[:3]], before[:3]), f"{bad} in a gradient moves its group")
        for w, state in zip(ws[:3], states, strict=True):
            now = _floats(optimizer, w)
            counted = now.pop("refused", None), state.pop("refused", None)
            require(equal(now, state), f"{bad} in a gradient changes a state")
            once = counted[0] is not None and counted[1] is not None and bool(counted[0] == counted[1] + 1)
            require(once, f"{bad} in a gradient is not counted")
        others = zip(ws[3:], before[3:], strict=True)
        require(all(not torch.equal(w, b) for w, b in others), f"{bad} in a gradient stops other groups")


def _floats(optimizer: Any, w: Tensor) -> dict[str, Any]:
    return {key: value.detach().clone() for key, value in optimizer.state[w].items() if isinstance(value, Tensor)}


def law_of_steps_on_meta(case: OptimizerCase) -> None:
    """Steps run on the meta device, where tensors have a shape and no values."""
    if case.dtype == working_dtype(case.dtype):
        return
    ws = [nn.Parameter(torch.empty(shape, dtype=case.dtype, device="meta")) for shape in _FEW]
    optimizer = case.on(ws, lr=RATE)
    for w in ws:
        w.grad = torch.empty_like(w)
    optimizer.step()
    tensors = [value for w in ws for value in optimizer.state[w].values() if isinstance(value, Tensor)]
    require(all(value.is_meta for value in tensors), "a state is made elsewhere")
