"""Weights of one kind, mapped by one batched call: their groups, and the slot that each weight has in its group."""

import copy
import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stiefelkit._torch import (
    call_hooks,
    has_saved_tensor_hooks,
    held_parameters,
    is_in_backward,
    is_intercepted,
    write_count,
)
from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.contract.scaled import Scaled
from stiefelkit.weights.optimizer_hooks import WatchedWeight
from stiefelkit.weights.outside_writes import Stacks, TensorSlot, chart_slots, warn_of_write


class GroupMember(WatchedWeight, Protocol):
    """An orthogonal weight as its group sees it: a `CoordinateList`."""

    _slot: "GroupSlot | None"
    is_sparse: bool
    ntensors: int

    def __len__(self) -> int: ...

    def modules(self) -> Iterator[nn.Module]:
        """Yields itself, its map, and what stands on top."""
        ...

    def is_at_rest(self) -> bool:
        """Returns whether a read looks at values."""
        ...

    def project_external_writes(self, by_value: bool | None = None) -> None:
        """Takes frames that were written to from outside to their nearest."""
        ...


structure = SimpleNamespace(count=0)
"""Counts what may change which weights belong together: new ones, casts, other parameters in their place."""


def leave_group(member: GroupMember) -> None:
    """Removes a weight from its group, since it may be of another kind now."""
    member._slot = None
    structure.count += 1


class Opening(threading.local):
    """The number of times that a thread has opened the groups of a model, and the evaluations it has made, by group."""

    depth = 0

    def __init__(self) -> None:
        self.evaluations: dict[Group, Evaluation] = {}


@dataclass
class Backward:
    """The trace of a backward pass: whether there was one, and which frames had no part in it."""

    is_done: bool = False
    without_gradient: frozenset[int] = frozenset()


class Reading(NamedTuple):
    """Coordinates and charts of the weights of a group, column by column, and how often each had been written to."""

    columns: list[list[Tensor]]
    counts: list[list[int]]


class Evaluation:
    """The weights of a group, and what they were computed from.

    `tensors` and `counts` have, weight by weight, its coordinates and its chart, and how often each had been written
    to; `trained` tells which of them get a gradient, the same for all weights.
    """

    def __init__(self, stacked: Tensor, weights: Sequence[Tensor], reading: Reading, backward: Backward):
        columns, counts = reading
        self.stacked, self.weights, self.backward = stacked, weights, backward
        self.tensors, self.counts = list(zip(*columns, strict=True)), list(zip(*counts, strict=True))
        self.trained = [column[0].requires_grad for column in columns]
        self.trains = any(self.trained)
        self.has_graph, self.is_inference = stacked.requires_grad, stacked.is_inference()
        self.writes = 0 if self.is_inference else write_count(stacked)

    def serves(self, wants_graph: bool) -> bool:
        """Returns whether a reader may have the weights: they have the graph that it wants, and are not overwritten."""
        if self.is_inference:
            return torch.is_inference_mode_enabled()
        if write_count(self.stacked) != self.writes:
            warn_of_write("A weight of a group")
            return False
        return not (wants_graph and (self.backward.is_done or self.has_graph != self.trains))


