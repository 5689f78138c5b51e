"""Frames of one shape that are moved together, and what an optimizer keeps of each."""

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import copy_each, write_count
from stiefelkit.functional._arithmetic.reads import reads_are_free
from stiefelkit.tensors import is_sharded, local_part, placed_like, whole

__all__ = ["Bucket", "Sorting", "buckets", "gradient_of"]


_LARGEST = 1 << 22
"""Numbers in a batch that is made by copying frames together."""
_SMALL = 1 << 14
"""Numbers of a frame above which calls cost less than the memory of a copy that is kept."""

gradient_of = operator.attrgetter("grad")
"""The gradient of a parameter; None where it has none."""
_is_sparse = operator.attrgetter("is_sparse")


@dataclass(frozen=True)
class _Stack:
    """One tensor (b, *) for b frames, and its rows."""

    whole: Tensor

    @cached_property
    def rows(self) -> tuple[Tensor, ...]:
        return self.whole.unbind()


class Bucket:
    """Frames of one shape, dtype and device that have a gradient, as one tensor: (n, p) of one, else (b, n, p).

    Several frames, unless they are sharded, are copied together once a step and written back at its end, by
    `write_back`; what is kept of them are the rows of one tensor for each key, and is not copied.
    """

    def __init__(self, params: list[Tensor], states: list[dict[str, Any]]):
        self.params = params
        self.states = states
        self.is_sharded = is_sharded(params[0])
        self.is_single = len(params) == 1 and params[0].dim() == 2
        self.is_stacked = len(params) > 1 and not self.is_sharded
        self._stacks: dict[str, _Stack] = {}
        self._frames: _Stack | None = None
        self._writes: list[int] | None = None
        self.begin([*map(gradient_of, params)])

    def begin(self, gradients: list[Tensor]) -> None:
        """Forgets what may have changed since the last step."""
        self.is_read = reads_are_free(self.params[0])
        self._gradients = gradients
        self._wear: float | None = None
        self._is_current = self._is_ahead = False
        self._staged: list[tuple[str, Tensor | list[Any]]] = []
        self._seen: set[str] = set()

    def were_changed(self, writes: Mapping[int, int]) -> bool:
        """Returns whether somebody else wrote to a frame since `write_back`, or since so many `writes`, by id.

        As far as is known.
        """
        now = [*map(write_count, self.params)]
        if self._writes is None:
            return now != [*map(writes.get, map(id, self.params), now)]
        return now != self._writes

    def writes(self) -> dict[int, int]:
        """Returns how often each frame had been written to after the last step, by id, as far as there was one."""
        return dict(zip(map(id, self.params), self._writes or (), strict=False))

    @property
    def wear(self) -> float:
        """What rounding may have done to frames since the last polish, in limits; infinite before the first step."""
        if self._wear is None:
            self._wear = max(map(dict.get, self.states, itertools.repeat("wear"), itertools.repeat(math.inf)))
        return self._wear

    @wear.setter
    def wear(self, limits: float) -> None:
        self._wear = limits
        for state in self.states:
            state["wear"] = limits

    def frames(self) -> Tensor:
        """W."""
        if not self.is_stacked:
            return self.gather(self.params)
        if self._frames is None:
            self._frames = _Stack(torch.stack(self.params).detach())
        elif not self._is_current:
            torch.stack(self._plain, out=self._frames.whole)
        self._is_current = True
        return self._as_matrices(self._frames.whole)

    def gradients(self) -> Tensor:
        """dL/dW, in the dtype of W."""
        gradients, dtype = self._gradients, self.params[0].dtype
        if any(map(_is_sparse, gradients)):
            gradients = [_dense(g) for g in gradients]
        if self.is_stacked:
            return self._as_matrices(torch.stack(gradients).to(dtype))
        return self.gather([g.to(dtype) for g in gradients])

    def shares_of_overflow(self) -> Tensor:
        """Bounds each ||G||_F over the largest whose square is finite; on all ranks that of the whole frame."""
        p = self.params[0]
        most = torch.finfo(p.dtype).max ** 0.5
        if self.is_sharded:  # the largest of all ranks would lose a NaN, a sum does not
            norms = [whole(torch.linalg.vector_norm(_dense(g))).double() for g in self._gradients]
            return torch.stack(norms) / most
        largest = torch.linalg.vector_norm(self.gradients().reshape(len(self.params), -1), ord=math.inf, dim=1)
        return largest.double() * (p.numel() ** 0.5 / most)

    def local_gradients(self) -> list[Tensor]:
        """Returns the gradients, of sharded frames this rank's part."""
        return [local_part(_dense(g)) for g in self._gradients]

    def refresh(self, with_remainder: bool) -> None:
        """Gives frames a remainder, or takes one away that they shall not have or that is of another dtype."""
        if not with_remainder and not any(map(operator.contains, self.states, itertools.repeat("lo"))):
            return
        stack = self._held("lo")
        if with_remainder and stack is not None and stack.whole.dtype == self.params[0].dtype:
            return
        for p, state in zip(self.params, self.states, strict=True):
            lo = state.get("lo")
            if lo is not None and (lo.dtype != p.dtype or lo.shape != p.shape or not with_remainder):
                del state["lo"]
                state.pop("wear", None)
                self._wear = None
            if with_remainder and "lo" not in state:
                state["lo"] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def forget(self) -> None:
        """Drops the remainders, which belong to other values of the frames, and has the next step polish."""
        self._wear = None
        self._stacks.pop("lo", None)
        for state in self.states:
            if self.is_read:
                state.pop("lo", None)
            elif "lo" in state:
                state["lo"].zero_()
            state.pop("wear", None)

    def remainders(self) -> Tensor | None:
        """Returns what the frames would have beyond W in a wider dtype, or None."""
        return self._gathered("lo") if self._have("lo") else None

    def add(self, increment: Tensor) -> None:
        """W + lo += increment, where W is what rounds to the dtype."""
        if self.is_stacked:
            _add(self.frames(), self.remainders(), increment)
            self._is_ahead = True
            return
        for p, state, part in zip(self.params, self.states, self.scatter(increment), strict=True):
            _add(local_part(p), local_part(state["lo"]) if "lo" in state else None, part)

    def assign(self, exact: Tensor) -> None:
        """Sets W + lo to frames in float64 or complex128."""
        if self.is_stacked:
            _assign(self.frames(), self.remainders(), exact)
            self._is_ahead = True
            return
        for p, state, part in zip(self.params, self.states, self.scatter(exact), strict=True):
            _assign(local_part(p), local_part(state["lo"]) if "lo" in state else None, part)

    def write_back(self) -> None:
        """Has the parameters be W, at the end of a step."""
        if self._is_ahead and self._frames is not None:
            copy_each(self._plain, self._frames.rows)
        self._is_ahead = False
        # FSDP2 writes to the tensors of sharded parameters without changing their values.
        self._writes = None if self.is_sharded else [*map(write_count, self.params)]
        if self.params[0].numel() > _SMALL:
            self._frames = None

    def gather(self, tensors: list[Tensor]) -> Tensor:
        """Returns one tensor out of one for each frame."""
        if self.is_stacked:
            return self._as_matrices(torch.stack(tensors).detach())
        if self.is_single:
            return whole(tensors[0]).detach()
        n, p = tensors[0].shape[-2:]
        if len(tensors) == 1:
            return whole(tensors[0]).detach().reshape(-1, n, p)
        return torch.cat([whole(t).detach().reshape(-1, n, p) for t in tensors])

    def scatter(self, batch: Tensor, likes: list[Tensor] | None = None) -> list[Tensor]:
        """For each frame its part of a batch, in the shape of the frame, or of `likes`; if that is sharded, locally."""
        likes = self.params if likes is None else likes
        if self.is_stacked:
            return list(batch.reshape(len(likes), *likes[0].shape).unbind())
        if self.is_single:
            return [local_part(placed_like(batch.reshape(likes[0].shape), likes[0]))]
        sizes = [math.prod(param.shape[:-2]) for param in self.params]
        return [
            local_part(placed_like(part.reshape(like.shape), like))
            for part, like in zip(batch.split(sizes), likes, strict=True)
        ]

    def state(self, key: str, *, is_real: bool = False, of_columns: bool = False) -> Tensor:
        """Returns a state of every frame, zero at first, and cast if the frame was; not to be written to.

        Args:
            key: what it is called.
            is_real: whether it is real for complex frames as well.
            of_columns: whether its shape is (*, p, p), on all ranks, and not that of the frame.
        """
        dtype = self.params[0].dtype
        dtype = dtype.to_real() if is_real else dtype
        stack = self._held(key)
        if stack is not None and stack.whole.dtype == dtype:
            return self._as_matrices(stack.whole)
        for p, state in zip(self.params, self.states, strict=True):
            if key in state:
                if state[key].dtype != dtype:
                    state[key] = state[key].to(dtype)
            elif of_columns:
                *batch, _, columns = p.shape
                state[key] = torch.zeros(*batch, columns, columns, dtype=dtype, device=p.device)
            else:
                state[key] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        return self._gathered(key)

    def numbers(self, key: str) -> Tensor | None:
        """Returns a state of one real number for each matrix, zero at first; None if no frame has it."""
        stack = self._held(key)
        if stack is not None:
            return stack.whole.reshape(-1)
        present = [state.get(key) for state in self.states]
        if all(numbers is None for numbers in present):
            return None
        *batch, _, _ = self.params[0].shape
        zero = torch.zeros(batch, dtype=self.params[0].dtype.to_real(), device=self.params[0].device)
        stack = _Stack(torch.stack([zero if numbers is None else numbers.to(zero) for numbers in present]))
        self._hold(key, stack)
        return stack.whole.reshape(-1)

    def counts(self, key: str) -> Tensor:
        """Returns a number of every frame, on its device and zero at first; to be written to as one tensor, (b,)."""
        stack = self._held(key)
        if stack is None or stack.whole.device != self.params[0].device:
            device = self.params[0].device
            numbers = [state.get(key, 0.0) for state in self.states]
            stack = _Stack(
                torch.stack(
                    [
                        number.to(device, torch.float32).reshape(())
                        if isinstance(number, Tensor)
                        else torch.full((), float(number), device=device)
                        for number in numbers
                    ]
                )
            )
            self._hold(key, stack)
        return stack.whole

    def whole(self, key: str) -> Tensor | None:
        """Returns the tensor whose rows the states are, if they are rows of one."""
        stack = self._held(key)
        return None if stack is None else stack.whole

    def stage(self, key: str, value: Tensor | list[Any]) -> None:
        """Keeps what `state` and `numbers` shall read from `commit` on; a list has an entry for each frame."""
        self._staged.append((key, value))

    def is_finite(self) -> bool:
        """Returns whether all tensors that were staged are finite; on a CPU, where that may be asked."""
        return all(bool(torch.isfinite(value).all()) for _, value in self._staged if isinstance(value, Tensor))

    def taken(self) -> list[tuple[str, Tensor | list[Any]]]:
        """Returns what was staged, which is no more then."""
        staged, self._staged = self._staged, []
        return staged

    def commit(self) -> None:
        """Writes what was staged."""
        for key, value in self._staged:
            if not isinstance(value, Tensor):
                for state, entry in zip(self.states, value, strict=True):
                    state[key] = entry
                continue
            stack = self._held(key)
            if stack is not None and stack.whole.dtype == value.dtype:
                stack.whole.copy_(value.reshape(stack.whole.shape))
            elif value.dim() == 1:
                self._hold(key, _Stack(value.clone().reshape(len(self.params), *self.params[0].shape[:-2])))
            else:
                parts = self.scatter(value, [state[key] for state in self.states])
                for state, part in zip(self.states, parts, strict=True):
                    local_part(state[key]).copy_(part)
        self._staged.clear()

    @cached_property
    def _plain(self) -> list[Tensor]:
        # They count writes together with the parameters, and operators take them faster.
        return [p.detach() for p in self.params]

    def _as_matrices(self, stack: Tensor) -> Tensor:
        return stack.view(-1, *stack.shape[-2:])

    def _held(self, key: str) -> _Stack | None:
        """Returns the tensor whose rows the states are, unless somebody has put others in their place."""
        stack = self._stacks.get(key)
        if stack is None or key in self._seen:
            return stack
        if all(map(operator.is_, map(dict.get, self.states, itertools.repeat(key)), stack.rows)):
            self._seen.add(key)
            return stack
        del self._stacks[key]
        return None

    def _have(self, key: str) -> bool:
        return self._held(key) is not None or all(map(operator.contains, self.states, itertools.repeat(key)))

    def _hold(self, key: str, stack: _Stack) -> None:
        """Has the states be the rows of one tensor."""
        for state, row in zip(self.states, stack.rows, strict=True):
            state[key] = row
        self._stacks[key] = stack
        self._seen.add(key)

    def _gathered(self, key: str) -> Tensor:
        """Returns a state that all frames have."""
        if not self.is_stacked:
            return self.gather([state[key] for state in self.states])
        stack = self._held(key)
        if stack is None:
            stack = _Stack(torch.stack([state[key] for state in self.states]).detach())
            self._hold(key, stack)
        return self._as_matrices(stack.whole)


