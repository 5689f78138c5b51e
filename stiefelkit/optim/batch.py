"""Frames of one shape that are moved together, and what an optimizer keeps of each."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit._torch import copy_each, write_count
from stiefelkit.errors import StiefelkitError
from stiefelkit.functional._arithmetic.product import FullPrecision
from stiefelkit.functional._arithmetic.reads import switch
from stiefelkit.metrics import frame_tolerance, rounding_limit
from stiefelkit.tensors import full_tensor, is_sharded, local_part, placed_like

__all__ = ["Bucket", "Group", "Sorting", "buckets", "gradient_of", "limit_of"]

Group = dict[str, Any]
"""A parameter group: its "params", "manifold" and settings."""
State = dict[str, Any]
"""What an optimizer keeps of one parameter."""

_LARGEST = 1 << 22
"""Numbers in a batch that is made by copying frames together."""
_SMALL = 1 << 14
"""Numbers of a frame above which calls cost less than the memory of a copy that is kept."""
_SEEN_COLUMNS = 16
"""Columns whose lengths show whether a mean was written through `.data`."""
_LOOK_EVERY = 8
"""Steps from one look at them to the next."""

gradient_of = operator.attrgetter("grad")
"""The gradient of a parameter; None where it has none."""
_is_sparse = operator.attrgetter("is_sparse")

limit_of = functools.lru_cache(maxsize=256)(rounding_limit)
"""`stiefelkit.metrics.rounding_limit`, computed once for each number of columns and dtype."""


@dataclass(frozen=True)
class _Stack:
    """One tensor (b, *) for b frames, and its rows."""

    whole: Tensor

    @cached_property
    def rows(self) -> tuple[Tensor, ...]:
        return self.whole.unbind()


class Bucket:
    """Frames of one shape, dtype and device that have a gradient, as one tensor: (n, p) of one, else (b, n, p).

    Several frames, unless they are sharded, are copied together once a step and written back at its end; what is kept
    of them are the rows of one tensor for each key, and is not copied. Where no value is read, `frames` and
    `remainders` are what `add` has made of them, and the tensors are written at the end of the step, if it was finite.
    While a step runs, `w` and `g` are frames and gradients, and `lo` the remainders; `is_current` tells whether `w` and
    `lo` show what `add` has done.
    """

    def __init__(self, params: list[Tensor], states: list[State], is_free: bool = True):
        self.params, self.states = params, states
        self.is_sharded = _is_sharded(params[0])
        self.is_stacked = len(params) > 1 and not self.is_sharded
        self._is_matrix = len(params) == 1 and not self.is_sharded and params[0].dim() == 2
        self.dtype = params[0].dtype
        self._wide = torch.complex128 if self.dtype.is_complex else torch.float64
        self._seen_columns = min(params[0].shape[-1], _SEEN_COLUMNS)
        self._not_looked = 0
        self.is_narrow = self.dtype != self._wide
        self._stacks: dict[str, _Stack] = {}
        self._frames: _Stack | None = None
        self.begin(is_free)

    def begin(self, is_free: bool) -> None:
        """Forgets what may have changed since the last step, in which values are read if they may be and are free."""
        self.may_sync_host = is_free and not switch.forbidden and self.params[0].is_cpu
        self._gradients: list[Tensor] = [*map(gradient_of, self.params)]
        self._gathered_gradients: Tensor | None = None
        self._is_loaded = self._is_ahead = False
        self._staged: dict[str, Tensor | list[Any]] = {}
        self.stage: Callable[[str, Tensor | list[Any]], None] = self._staged.__setitem__
        """Keeps what `state` and `numbers` shall read from `commit` on; a list has an entry for each frame."""
        self._seen: set[str] = set()
        self._moved: tuple[Tensor, Tensor | None] | None = None
        self.all_finite: Tensor | None = None
        self.is_current = False

    def run(self, move: Callable[[Group, "Bucket"], None], group: Group, writes: dict[int, int]) -> None:
        """Makes a step of a group's frames that writes all or nothing, and notes the write count of each frame."""
        if self._were_changed(writes, by_value=group.get("every", 1) == 1):
            self.forget()
        fresh = [*filter(operator.not_, self.states)]
        if "precision" in group:
            self.refresh(group["precision"] == "exact" and self.is_narrow)
        self.load(with_remainders=not self.is_sharded)  # which would be gathered at each step
        self.g = self.gradients()
        errors = map(dict.get, self.states, itertools.repeat("wear"), itertools.repeat(math.inf))
        self.accumulated_error: float = max(errors)
        """What rounding may have done to frames since the last polish, in limits; infinite at first."""
        with FullPrecision(self.params[0].device):
            try:
                move(group, self)
                if self.may_sync_host:
                    for state in self.states:
                        state["wear"] = self.accumulated_error
                else:
                    self.commit_if_finite()
            except StiefelkitError:
                for state in fresh:  # half a state would not load
                    state.clear()
                raise
            finally:
                writes.update(self._write_back())

    def load(self, with_remainders: bool = True) -> None:
        """Sets `w` and `lo` to the frames and remainders as they are now."""
        if self._is_matrix and self._moved is None:
            self.w, self.lo = self.params[0].detach(), self.states[0].get("lo")
        else:
            self.w, self.lo = self.frames(), self.remainders() if with_remainders else None
        self.is_current = with_remainders

    def require(self, holds: bool | Tensor, error: Callable[[], Exception]) -> None:
        """Raises an error unless something holds; where no value is read, nothing will be written then."""
        if self.may_sync_host:
            if not holds:
                raise error()
        elif isinstance(holds, Tensor):
            self.all_finite = holds if self.all_finite is None else self.all_finite & holds

    def _were_changed(self, writes: Mapping[int, int], by_value: bool) -> bool:
        """Returns whether somebody else wrote to a frame: by write counts, each eighth time by the columns."""
        now = [*map(write_count, self.params)]
        if now != [*map(writes.get, map(id, self.params), now)]:
            return True
        self._not_looked += 1
        if not (by_value and self.may_sync_host) or self.is_sharded or self._not_looked < _LOOK_EVERY:
            return False
        self._not_looked = 0
        most = math.sqrt(self._seen_columns) * frame_tolerance(self.params[0].shape[-1], self.dtype)
        w = self.frames() if self.is_stacked else self.params[0].detach()
        w = w.narrow(-1, 0, self._seen_columns)
        if self._is_matrix:
            return abs(torch.linalg.vector_norm(w, dtype=self._wide).item() ** 2 - w.shape[-1]) > most
        norms = torch.linalg.vector_norm(w, dim=(-2, -1), dtype=self._wide)
        return norms.square_().sub_(w.shape[-1]).abs_().max().item() > most

    def frames(self) -> Tensor:
        """Returns W."""
        if self._moved is not None:
            return self._moved[0]
        if self._is_matrix:
            return self.params[0].detach()
        if not self.is_stacked:
            return self._gather(self.params)
        if self._frames is None:
            self._frames = _Stack(torch.stack(self.params).detach())
        elif not self._is_loaded:
            torch.stack(self._detached, out=self._frames.whole)
        self._is_loaded = True
        return self._as_matrices(self._frames.whole)

    def gradients(self) -> Tensor:
        """Returns :math:`∂L/∂W`, in the dtype of W."""
        if self._gathered_gradients is None:
            gradients = self._gradients
            if any(map(_is_sparse, gradients)):
                gradients = [*map(_dense, gradients)]
            g = gradients[0].detach() if self._is_matrix else self._gather(gradients)
            self._gathered_gradients = g.to(self.params[0].dtype)
        return self._gathered_gradients

    def shares_of_overflow(self) -> Tensor:
        """Bounds each :math:`‖G‖_F` over the largest whose square is finite; on all ranks that of the whole frame."""
        p = self.params[0]
        most = torch.finfo(p.dtype).max ** 0.5
        if self.is_sharded:  # the largest of all ranks would lose a NaN, a sum does not
            norms = [full_tensor(torch.linalg.vector_norm(_dense(g))).double() for g in self._gradients]
            return torch.stack(norms) / most
        largest = torch.linalg.vector_norm(self.gradients().reshape(len(self.params), -1), ord=math.inf, dim=1)
        return largest.double() * (p.numel() ** 0.5 / most)

    def local_gradients(self) -> list[Tensor]:
        """Returns the gradients, of sharded frames this rank's part."""
        return [local_part(_dense(g)) for g in self._gradients]

    def refresh(self, with_remainder: bool) -> None:
        """Gives frames a remainder, or takes one away that they shall not have or that is of another dtype."""
        if with_remainder and "lo" in self._stacks and self._held("lo") is not None:
            return
        for p, state in zip(self.params, self.states, strict=True):
            lo = state.get("lo")
            if lo is not None and (lo.dtype != p.dtype or lo.shape != p.shape or not with_remainder):
                del state["lo"]
                state.pop("wear", None)
            if with_remainder and "lo" not in state:
                state["lo"] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def forget(self) -> None:
        """Drops the remainders, which belong to other values of the frames, and has the next step polish."""
        self._stacks.pop("lo", None)
        for state in self.states:
            if self.may_sync_host:
                state.pop("lo", None)
            elif "lo" in state:
                state["lo"].zero_()
            state.pop("wear", None)

    def remainders(self) -> Tensor | None:
        """Returns what the frames would have beyond W in a wider dtype, or None."""
        if self._moved is not None:
            return self._moved[1]
        return self._gathered("lo") if all(map(operator.contains, self.states, itertools.repeat("lo"))) else None

    def add(self, increment: Tensor) -> None:
        """Adds to W + lo, where W is what rounds to the dtype."""
        if self.may_sync_host:
            alone = ((self.params[0], self.states[0].get("lo"), increment),)
            for w, lo, part in alone if self._is_matrix else self._parts(increment):
                if lo is None:
                    w.add_(part)
                    continue
                # The rounding of W + lo comes out exactly, but where lo is larger than W, and then relative to lo.
                total = torch.add(w, lo.add_(part), out=part)
                lo.add_(w.sub_(total))
                w.copy_(total)
            return
        w, lo = self.frames(), self.remainders()
        if lo is not None:
            increment = lo + increment
        total = w + increment
        self.replace(total, None if lo is None else increment + (w - total))

    def replace(self, w: Tensor, lo: Tensor | None) -> None:
        """Takes others for W and lo, where no value is read."""
        self._moved = w, lo

    def assign(self, exact: Tensor) -> None:
        """Sets W + lo to frames in float64 or complex128."""
        if self.may_sync_host:
            for w, lo, part in self._parts(exact):
                w.copy_(part)
                if lo is not None:
                    lo.copy_(part - w)
            return
        w = exact.to(self.params[0].dtype)
        self.replace(w, None if self.remainders() is None else (exact - w).to(w.dtype))

    def _parts(self, batch: Tensor) -> Sequence[tuple[Tensor, Tensor | None, Tensor]]:
        """Returns W, lo and what is written to them: of the whole batch, or of each frame."""
        if self._is_matrix:
            return ((self.params[0], self.states[0].get("lo"), batch),)
        if self.is_stacked:
            self._is_ahead = True
            return ((self.frames(), self.remainders(), batch),)
        self.is_current = False
        return [
            (local_part(p), local_part(state["lo"]) if "lo" in state else None, part)
            for p, state, part in zip(self.params, self.states, self._scatter(batch), strict=True)
        ]

    def commit_if_finite(self) -> None:
        """Writes frames and states where the step was finite, and counts it where not: in place, as graphs do."""
        assert self.all_finite is not None
        if self._moved is not None:
            (w, lo), self._moved = self._moved, None
            if self.is_stacked:
                chosen = torch.where(self.all_finite, w, self.frames())
                copy_each(self.params, chosen.reshape(-1, *self.params[0].shape).unbind())
            else:
                for p, part in zip(self.params, self._scatter(w), strict=True):
                    self._put(p.detach(), part)
            if lo is not None:
                self.stage("lo", lo)
        self._write_staged()
        self.numbers("refused", of_frames=True).add_(~self.all_finite)
        for state in self.states:
            state.pop("wear", None)

    def commit(self) -> None:
        """Writes what was staged; where no value is read, that waits for the end of the step."""
        if self.may_sync_host:
            self._write_staged()

    def _write_staged(self) -> None:
        for key, value in self._staged.items():
            if not isinstance(value, Tensor):
                for state, entry in zip(self.states, value, strict=True):
                    state[key] = entry
                continue
            stack = self._stacks[key] if key in self._seen else self._held(key)
            if stack is not None:
                self._put(stack.whole, value)
            elif value.dim() == 1:
                self._hold(key, _Stack(value.clone().reshape(len(self.params), *self.params[0].shape[:-2])))
            else:
                olds = [*map(operator.itemgetter(key), self.states)]
                parts = [value] if self._is_matrix else self._scatter(value, olds)
                for old, part in zip(olds, parts, strict=True):
                    self._put(old, part)
        self._staged.clear()

    def _put(self, old: Tensor, value: Tensor) -> None:
        old = local_part(old) if self.is_sharded else old
        if self.all_finite is None:
            old.copy_(value.reshape(old.shape))
        else:
            torch.where(self.all_finite, value.reshape(old.shape).to(old.dtype), old, out=old)

    def _write_back(self) -> Iterable[tuple[int, int]]:
        """Writes W into the parameters at the end of a step; returns the write count of each after that, by its id."""
        if self._is_ahead and self._frames is not None:
            copy_each(self._detached, self._frames.rows)
        self._is_ahead = False
        self._gathered_gradients = self._moved = None
        for name in ("w", "lo", "g"):
            vars(self).pop(name, None)
        if self.params[0].numel() > _SMALL:
            self._frames = None
        # FSDP2 writes to the tensors of sharded parameters without changing their values.
        return () if self.is_sharded else zip(map(id, self.params), map(write_count, self.params), strict=True)

    def _gather(self, tensors: list[Tensor]) -> Tensor:
        """Returns one tensor out of one for each frame."""
        if self.is_stacked:
            return self._as_matrices(torch.stack(tensors).detach())
        if self.is_sharded:
            tensors = [*map(full_tensor, tensors)]
        if len(tensors) == 1:
            batch = tensors[0].detach()
            return batch if batch.dim() == 2 else batch.reshape(-1, *batch.shape[-2:])
        return torch.cat([t.detach().reshape(-1, *t.shape[-2:]) for t in tensors])

    def _scatter(self, batch: Tensor, likes: list[Tensor] | None = None) -> list[Tensor]:
        """For each frame its part of a batch, in the shape of the frame, or of `likes`; if that is sharded, locally."""
        likes = self.params if likes is None else likes
        if not self.is_sharded:
            return list(batch.reshape(len(likes), *likes[0].shape).unbind())
        sizes = [math.prod(param.shape[:-2]) for param in self.params]
        parts = batch.reshape(-1, *batch.shape[-2:]).split(sizes)
        return [local_part(placed_like(x.reshape(like.shape), like)) for x, like in zip(parts, likes, strict=True)]

    def state(self, key: str, *, is_real: bool = False, of_columns: bool = False) -> Tensor:
        """Returns a state of every frame, zero at first, in its dtype or real; (*, p, p) if `of_columns`."""
        dtype = self.params[0].dtype
        dtype = dtype.to_real() if is_real else dtype
        stack = self._held(key) if key in self._stacks else None
        if stack is not None:
            return self._as_matrices(stack.whole)
        for p, state in zip(self.params, self.states, strict=True):
            if key in state:
                state[key] = state[key].to(dtype)
            elif of_columns:
                *batch, _, columns = p.shape
                state[key] = torch.zeros(*batch, columns, columns, dtype=dtype, device=p.device)
            else:
                state[key] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        return self.states[0][key].detach() if self._is_matrix else self._gathered(key)

    def numbers(self, key: str, *, of_frames: bool = False) -> Tensor:
        """Returns a real number of each matrix, or of each frame, zero at first; without reads the kept tensor."""
        stack = self._held(key)
        if stack is None:
            p = self.params[0]
            dtype, shape = (torch.float32, ()) if of_frames else (p.dtype.to_real(), p.shape[:-2])
            numbers = [
                x.to(p.device, dtype).reshape(shape)
                if isinstance(x, Tensor)
                else torch.full(shape, x, dtype=dtype, device=p.device)  # which a graph may capture
                for x in [state.get(key, 0.0) for state in self.states]
            ]
            stack = _Stack(torch.stack(numbers))
            if not self.may_sync_host:
                self._hold(key, stack)
        return stack.whole.reshape(-1)

    def is_finite(self) -> bool:
        """Returns whether all tensors that were staged are finite; on a CPU, where that may be asked."""
        return all(bool(torch.isfinite(value).all()) for value in self._staged.values() if isinstance(value, Tensor))

    @cached_property
    def _detached(self) -> list[Tensor]:
        # They count writes together with the parameters, and operators take them faster.
        return [p.detach() for p in self.params]

    def _as_matrices(self, stack: Tensor) -> Tensor:
        return stack.view(-1, *stack.shape[-2:])

    def _held(self, key: str) -> _Stack | None:
        """Returns the tensor whose rows the states are, unless a row is no longer a view of it."""
        stack = self._stacks.get(key)
        if stack is None or key in self._seen:
            return stack
        if all(map(operator.is_, map(dict.get, self.states, itertools.repeat(key)), stack.rows)):
            self._seen.add(key)
            return stack
        del self._stacks[key]
        return None

    def _hold(self, key: str, stack: _Stack) -> None:
        """Makes the states the rows of one tensor."""
        for state, row in zip(self.states, stack.rows, strict=True):
            state[key] = row
        self._stacks[key] = stack
        self._seen.add(key)

    def _gathered(self, key: str) -> Tensor:
        """Returns a state that all frames have."""
        if not self.is_stacked:
            return self._gather([*map(operator.itemgetter(key), self.states)])
        stack = self._held(key)
        if stack is None:
            stack = _Stack(torch.stack([state[key] for state in self.states]).detach())
            self._hold(key, stack)
        return self._as_matrices(stack.whole)


