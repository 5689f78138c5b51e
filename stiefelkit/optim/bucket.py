"""Frames of one shape that are moved together, and what an optimizer keeps of each."""

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Bucket", "buckets"]

_LARGEST = 1 << 22
"""Numbers in a batch that is made by copying frames together."""


class Bucket:
    """Frames of one shape, dtype and device as one tensor: (n, p) for a single matrix, else (b, n, p).

    Args:
        params: the frames, each with a gradient.
        states: the optimizer's state of each.
    """

    def __init__(self, params: list[Tensor], states: list[dict[str, Any]]):
        self.params = params
        self.states = states
        self.is_single = len(params) == 1 and params[0].dim() == 2

    @property
    def moved(self) -> float:
        """Length of the increments since the last polish; infinite before the first step."""
        return max(state.get("moved", float("inf")) for state in self.states)

    @moved.setter
    def moved(self, length: float) -> None:
        for state in self.states:
            state["moved"] = length

    def frames(self) -> Tensor:
        """W."""
        return self.gather(self.params)

    def gradients(self) -> Tensor:
        """dL/dW."""
        return self.gather([_gradient(p) for p in self.params])

    def gradient_norms(self) -> list[Tensor]:
        """||G||_F of each frame, also on ranks that hold none of it."""
        return [_whole(torch.linalg.vector_norm(_gradient(p))) for p in self.params]

    def local_gradients(self) -> list[Tensor]:
        """The gradients, of sharded frames this rank's part."""
        return [_local(_gradient(p)) for p in self.params]

    def add_remainders(self) -> None:
        """Gives frames that have none yet a remainder of zero."""
        for p, state in zip(self.params, self.states, strict=True):
            if "lo" not in state:
                state["lo"] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def remainders(self) -> Tensor | None:
        """What the frames would have beyond W in a wider dtype, or None."""
        if any("lo" not in state for state in self.states):
            return None
        return self.gather([state["lo"] for state in self.states])

    def add(self, increment: Tensor) -> None:
        """W + lo += increment, where W is what rounds to the dtype."""
        parts = self.scatter(increment)
        if any("lo" not in state for state in self.states):
            for p, part in zip(self.params, parts, strict=True):
                _local(p).add_(part)
            return
        for p, state, part in zip(self.params, self.states, parts, strict=True):
            w, lo = _local(p), _local(state["lo"])
            # The rounding of W + lo comes out exactly, but where lo is larger than W, and then relative to lo.
            total = w + lo.add_(part)
            lo.add_(w - total)
            w.copy_(total)

    def gather(self, tensors: list[Tensor]) -> Tensor:
        """One tensor out of one for each frame."""
        whole = [_whole(t) for t in tensors]
        if self.is_single:
            return whole[0].detach()
        n, p = whole[0].shape[-2:]
        batches = [t.detach().reshape(-1, n, p) for t in whole]
        return batches[0] if len(batches) == 1 else torch.cat(batches)

    def scatter(self, batch: Tensor) -> list[Tensor]:
        """For each frame its part of a batch, in the frame's shape and, if it is sharded, this rank's part."""
        if self.is_single:
            return [_local(_like(batch, self.params[0]))]
        n, p = batch.shape[-2:]
        sizes = [param.numel() // (n * p) for param in self.params]
        parts = batch.split(sizes)
        return [_local(_like(part.reshape(param.shape), param)) for part, param in zip(parts, self.params, strict=True)]

    def state(self, key: str) -> Tensor:
        """A state of every frame, of the frame's shape; zero at first."""
        for p, state in zip(self.params, self.states, strict=True):
            if key not in state:
                state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return self.gather([state[key] for state in self.states])

    def set_state(self, key: str, value: Tensor) -> None:
        """Writes what `state` reads."""
        for state, part in zip(self.states, self.scatter(value), strict=True):
            _local(state[key]).copy_(part)


def buckets(params: Iterable[Tensor], states: MutableMapping[Tensor, dict[str, Any]]) -> list[Bucket]:
    """Sorts the frames that have a gradient by shape, dtype and device."""
    sorted_: dict[tuple[Any, ...], list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            sorted_.setdefault((p.shape[-2:], p.dtype, p.device, hasattr(p, "full_tensor")), []).append(p)
    found = []
    for alike in sorted_.values():
        at_once: list[Tensor] = []
        for p in alike:
            if at_once and sum(q.numel() for q in at_once) + p.numel() > _LARGEST:
                found.append(Bucket(at_once, [states[q] for q in at_once]))
                at_once = []
            at_once.append(p)
        found.append(Bucket(at_once, [states[q] for q in at_once]))
    return found


def _gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad.to_dense() if p.grad.is_sparse else p.grad


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # type: ignore[operator]


def _local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t  # type: ignore[operator]


def _like(whole: Tensor, p: Tensor) -> Tensor:
    """Gives a tensor that every rank has the placement of a sharded parameter."""
    if not hasattr(p, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.contiguous(), p.device_mesh, p.placements, src_data_rank=None)  # type: ignore[attr-defined]