class Group:
    """Weights whose maps differ in coordinates and charts alone, by what carries them; the opening is the model's."""

    def __init__(self, members: Sequence[GroupMember], opening: Opening):
        self.members, self.opening = members, opening
        first = members[0]
        self.map = StackOfMaps(first.param)
        self.can_skip_weight = _applies_without_weight(first.param)
        self.is_bound = bool(first.param.manifolds)
        rows = []
        for member in members:
            coordinates = [TensorSlot(held_parameters(member), f"original{i}") for i in range(first.ntensors)]
            rows.append([*coordinates, *chart_slots(member.param)])
        self.size = first.ntensors
        columns = zip(*rows, strict=True)
        self.columns = [([slot.held for slot in column], [slot.key for slot in column]) for column in columns]
        self.slots = [GroupSlot(self, i, row) for i, row in enumerate(rows)]
        self.latest: Evaluation | None = None
        self.traced: Sequence[Tensor] | None = None
        self._chart: Reading | None = None
        self._stacks = Stacks(first.param)
        for member, slot in zip(members, self.slots, strict=True):
            member._slot = slot

    def read(self) -> Reading | None:
        """Returns what all weights are computed from; None if they cannot be together, and each has to say why."""
        if any(map(_emptied, self.members)):
            return None
        columns: list[list[Tensor]] = [list(map(dict.get, *column)) for column in self.columns]  # type: ignore[arg-type]
        for column in columns[: self.size]:
            if set(map(type, column)) - _PLAIN or len(set(map(_is_trained, column))) > 1:
                structure.count += 1  # sharded, replaced, frozen since
                return None
        if columns[0][0].is_meta:
            return None
        if self.is_bound:
            self._project()
        try:
            counts = [list(map(write_count, column)) for column in columns]
        except RuntimeError:  # of inference_mode, whose tensors count no writes
            return None
        if not self._has_chart(columns, counts):
            self._project()
            counts = [list(map(write_count, column)) for column in columns]
            self._chart = Reading(columns[self.size :], counts[self.size :])
        if self.members[0].is_at_rest() and self._stacks.may_be_wrong(columns):
            self._project(by_value=None)
            counts = [list(map(write_count, column)) for column in columns]
            self._stacks.may_be_wrong(columns, anew=True)  # so that the next read finds what was looked at here
        return Reading(columns, counts)

    def evaluate(self) -> Evaluation | None:
        """Maps all weights at once; None if that cannot be, so that each has to say or to do so by itself."""
        reading = self.read()
        if reading is None:
            return None
        columns, backward = reading.columns, Backward()
        self.map.follow(columns[self.size :])
        with saved_plainly():
            coordinates = [torch.stack(column) for column in columns[: self.size]]
            stacked = self.map(coordinates)
        weights = stacked.unbind()
        if stacked.requires_grad:
            _note_without_gradient(weights, backward)
            _omit_gradients(coordinates, backward)
        return Evaluation(stacked, weights, reading, backward)

    def trace(self) -> None:
        """Maps all weights at once in compiled code, into `traced`."""
        if self.is_complete():
            rows = [list(member.coordinates.values()) for member in self.members]
            charts = [dict(member.param.named_buffers()) for member in self.members]
            chart = {name: torch.stack([held[name] for held in charts]) for name in charts[0]}
            coordinates = [torch.stack(column) for column in zip(*rows, strict=True)]
            self.traced = self.map.with_chart(chart, coordinates).unbind()

    def is_complete(self) -> bool:
        """Returns whether all members are still in the group."""
        return all([member._slot is slot for member, slot in zip(self.members, self.slots, strict=True)])

    def _project(self, by_value: bool | None = False) -> None:
        for member in self.members:
            member.project_external_writes(by_value)

    def _has_chart(self, columns: list[list[Tensor]], counts: list[list[int]]) -> bool:
        """Returns whether the map has the present chart."""
        if self._chart is None:
            return False
        tensors, noted = self._chart
        pairs = zip(columns[self.size :], tensors, strict=True)
        return noted == counts[self.size :] and all([all(map(operator.is_, *pair)) for pair in pairs])


class GroupSlot:
    """The place of a weight in its group: what the weight is read from while the group is open.

    Attributes:
        is_whole: whether the map gives the weight, with nothing on top.
        hooks: the tables of what runs at calls of the weight and its map, which is then evaluated alone.
    """

    __slots__ = ("group", "held", "hooks", "index", "is_whole", "keys")

    def __init__(self, group: Group, index: int, slots: Sequence[TensorSlot]):
        self.group, self.index = group, index
        self.held, self.keys = [slot.held for slot in slots], [slot.key for slot in slots]
        member = group.members[index]
        self.is_whole = len(member) == 1 and not member.is_sparse
        self.hooks = [table for part in member.modules() for table in call_hooks(part)]

    def read(self, member: GroupMember) -> Tensor | None:
        """Returns the weight, of one evaluation of the group; None to evaluate it alone. Not in compiled code."""
        group = self.group
        if is_intercepted() or group.members[self.index] is not member:  # a copy of `__dict__` has the original's slot
            return None
        if is_in_backward():
            # A checkpoint computes anew what it saved, and has to find the same; the other kind wants a graph of its
            # own, and sets no hooks.
            latest = group.latest
            return latest.weights[self.index] if latest and has_saved_tensor_hooks() and self._fits(latest) else None
        evaluations = group.opening.evaluations
        evaluation: Evaluation | None = evaluations.get(group)
        wants_graph = torch.is_grad_enabled()
        if evaluation is None or not (self._fits(evaluation) and evaluation.serves(wants_graph)):
            evaluation = group.evaluate() if group.opening.depth else None
            if evaluation is None:
                return None
            evaluations[group] = evaluation
            if evaluation.has_graph:
                group.latest = evaluation
        w = evaluation.weights[self.index]
        return w if wants_graph or not evaluation.has_graph else w.detach()

    def _fits(self, evaluation: Evaluation) -> bool:
        """Returns whether the weight's coordinates and chart are those that the evaluation has seen."""
        i = self.index
        places = zip(self.held, self.keys, evaluation.tensors[i], evaluation.counts[i], evaluation.trained, strict=True)
        for held, key, t, count, trains in places:
            if held.get(key) is not t or write_count(t) != count or t.requires_grad is not trains:
                return False
        return True