def buckets(params: Iterable[Tensor], states: MutableMapping[Tensor, State], is_free: bool = True) -> Iterator[Bucket]:
    """Sorts the frames that have a gradient by shape, dtype and device; values are read if they can be and are free."""
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            alike.setdefault((p.shape, p.dtype, p.device, _is_sharded(p)), []).append(p)
    for some in alike.values():
        most = max(1, _LARGEST // some[0].numel())
        for i in range(0, len(some), most):
            at_once = some[i : i + most]
            yield Bucket(at_once, [states[p] for p in at_once], is_free)


def _is_sharded(p: Tensor) -> bool:
    return type(p) is not nn.Parameter and is_sharded(p)


def _dense(g: Tensor) -> Tensor:
    return g.to_dense() if g.is_sparse else g


class Sorting:
    """The buckets of a group, and by what they are known to be still the right ones."""

    def __init__(self, params: list[Tensor], states: MutableMapping[Tensor, State], is_free: bool):
        self._params = list(params)
        self.buckets = list(buckets(params, states, is_free))
        self._is_kept = not any(bucket.is_sharded for bucket in self.buckets)
        self._lack = [p.grad is None for p in params]
        self._addresses = [*map(Tensor.data_ptr, params)] if self._is_kept else []

    def begin(self, params: list[Tensor], states: MutableMapping[Tensor, State], is_free: bool) -> bool:
        """Begins a step of each bucket; False if other frames have a gradient now, or they are not where they were."""
        # What is assigned to `.data` is elsewhere.
        if not (
            self._is_kept
            and len(params) == len(self._params)
            and all(map(operator.is_, params, self._params))
            and self._lack == [*map(operator.is_, map(gradient_of, params), itertools.repeat(None))]
            and self._addresses == [*map(Tensor.data_ptr, params)]
        ):
            return False
        for bucket in self.buckets:
            are_same = all(map(operator.is_, bucket.states, map(states.get, bucket.params)))
            if not are_same or bucket.params[0].dtype != bucket.dtype:
                return False
        for bucket in self.buckets:
            bucket.begin(is_free)
        return True
