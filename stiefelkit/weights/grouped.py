"""All weights of a model that have one kind of map, evaluated by one batched call."""

import copy
import math
import threading
import weakref
from collections.abc import Hashable, Sequence
from types import MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn

from stiefelkit._torch import (
    call_hooks,
    forward_hooks,
    forward_pre_hooks,
    has_saved_tensor_hooks,
    held_parameters,
    is_in_backward,
    is_intercepted,
    write_count,
)
from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.contract.scaled import Scaled
from stiefelkit.contract.view import Viewed
from stiefelkit.tensors import is_sharding_unit
from stiefelkit.weights.coordinate_list import CoordinateList, saved_plainly
from stiefelkit.weights.find import check_module, orthogonal_weights
from stiefelkit.weights.outside_writes import TensorSlot, chart_slots, warn_of_write

__all__ = ["group_", "grouped", "ungroup_"]


M = TypeVar("M", bound=nn.Module)

_ENTRIES = 1 << 20  # entries of all weights of a group: beyond, memory counts more than calls


class grouped:
    """Context in which weights of a model with the same map, shape, dtype and options are mapped by one batched call.

    At the first read of one of them all are evaluated; each later read gives what was evaluated then, until coordinates
    or charts are written to (a step of an optimizer) or a backward pass has gone through, after which the next read
    evaluates anew. Gradients flow to each weight's own coordinates, and a weight that no loss depends on leaves its own
    without any. Weights and gradients are those without the context, but for rounding.

    Wide weights, kernels, weights with a gain, tied ones and those with other parametrizations on top take part; a
    weight that is the only one of its kind is evaluated by itself, and so is every weight under `torch.func`, while
    something traces, and in threads that have not entered the context.

    One graph is behind all weights of a kind: two losses of one forward that are differentiated one after the other
    need `retain_graph=True` for the first, or groups of their own.

    Args:
        model: any module.

    >>> import stiefelkit as sk
    >>> net = nn.Sequential(*(sk.orthogonal(nn.Linear(8, 8), "weight") for _ in range(3)))
    >>> with grouped(net):
    ...     net(torch.ones(1, 8)).sum().backward()
    >>> net[0].parametrizations.weight.skew.grad.shape
    torch.Size([28])
    """

    def __init__(self, model: nn.Module):
        check_module(model, "grouped")
        self.model = model

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            _open(self.model)

    def __exit__(self, *exception: object) -> None:
        if not torch.compiler.is_compiling():
            _close()


def group_(model: M) -> M:
    """Runs every call of a model inside `grouped`, compiled ones too, and returns the model.

    Reads outside of `model(...)` evaluate a weight by itself. Copies and pickles of the model are grouped as well;
    state dicts are as before. `ungroup_` takes it back.

    Args:
        model: any module.

    >>> import stiefelkit as sk
    >>> layers = [sk.orthogonal(nn.Linear(8, 8), "weight") for _ in range(3)]
    >>> net = group_(nn.Sequential(*layers))
    >>> net(torch.ones(1, 8)).shape
    torch.Size([1, 8])
    """
    check_module(model, "group_")
    if not any(map(_switch_behind, forward_pre_hooks(model).values())):
        switch = _Switch()
        switch.layout = _layout_of(model)
        model.register_forward_pre_hook(switch.begin, prepend=True)
        model.register_forward_hook(switch.end, always_call=True)
    return model


def ungroup_(model: M) -> M:
    """Takes `group_` back, and returns the model."""
    check_module(model, "ungroup_")
    for hooks in (forward_pre_hooks(model), forward_hooks(model)):
        for key in [key for key, hook in hooks.items() if _switch_behind(hook)]:
            del hooks[key]
    return model


