"""Frames of one shape that are moved together, and what an optimizer keeps of each."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit._torch import copy_each, write_count
from stiefelkit.functional._arithmetic.devices import switch
from stiefelkit.functional._arithmetic.norms import Norms, norms_of
from stiefelkit.functional._arithmetic.product import FullPrecision
from stiefelkit.functional._kernels.launch import commit
from stiefelkit.metrics import frame_tolerance, rounding_limit, working_dtype
from stiefelkit.tensors import full_tensor, is_sharded, local_part, placed_like

__all__ = ["Bucket", "Group", "Sorted", "begin_buckets", "buckets", "limit_of"]

Group = dict[str, Any]
"""A parameter group: its "params", "manifold" and settings."""
State = dict[str, Any]
"""The state that an optimizer keeps for one parameter."""
Sorted = tuple[list[tuple[object, ...]], "list[Bucket]"]
"""The parameters and settings by which a group was sorted, and its buckets."""

EXTERNAL_CHANGE = 0.1
"""||W^H W - I||_F over sqrt(p) from which a frame has been changed by something else than its optimizer."""
_LARGEST = 1 << 22  # numbers in a batch that is made by copying frames together
_SEEN_COLUMNS = 16  # columns whose lengths show whether a mean was written through `.data`
_LOOK_EVERY = 8  # steps from one look at them to the next

limit_of = functools.lru_cache(maxsize=256)(rounding_limit)
"""`stiefelkit.metrics.rounding_limit`, computed once for each number of columns and dtype."""


class Bucket:
    """Frames of one shape, dtype and device that have a gradient, as one tensor: (n, p) of one, else (b, n, p).

    While a step runs, `w` and `g` are frames and gradients, and `lo` what frames have beyond W in a wider dtype, or
    None. All is written when the step ends: the frames that `add` and `assign` have made, and the states that were
    staged; where no value is read, only if the step was finite. The states of several frames are the rows of one tensor
    for each key.
    """

    w: Tensor
    g: Tensor
    lo: Tensor | None

    def __init__(self, params: list[Tensor], states: list[State]):
        self.params, self.states = params, states
        self.dtype, self.is_sharded = params[0].dtype, _is_sharded(params[0])
        self.is_narrow = self.dtype not in (torch.float64, torch.complex128)
        self.matrices = math.prod(params[0].shape[:-2])
        self._is_matrix = len(params) == 1 and params[0].dim() == 2 and not self.is_sharded
        self._stacks: dict[str, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._not_looked = 0
        self.begin()

    def begin(self, is_free: bool = True) -> None:
        """Begins a step, in which values are read if they can be and are free."""
        self.may_sync_host = is_free and not switch.forbidden and self.params[0].is_cpu
        self._writes: list[tuple[Tensor, Tensor]] | None = None if self.may_sync_host else []
        self.all_finite: Tensor | None = None
        self.bounds: list[tuple[Tensor, float]] = []
        """Where no value is read: what has to hold, and values with the most that they may be, for a step to count."""
        vars(self).pop("g", None)  # of a step that was refused before it began
        self._norms: Norms | None = None
        self._read_states: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor | list[Any]] = {}
        self.stage: Callable[[str, Tensor | list[Any]], None] = self._staged.__setitem__
        """Keeps what `state` and `numbers` shall read at the next step; a list has an entry for each frame."""

    def run(self, move: Callable[[Group, "Bucket"], None], group: Group, writes: dict[int, int]) -> None:
        """Makes a step of a group's frames that writes all or nothing, and notes the write count of each frame."""
        if self._were_changed(writes, by_value=group.get("every", 1) == 1):
            self._forget_remainders()
        self.w = before = self.frames()
        has_remainder = self.is_narrow and group.get("precision") == "exact"
        self.lo = self.state("lo") if has_remainder else self._drop_remainders()
        self.gradients()
        errors = map(dict.get, self.states, itertools.repeat("wear"), itertools.repeat(math.inf))
        self.accumulated_error: float = max(errors)
        """Bound of the error that rounding has added to frames since the last polish, in limits; infinite at first."""
        try:
            with FullPrecision(self.params[0].device):
                move(group, self)
                self._commit(before)
        finally:
            for name in ("w", "g", "lo"):
                vars(self).pop(name, None)
            self._read_states.clear()
        if not self.is_sharded:  # FSDP2 writes to the tensors of sharded parameters without changing their values
            writes.update(zip(map(id, self.params), map(write_count, self.params), strict=True))

    def require(self, holds: bool | Tensor, error: Callable[[], Exception]) -> None:
        """Raises an error unless something holds; where no value is read, nothing will be written then."""
        if self.may_sync_host:
            if not holds:
                raise error()
        elif isinstance(holds, Tensor):
            self.all_finite = holds if self.all_finite is None else self.all_finite & holds

    def require_at_most(self, values: Norms, most: float, error: Callable[[], Exception]) -> None:
        """Raises an error unless no value is larger, or NaN; where none is read, nothing will be written then."""
        if self.may_sync_host:
            self.require(all([value <= most for value in values]), error)
        else:
            self.bounds.append((values[0], most))

    def _were_changed(self, writes: Mapping[int, int], by_value: bool) -> bool:
        """Returns whether somebody else wrote to a frame: by write counts, each eighth time by the columns."""
        now = [*map(write_count, self.params)]
        if now != [*map(writes.get, map(id, self.params), now)]:
            return True
        self._not_looked += 1
        if not (by_value and self.may_sync_host) or self.is_sharded or self._not_looked < _LOOK_EVERY:
            return False
        self._not_looked = 0
        w = self.frames()[..., :_SEEN_COLUMNS]
        norms = torch.linalg.vector_norm(w, dim=(-2, -1), dtype=working_dtype(self.dtype))
        most = math.sqrt(w.shape[-1]) * frame_tolerance(self.params[0].shape[-1], self.dtype)
        return norms.square_().sub_(w.shape[-1]).abs_().max().item() > most

    def frames(self) -> Tensor:
        """Returns W."""
        return self._detached[0] if self._is_matrix else self._together(self._detached)

    def gradients(self) -> Tensor:
        """Returns :math:`∂L/∂W`, in the dtype of W, which is `g` from then on."""
        if "g" not in vars(self):
            gradients = [*map(_gradient_of, self.params)]
            if any(map(_is_sparse, gradients)):
                gradients = [*map(_dense, gradients)]
            self.g = (gradients[0] if self._is_matrix else self._together(gradients)).detach().to(self.dtype)
        return self.g

    @cached_property
    def _detached(self) -> list[Tensor]:
        # They count writes together with the parameters, and operators take them faster.
        return [p.detach() for p in self.params]

    def shares_of_overflow(self) -> Tensor:
        """Bounds each :math:`‖G‖_F` over the largest whose square is finite; on all ranks that of the whole frame."""
        p = self.params[0]
        most = torch.finfo(p.dtype).max ** 0.5
        if self.is_sharded:  # the largest of all ranks would lose a NaN, a sum does not
            norms = [full_tensor(torch.linalg.vector_norm(_dense(g))).double() for g in map(_gradient_of, self.params)]
            return torch.stack(norms) / most
        largest = torch.linalg.vector_norm(self.gradients().reshape(len(self.params), -1), ord=math.inf, dim=1)
        return largest.double() * (p.numel() ** 0.5 / most)

    def gradient_sizes(self) -> tuple[Norms, float]:
        """Returns norms of gradients that are not read, of any kind, and what squares stay finite up to."""
        most = torch.finfo(self.dtype).max ** 0.5
        if self.is_sharded or not self.is_narrow:
            return [self.shares_of_overflow()], math.nextafter(1.0, 0.0)
        return self.gradient_norms(), most

    def gradient_norms(self) -> Norms:
        """Returns ‖G‖_F of each matrix, as `norms_of` gives them."""
        if self._norms is None:
            (self._norms,) = norms_of(self.gradients())
        return self._norms

    def add(self, increment: Tensor) -> None:
        """Adds to W + lo, where W is what rounds to the dtype."""
        w, lo = self.w, self.lo
        if lo is not None:
            increment = increment + lo
        self.w = torch.add(w, increment, out=torch.empty_like(w))  # in the memory format of W, not the increment's
        if lo is not None:
            # The rounding of W + lo comes out exactly, but where lo is larger than W, and then relative to lo.
            self.lo = torch.sub(w, self.w).add_(increment)

    def land(self, w: Tensor, lo: Tensor, squares: Tensor) -> bool:
        """Sets W and lo to what one launch has made, and has the squares of their last defects looked at; True."""
        self.w, self.lo = w, None if self.lo is None else lo
        self.require_at_most([squares], (1 + w.is_complex()) * EXTERNAL_CHANGE**2 * w.shape[-1], AssertionError)
        return True

    def assign(self, exact: Tensor) -> None:
        """Sets W + lo to frames in float64 or complex128."""
        self.w = exact.to(self.dtype)
        self.lo = None if self.lo is None else (exact - self.w).to(self.dtype)

    def state(self, key: str, *, is_real: bool = False, of_columns: bool = False) -> Tensor:
        """Returns a state of every frame, zero at first, in its dtype or real; (*, p, p) if `of_columns`."""
        shape = self.params[0].shape
        if of_columns:
            shape = torch.Size((*shape[:-2], shape[-1], shape[-1]))
        found = self._read(key, shape, self.dtype.to_real() if is_real else self.dtype)
        return found if found.dim() == 2 else found.reshape(-1, *found.shape[-2:])

    def averaged(self, key: str, g: Tensor, decay: float) -> Tensor:
        """Returns :math:`decay M + (1 - decay) G` of a state M."""
        before = self.state(key)
        return before.mul(decay).add_(g, alpha=1 - decay) if self.may_sync_host else torch.lerp(before, g, 1 - decay)

    def mixed(self, before: Tensor, now: Tensor, decay: float) -> Tensor:
        """Returns the same of two tensors, each rounded by itself on a CPU."""
        return before * decay + now * (1 - decay) if self.may_sync_host else torch.lerp(before, now, 1 - decay)

    def numbers(self, key: str, *, of_frames: bool = False) -> Tensor:
        """Returns a real number of each matrix, or of each frame, zero at first."""
        shape = torch.Size() if of_frames else self.params[0].shape[:-2]
        return self._read(key, shape, torch.float32 if of_frames else self.dtype.to_real()).reshape(-1)

    def keeps(self, key: str) -> bool:
        """Returns whether frames have a state, or this step has asked for it."""
        return key in self._read_states or key in self.states[0]

    def is_finite(self) -> bool:
        """Returns whether all tensors that were staged are finite; on a CPU, where that may be asked."""
        return all(bool(torch.isfinite(value).all()) for value in self._staged.values() if isinstance(value, Tensor))

    def _drop_remainders(self) -> None:
        self._stacks.pop("lo", None)
        for state in self.states:
            if state.pop("lo", None) is not None:
                state.pop("wear", None)

    def _forget_remainders(self) -> None:
        """Clears what belongs to other values of the frames, and has the step polish."""
        for state in self.states:
            if "lo" in state:
                state["lo"].zero_()
            state.pop("wear", None)

    def _commit(self, before: Tensor) -> None:
        """Writes frames and states, where no value is read in place, as graphs do, and counts what was not finite."""
        if self.lo is not None:
            self.stage("lo", self.lo)
        for key, value in self._staged.items():
            if isinstance(value, Tensor):
                self._write(key, value)
                continue
            for state, entry in zip(self.states, value, strict=True):
                state[key] = entry
        if not self.may_sync_host:
            self._commit_if_finite(before)
        elif self.w is not before:
            if self._is_matrix:
                copy_each(self._detached, [self.w])
            else:
                self._set_frames(self.w)
        for state in self.states:
            if self.may_sync_host:
                state["wear"] = self.accumulated_error
            else:
                state.pop("wear", None)

    def _commit_if_finite(self, before: Tensor) -> None:
        """Writes what the step has made if all is finite, by few launches; counts it if not."""
        self.numbers("refused", of_frames=True)
        refused = self._read_states["refused"]
        moved = [(before, self.w)] if self.w is not before else []
        commit([*moved, *(self._writes or ())], refused, self.bounds, self.all_finite)
        self.bounds, self.all_finite, self._writes = [], None, None
        self._write("refused", refused)
        if moved and before.data_ptr() != self._detached[0].data_ptr():
            self._set_frames(before)

    def _set_frames(self, w: Tensor) -> None:
        if not self.is_sharded:
            copy_each(self._detached, [w] if self._is_matrix else self._apart(w))
        for p, part in zip(self.params, self._apart(w), strict=True) if self.is_sharded else ():
            local_part(p.detach()).copy_(local_part(placed_like(part, p)))

    def _together(self, tensors: list[Tensor]) -> Tensor:
        """Returns one tensor of matrices out of a tensor for each frame."""
        stack = self._stacked(tensors)
        return stack if stack.dim() == 2 else stack.reshape(-1, *stack.shape[-2:])

    def _stacked(self, tensors: list[Tensor]) -> Tensor:
        if self.is_sharded:
            tensors = [*map(full_tensor, tensors)]
        return tensors[0] if len(tensors) == 1 else torch.stack(tensors)

    def _apart(self, batch: Tensor) -> tuple[Tensor, ...]:
        return batch.reshape(len(self.params), *self.params[0].shape[:-2], *batch.shape[-2:]).unbind()

    def _read(self, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns the states of all frames as one tensor, the one whose rows they are if there is such."""
        stack, rows = self._stacks.get(key, (None, ()))
        if stack is None or not all(map(operator.is_, map(dict.get, self.states, itertools.repeat(key)), rows)):
            entries = []
            for p, state in zip(self.params, self.states, strict=True):
                entry = state.get(key)
                if not (isinstance(entry, Tensor) and entry.shape == shape and entry.dtype == dtype):
                    entry = _entry(entry, p, shape, dtype)
                entries.append(entry)
            self._stacks.pop(key, None)
            stack = entries[0] if self._is_matrix else self._stacked(entries)
        self._read_states[key] = stack
        return stack

    def _write(self, key: str, value: Tensor) -> None:
        """Writes a state; where no value is read, when all is known to be finite."""
        stack = self._read_states[key]
        if self.is_sharded:
            parts = value.reshape(len(self.params), *stack.shape[len(self.params) > 1 :]).unbind()
            for p, state, part in zip(self.params, self.states, parts, strict=True):
                state[key] = entry = _entry(state.get(key), p, part.shape, stack.dtype)
                old, new = local_part(entry), local_part(placed_like(part, entry))
                old.copy_(new) if self._writes is None else self._writes.append((old, new))
            return
        if self._writes is not None:
            self._writes.append((stack, value.reshape(stack.shape)))
        elif value is not stack:
            stack.copy_(value.reshape(stack.shape))
        if len(self.params) == 1:
            self.states[0][key] = stack
        elif key not in self._stacks:
            self._stacks[key] = stack, stack.unbind()
            for state, row in zip(self.states, self._stacks[key][1], strict=True):
                state[key] = row


_gradient_of = operator.attrgetter("grad")
_is_sparse = operator.attrgetter("is_sparse")
_dtype_of = operator.attrgetter("dtype")


def _entry(value: Any, p: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Returns a state of one frame, or zeros where there is none."""
    if isinstance(value, Tensor):
        value = value.to(p.device, dtype)
        return value if value.shape == shape else value.reshape(shape)
    if value is None and shape == p.shape:
        return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
    return torch.full(shape, value or 0.0, dtype=dtype, device=p.device)  # which a graph may capture


def buckets(params: Iterable[Tensor], states: MutableMapping[Tensor, State]) -> list[Bucket]:
    """Sorts the frames that have a gradient by shape, dtype and device."""
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            alike.setdefault((p.shape, p.dtype, p.device, _is_sharded(p)), []).append(p)
    found = []
    for some in alike.values():
        most = max(1, _LARGEST // some[0].numel())
        for i in range(0, len(some), most):
            at_once = some[i : i + most]
            found.append(Bucket(at_once, [states[p] for p in at_once]))
    return found


def begin_buckets(last: "dict[int, Sorted]", group: Group, states: MutableMapping[Tensor, State]) -> list[Bucket]:
    """Begins a step of the buckets of a group, sorted as in its last step where that still holds."""
    params = group["params"]
    arranged, found = last.pop(id(group), ([], []))
    if not found or arranged != _arrangement(params, states):
        found = buckets(params, states)
        arranged = _arrangement(params, states) if found and not found[0].is_sharded else []
    if arranged:
        last[id(group)] = arranged, found
    for bucket in found:
        bucket.begin(is_free=not group.get("capturable"))
    return found


def _arrangement(params: Sequence[Tensor], states: Mapping[Tensor, State]) -> list[tuple[object, ...]]:
    """Returns what the buckets of parameters depend on; what is assigned to `.data` is at another address."""
    lack = map(operator.is_, map(_gradient_of, params), itertools.repeat(None))
    of_states = map(id, map(states.get, params))
    return [*zip(map(id, params), map(Tensor.data_ptr, params), map(_dtype_of, params), lack, of_states, strict=False)]


def _is_sharded(p: Tensor) -> bool:
    return type(p) is not nn.Parameter and is_sharded(p)


def _dense(g: Tensor) -> Tensor:
    return g.to_dense() if g.is_sparse else g