class StackOfMaps:
    """The maps of a group as one, which takes stacked coordinates: their class, where it can, or else vmap."""

    def __init__(self, param: OrthogonalParam):
        self.map = copy.deepcopy(param)
        self.is_vmapped = not maps_stacks(param)
        self.chart: dict[str, Tensor] = {}

    def follow(self, columns: Sequence[Sequence[Tensor]]) -> None:
        """Stacks the charts of the weights anew: writes through `.data` leave no other trace."""
        with torch.inference_mode(False), torch.no_grad():
            stacks = [torch.stack(list(column)) for column in columns]
        self.chart = dict(zip((name for name, _ in self.map.named_buffers()), stacks, strict=True))
        if not self.is_vmapped:
            for slot in chart_slots(self.map):
                slot.held[slot.key] = stacks.pop(0)  # type: ignore[assignment]

    def __call__(self, coordinates: Sequence[Tensor]) -> Tensor:
        """Returns the weights, stacked."""
        if self.is_vmapped:
            return self.with_chart(self.chart, coordinates)
        return self.map(*coordinates).contiguous()

    def with_chart(self, chart: dict[str, Tensor], coordinates: Sequence[Tensor]) -> Tensor:
        """Returns the weights with a chart that is given, stacked."""

        def evaluate(chart: dict[str, Tensor], *values: Tensor) -> Tensor:
            return torch.func.functional_call(self.map, chart, values)

        return (torch.vmap(evaluate) if self.is_vmapped else evaluate)(chart, *coordinates).contiguous()


_PLAIN = {nn.Parameter, Tensor}
_emptied = operator.attrgetter("_emptied")
_is_trained = operator.attrgetter("requires_grad")


def maps_stacks(param: OrthogonalParam) -> bool:
    """Returns whether `forward` of a map and of those inside takes stacks, as its class has to say."""
    kinds = {type(part) for part in param.modules() if isinstance(part, OrthogonalParam)}
    return all(cls.stacks and _owner(cls, "stacks") is _owner(cls, "forward") for cls in kinds)


def _owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


def _applies_without_weight(param: OrthogonalParam) -> bool:
    """Returns whether a map has a way of its own to apply a weight, but for its gain."""
    while isinstance(param, Scaled):
        param = param.inner
    return type(param).linear is not OrthogonalParam.linear


def _note_without_gradient(weights: Sequence[Tensor], backward: Backward) -> None:
    """Makes a backward pass record the weights that no loss depends on."""

    def begin(gradients: Sequence[Tensor | None]) -> None:
        backward.is_done = True
        backward.without_gradient = frozenset(i for i, g in enumerate(gradients) if g is None)

    weights[0].grad_fn.register_prehook(begin)  # type: ignore[union-attr]


def _omit_gradients(coordinates: Sequence[Tensor], backward: Backward) -> None:
    """Leaves the coordinates of those weights without gradients, as if each weight was read by itself."""

    def leave_out(gradients: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        if not backward.without_gradient:
            return None
        return tuple(None if i in backward.without_gradient else g for i, g in enumerate(gradients))

    for c in coordinates:
        if c.grad_fn is not None:
            c.grad_fn.register_hook(leave_out)  # type: ignore[arg-type]


def saved_plainly() -> AbstractContextManager[object]:
    """Returns a context in which tensors are saved as they are, whatever outer hooks of checkpoints do."""
    is_hooked = not torch.compiler.is_compiling() and has_saved_tensor_hooks()
    return saved_tensors_hooks(lambda x: x, lambda x: x) if is_hooked else nullcontext()