class _Switch:
    """The hooks of a model that is grouped for good; a copy makes a layout of its own."""

    layout: "_Layout | None" = None

    def begin(self, model: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling():
            self.layout = _open(model) or self.layout
        elif self.layout is not None:
            for group in self.layout.groups:
                group.trace()

    def end(self, model: nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            return _close()
        for group in self.layout.groups if self.layout is not None else ():
            group.traced = None

    def __reduce__(self) -> tuple[type["_Switch"], tuple[()]]:  # by which it is copied as well
        return _Switch, ()


class Group:
    """Weights whose maps differ in coordinates and charts alone.

    `traced` has the weights while compiled code runs through the model, `latest` the last evaluation with a graph.
    """

    def __init__(self, members: Sequence[CoordinateList], layout: "_Layout"):
        first = members[0]
        self.members, self.layout = members, layout
        self.map, self.is_vmapped = copy.deepcopy(first.param), not maps_stacks(first.param)
        self.chart = [name for name, _ in self.map.named_buffers()]
        self.latest: Evaluation | None = None
        self.traced: Sequence[Tensor] | None = None
        self.slots = [GroupSlot(self, i) for i in range(len(members))]
        for member, slot in zip(members, self.slots, strict=True):
            member._slot = slot

    def evaluate(self) -> "Evaluation | None":
        """Maps all weights at once; None if that cannot be, so that each has to say why, or to do it by itself."""
        rows = [slot.tensors() for slot in self.slots]
        columns = list(zip(*rows, strict=True))
        coordinates = columns[: self.members[0].ntensors]
        if any(member._emptied for member in self.members):
            return None
        if any(not _PLAIN.issuperset(map(type, c)) or len({t.requires_grad for t in c}) > 1 for c in coordinates):
            CoordinateList.changes += 1  # sharded, replaced, frozen since
            return None
        if coordinates[0][0].is_meta or any(t.is_inference() for row in rows for t in row):
            return None  # those of inference mode count no writes
        for member in self.members:
            member.project_external_writes()
        with torch.inference_mode(False), torch.no_grad():
            chart = [torch.stack(column) for column in columns[len(coordinates) :]]
        with saved_plainly():
            stacks = [torch.stack(column) for column in coordinates]
            stacked = self._map(chart, stacks)
        evaluation = Evaluation(stacked, rows)
        if stacked.requires_grad:
            _follow_backward(evaluation.weights, stacks, evaluation.backward)
        return evaluation

    def trace(self) -> None:
        """Maps all weights at once in compiled code, into `traced`."""
        if self.is_complete():
            charts = [dict(member.param.named_buffers()) for member in self.members]
            chart = [torch.stack([held[name] for held in charts]) for name in self.chart]
            rows = [list(member.coordinates.values()) for member in self.members]
            self.traced = self._map(chart, [torch.stack(column) for column in zip(*rows, strict=True)]).unbind()

    def is_complete(self) -> bool:
        """Returns whether all members are still in the group."""
        return all([member._slot is slot for member, slot in zip(self.members, self.slots, strict=True)])

    def _map(self, chart: Sequence[Tensor], coordinates: Sequence[Tensor]) -> Tensor:
        """Returns the weights at stacked charts and coordinates, stacked: by the map, where it can, or else by vmap."""

        def evaluate(chart: dict[str, Tensor], *values: Tensor) -> Tensor:
            return torch.func.functional_call(self.map, chart, values)

        if self.is_vmapped or torch.compiler.is_compiling():
            named = dict(zip(self.chart, chart, strict=True))
            return (torch.vmap(evaluate) if self.is_vmapped else evaluate)(named, *coordinates).contiguous()
        for slot, stack in zip(chart_slots(self.map), chart, strict=True):
            slot.held[slot.key] = stack  # type: ignore[assignment]
        return self.map(*coordinates).contiguous()


class Evaluation:
    """The weights of a group, and for each the tensors that it was computed from, with their counts of writes.

    `backward` has the indices of weights without a gradient, of each backward pass that has gone through.
    """

    def __init__(self, stacked: Tensor, rows: Sequence[Sequence[Tensor]]):
        self.stacked, self.weights = stacked, stacked.unbind()
        self.backward: list[frozenset[int]] = []
        self.tensors = rows
        self.counts = [[write_count(t) for t in row] for row in rows]
        self.trained = [t.requires_grad for t in rows[0]]
        self.has_graph = stacked.requires_grad
        self.writes = None if stacked.is_inference() else write_count(stacked)

    def serves(self, wants_graph: bool) -> bool:
        """Returns whether a reader may have the weights: they have the graph that it wants, and are not overwritten."""
        if self.writes is None:
            return torch.is_inference_mode_enabled()
        if write_count(self.stacked) != self.writes:
            warn_of_write("A weight of a group")
            return False
        return not (wants_graph and (self.backward or self.has_graph != any(self.trained)))


class GroupSlot:
    """The place of a weight in its group, from which it is read while the group is open.

    Attributes:
        is_whole: whether the map gives the weight, with nothing on top.
        applies_alone: whether the map has a way of its own to apply a weight, but for its gain.
    """

    def __init__(self, group: Group, index: int):
        self.group, self.index, member = group, index, group.members[index]
        slots = [TensorSlot(held_parameters(member), f"original{i}") for i in range(member.ntensors)]
        slots += chart_slots(member.param)
        self._held, self._keys = [slot.held for slot in slots], [slot.key for slot in slots]
        self._hooks = [table for part in member.modules() for table in call_hooks(part)]
        self.is_whole = len(member) == 1
        core = member.param
        while isinstance(core, Scaled):
            core = core.inner
        self.applies_alone = type(core).linear is not OrthogonalParam.linear

    def tensors(self) -> list[Tensor]:
        """Returns the present coordinates and chart of the weight."""
        return list(map(dict.get, self._held, self._keys))  # type: ignore[arg-type]

    def read(self, member: CoordinateList) -> Tensor | None:
        """Returns the weight, of one evaluation of the group; None to evaluate it alone."""
        group = self.group
        if any(self._hooks):
            return None
        if torch.compiler.is_compiling():
            return None if group.traced is None else group.traced[self.index]
        if is_intercepted() or group.members[self.index] is not member:  # a copy of `__dict__` has the original's slot
            return None
        if is_in_backward():
            # A checkpoint computes anew what it saved, and has to find the same; the other kind wants a graph of its
            # own, and sets no hooks.
            latest = group.latest
            return latest.weights[self.index] if latest and has_saved_tensor_hooks() and self._fits(latest) else None
        evaluation = _thread.evaluations.get(group)
        wants_graph = torch.is_grad_enabled()
        if evaluation is None or not (self._fits(evaluation) and evaluation.serves(wants_graph)):
            evaluation = group.evaluate() if group.layout in _thread.layouts else None
            if evaluation is None:
                return None
            _thread.evaluations[group] = evaluation
            if evaluation.has_graph:
                group.latest = evaluation
        w = evaluation.weights[self.index]
        return w if wants_graph or not evaluation.has_graph else w.detach()

    def _fits(self, evaluation: Evaluation) -> bool:
        """Returns whether the weight's coordinates and chart are those that the evaluation has seen."""
        i = self.index
        seen = zip(self.tensors(), evaluation.tensors[i], evaluation.counts[i], evaluation.trained, strict=True)
        return all(
            [t is now and write_count(t) == count and t.requires_grad is trains for now, t, count, trains in seen]
        )


class _Layout:
    """The groups of a model, as long as its weights are of the same kinds."""

    def __init__(self, model: nn.Module):
        self.modules = {id(module) for module in model.modules()}
        self.parts = _parts(model)
        if any(one._slot is not None for part in self.parts for one in part):
            CoordinateList.changes += 1  # another layout loses them
        self.made_at = CoordinateList.changes
        self.groups = [Group(part, self) for part in self.parts if len(part) > 1]

    def still_fits(self, model: nn.Module) -> bool:
        """Returns whether what has changed since was elsewhere; compiled code goes on with the same groups then."""
        now = CoordinateList.changes
        if self.made_at != now:
            if not (all(group.is_complete() for group in self.groups) and _parts(model) == self.parts):
                return False
            self.modules = {id(module) for module in model.modules()}
            self.made_at = now
        return True


class _Thread(threading.local):
    """The layouts that a thread has open, None for a model inside another that is, and the evaluations of groups."""

    def __init__(self) -> None:
        self.layouts: list[_Layout | None] = []
        self.evaluations: dict[Group, Evaluation] = {}


_thread = _Thread()
_layouts: weakref.WeakKeyDictionary[nn.Module, _Layout] = weakref.WeakKeyDictionary()
_laying_out = threading.Lock()
_PLAIN = {nn.Parameter, Tensor}


def _open(model: nn.Module) -> _Layout | None:
    is_inside = any(layout is not None and id(model) in layout.modules for layout in _thread.layouts)
    layout = None if is_inside else _layout_of(model)
    _thread.layouts.append(layout)
    return layout


def _close() -> None:
    layout = _thread.layouts.pop() if _thread.layouts else None
    if layout is not None and layout not in _thread.layouts:
        for group in layout.groups:
            _thread.evaluations.pop(group, None)


def _layout_of(model: nn.Module) -> _Layout:
    layout = _layouts.get(model)
    if layout is None or not layout.still_fits(model):
        with _laying_out:
            _layouts[model] = layout = _Layout(model)
    return layout


def _parts(model: nn.Module) -> list[list[CoordinateList]]:
    """Returns the weights of each group; hooks on a map are its own, so that its weight is evaluated alone."""
    units = {id(part): id(unit) for unit in model.modules() if is_sharding_unit(unit) for part in unit.modules()}
    alike: dict[Hashable, list[CoordinateList]] = {}
    lists = {id(weight.coordinate_list): weight.coordinate_list for weight in orthogonal_weights(model)}
    for one in lists.values():
        is_hooked = any(any(call_hooks(part)) for part in one.param.modules())
        if one.ntensors and not is_hooked:
            alike.setdefault((units.get(id(one)), _kind(one)), []).append(one)
    parts: list[list[CoordinateList]] = []
    for of_a_kind in alike.values():
        most = max(1, _ENTRIES // math.prod(of_a_kind[0].param.shape))
        parts += [of_a_kind[i : i + most] for i in range(0, len(of_a_kind), most)]
    return parts


def _switch_behind(hook: object) -> _Switch | None:
    owner = hook.__self__ if isinstance(hook, MethodType) else None
    return owner if isinstance(owner, _Switch) else None


def _kind(coordinate_list: CoordinateList) -> Hashable:
    param = coordinate_list.param
    parts = [part for part in param.modules() if isinstance(part, OrthogonalParam)]
    maps = [(type(p), p.shape, p.dtype, p.precision, p.view if isinstance(p, Viewed) else None) for p in parts]
    tensors = [*coordinate_list.parameters(recurse=False), *param.buffers()]
    seen = [(tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in tensors]
    return tuple(maps), repr(param.options()), tuple(seen), param.training


def maps_stacks(param: OrthogonalParam) -> bool:
    """Returns whether `forward` of a map and of those inside takes stacks, as its class has to say."""

    def owner(cls: type, name: str) -> type:
        return next(base for base in cls.__mro__ if name in vars(base))

    kinds = {type(part) for part in param.modules() if isinstance(part, OrthogonalParam)}
    return all(cls.stacks and owner(cls, "stacks") is owner(cls, "forward") for cls in kinds)


def _follow_backward(weights: Sequence[Tensor], coordinates: Sequence[Tensor], backward: list[frozenset[int]]) -> None:
    """Makes a backward pass leave the coordinates of weights that no loss depends on without gradients."""

    def begin(gradients: Sequence[Tensor | None]) -> None:
        backward.append(frozenset(i for i, g in enumerate(gradients) if g is None))

    def leave_out(gradients: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        return tuple(None if i in backward[-1] else g for i, g in enumerate(gradients)) if backward[-1] else None

    weights[0].grad_fn.register_prehook(begin)  # type: ignore[union-attr]
    for c in coordinates:
        if c.grad_fn is not None:
            c.grad_fn.register_hook(leave_out)  # type: ignore[arg-type]