def buckets(params: Iterable[Tensor], states: MutableMapping[Tensor, dict[str, Any]]) -> list[Bucket]:
    """Sorts the frames that have a gradient by shape, dtype and device."""
    sorted_: dict[tuple[Any, ...], list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            sorted_.setdefault((p.shape, p.dtype, p.device, is_sharded(p)), []).append(p)
    filled = []
    for alike in sorted_.values():
        most = max(1, _LARGEST // alike[0].numel())
        for i in range(0, len(alike), most):
            at_once = alike[i : i + most]
            filled.append(Bucket(at_once, [states[p] for p in at_once]))
    return filled


def _dense(g: Tensor) -> Tensor:
    return g.to_dense() if g.is_sparse else g


def _add(w: Tensor, lo: Tensor | None, increment: Tensor) -> None:
    if lo is None:
        w.add_(increment)
        return
    # The rounding of W + lo comes out exactly, but where lo is larger than W, and then relative to lo.
    total = w + lo.add_(increment)
    lo.add_(w - total)
    w.copy_(total)


def _assign(w: Tensor, lo: Tensor | None, exact: Tensor) -> None:
    w.copy_(exact)
    if lo is not None:
        lo.copy_(exact - w)


_nothing = itertools.repeat(None)


class Sorting:
    """The buckets of a group, and by what they are known to be still the right ones.

    Args:
        params: the frames of the group.
        states: the optimizer's, by parameter.
    """

    def __init__(self, params: list[Tensor], states: MutableMapping[Tensor, dict[str, Any]]):
        self._params = list(params)
        self.buckets = buckets(params, states)
        self._states = list(states.values())
        self._is_kept = not any(bucket.is_sharded for bucket in self.buckets)
        if self._is_kept:
            self._lack = [p.grad is None for p in params]
            self._places = [*map(Tensor.data_ptr, params)]
            self._dtypes = [bucket.params[0].dtype for bucket in self.buckets]
            indices = {id(p): i for i, p in enumerate(params)}
            self._indices = [[indices[id(p)] for p in bucket.params] for bucket in self.buckets]

    def begin(self, params: list[Tensor], states: list[dict[str, Any]]) -> bool:
        """Begins a step of each bucket; False if other frames have a gradient by now, or they are not where they were.

        Args:
            params: the frames of the group now.
            states: all states of the optimizer.
        """
        if not (self._is_kept and _are_same(self._params, params) and _are_same(self._states, states)):
            return False
        gradients = [*map(gradient_of, params)]
        # What is assigned to `.data` is elsewhere.
        if self._lack != [*map(operator.is_, gradients, _nothing)] or self._places != [*map(Tensor.data_ptr, params)]:
            return False
        if self._dtypes != [bucket.params[0].dtype for bucket in self.buckets]:
            return False
        for bucket, indices in zip(self.buckets, self._indices, strict=True):
            bucket.begin([*map(gradients.__getitem__, indices)])
        return True

    def writes(self) -> dict[int, int]:
        """Returns how often each frame had been written to after the last step, by id."""
        return {key: count for bucket in self.buckets for key, count in bucket.writes().items()}


def _are_same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))
