"""Frames of one shape that are moved together, and what an optimizer keeps of each."""

import math
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._reads import reads_are_free
from stiefelkit.sharding import is_sharded, local_part, placed_like, whole

__all__ = ["Bucket", "buckets"]

_LARGEST = 1 << 22
"""Numbers in a batch that is made by copying frames together."""


class Bucket:
    """Frames of one shape, dtype and device that have a gradient, as one tensor: (n, p) of one, else (b, n, p)."""

    def __init__(self, params: list[Tensor], states: list[dict[str, Any]]):
        self.params = params
        self.states = states
        self.is_single = len(params) == 1 and params[0].dim() == 2
        self.is_read = reads_are_free(params[0])
        self._staged: list[tuple[str, Tensor | list[Any]]] = []

    @property
    def wear(self) -> float:
        """What rounding may have done to frames since the last polish, in limits; infinite before the first step."""
        if len(self.states) == 1:
            return self.states[0].get("wear", math.inf)
        return max(state.get("wear", math.inf) for state in self.states)

    @wear.setter
    def wear(self, limits: float) -> None:
        for state in self.states:
            state["wear"] = limits

    def frames(self) -> Tensor:
        """W."""
        return self.gather(self.params)

    def gradients(self) -> Tensor:
        """dL/dW, in the dtype of W."""
        return self.gather([_gradient(p).to(p.dtype) for p in self.params])

    def shares_of_overflow(self) -> list[Tensor]:
        """A bound of each ||G||_F over the largest whose square is finite; on all ranks that of the whole frame."""
        shares = []
        for p in self.params:
            grad, most = _gradient(p), torch.finfo(p.dtype).max ** 0.5
            if is_sharded(grad):  # the largest of all ranks would lose a NaN, a sum does not
                shares.append(whole(torch.linalg.vector_norm(grad)).double() / most)
            else:
                largest = torch.linalg.vector_norm(grad, ord=math.inf)
                shares.append(largest.double() * (p.numel() ** 0.5 / most))
        return shares

    def local_gradients(self) -> list[Tensor]:
        """The gradients, of sharded frames this rank's part."""
        return [local_part(_gradient(p)) for p in self.params]

    def refresh(self, with_remainder: bool) -> None:
        """Gives frames a remainder, or takes one away that they shall not have or that is of another dtype."""
        for p, state in zip(self.params, self.states, strict=True):
            lo = state.get("lo")
            if lo is not None and (lo.dtype != p.dtype or lo.shape != p.shape or not with_remainder):
                del state["lo"]
                state.pop("wear", None)
            if with_remainder and "lo" not in state:
                state["lo"] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def forget(self) -> None:
        """Drops the remainders, which belong to other values of the frames, and has the next step polish."""
        for state in self.states:
            if self.is_read:
                state.pop("lo", None)
            elif "lo" in state:
                state["lo"].zero_()
            state.pop("wear", None)

    def remainders(self) -> Tensor | None:
        """What the frames would have beyond W in a wider dtype, or None."""
        if any("lo" not in state for state in self.states):
            return None
        return self.gather([state["lo"] for state in self.states])

    def add(self, increment: Tensor) -> None:
        """W + lo += increment, where W is what rounds to the dtype."""
        parts = self.scatter(increment)
        for p, state, part in zip(self.params, self.states, parts, strict=True):
            w = local_part(p)
            if "lo" not in state:
                w.add_(part)
                continue
            lo = local_part(state["lo"])
            # The rounding of W + lo comes out exactly, but where lo is larger than W, and then relative to lo.
            total = w + lo.add_(part)
            lo.add_(w - total)
            w.copy_(total)

    def assign(self, exact: Tensor) -> None:
        """Sets W + lo to frames in float64 or complex128."""
        for p, state, part in zip(self.params, self.states, self.scatter(exact), strict=True):
            w = local_part(p)
            w.copy_(part)
            if "lo" in state:
                local_part(state["lo"]).copy_(part - w)

    def gather(self, tensors: list[Tensor]) -> Tensor:
        """One tensor out of one for each frame."""
        if self.is_single:
            return whole(tensors[0]).detach()
        n, p = tensors[0].shape[-2:]
        if len(tensors) == 1:
            return whole(tensors[0]).detach().reshape(-1, n, p)
        return torch.cat([whole(t).detach().reshape(-1, n, p) for t in tensors])

    def scatter(self, batch: Tensor, likes: list[Tensor] | None = None) -> list[Tensor]:
        """For each frame its part of a batch, in the shape of the frame, or of `likes`; if that is sharded, locally."""
        likes = self.params if likes is None else likes
        if self.is_single:
            return [local_part(placed_like(batch, likes[0]))]
        sizes = [math.prod(param.shape[:-2]) for param in self.params]
        return [
            local_part(placed_like(part.reshape(like.shape), like))
            for part, like in zip(batch.split(sizes), likes, strict=True)
        ]

    def state(self, key: str, *, is_real: bool = False, of_columns: bool = False) -> Tensor:
        """A state of every frame, zero at first, and cast if the frame was.

        Args:
            key: what it is called.
            is_real: whether it is real for complex frames as well.
            of_columns: whether its shape is (*, p, p), on all ranks, and not that of the frame.
        """
        for p, state in zip(self.params, self.states, strict=True):
            dtype = p.dtype.to_real() if is_real else p.dtype
            if key in state:
                if state[key].dtype != dtype:
                    state[key] = state[key].to(dtype)
            elif of_columns:
                *batch, _, columns = p.shape
                state[key] = torch.zeros(*batch, columns, columns, dtype=dtype, device=p.device)
            else:
                state[key] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        return self.gather([state[key] for state in self.states])

    def stage(self, key: str, value: Tensor | list[Any]) -> None:
        """Keeps what `state` shall read from `commit` on; a list has for each frame what is no tensor of its shape."""
        self._staged.append((key, value))

    def taken(self) -> list[tuple[str, Tensor | list[Any]]]:
        """What was staged, which is no more then."""
        staged, self._staged = self._staged, []
        return staged

    def commit(self) -> None:
        """Writes what was staged."""
        for key, value in self._staged:
            if value.__class__ is list:
                for state, entry in zip(self.states, value, strict=True):
                    state[key] = entry
                continue
            parts = self.scatter(value, [state[key] for state in self.states])  # type: ignore[arg-type]
            for state, part in zip(self.states, parts, strict=True):
                local_part(state[key]).copy_(part)
        self._staged.clear()


def buckets(params: Iterable[Tensor], states: MutableMapping[Tensor, dict[str, Any]]) -> list[Bucket]:
    """Sorts the frames that have a gradient by shape, dtype and device."""
    sorted_: dict[tuple[Any, ...], list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            sorted_.setdefault((p.shape[-2:], p.dtype, p.device, is_sharded(p)), []).append(p)
    filled = []
    for alike in sorted_.values():
        at_once: list[Tensor] = []
        count = 0
        for p in alike:
            if at_once and count + p.numel() > _LARGEST:
                filled.append(Bucket(at_once, [states[q] for q in at_once]))
                at_once, count = [], 0
            at_once.append(p)
            count += p.numel()
        filled.append(Bucket(at_once, [states[q] for q in at_once]))
    return filled


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad.to_dense() if p.grad.is_sparse else p.grad
