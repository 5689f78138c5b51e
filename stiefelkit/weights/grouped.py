"""All weights of a model that have one kind of map, evaluated by one batched call."""

import math
import threading
import weakref
from collections.abc import Hashable
from types import MethodType
from typing import TypeVar

import torch
from torch import nn

from stiefelkit._torch import call_hooks, forward_hooks, forward_pre_hooks, held_modules
from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.contract.view import Viewed
from stiefelkit.tensors import is_sharding_unit
from stiefelkit.weights.coordinate_list import CoordinateList
from stiefelkit.weights.find import check_module, orthogonal_weights
from stiefelkit.weights.group import Group, Opening, structure

__all__ = ["group_", "grouped", "ungroup_"]


M = TypeVar("M", bound=nn.Module)

_ENTRIES = 1 << 20
"""Entries of all weights of a group: beyond, memory counts more than calls."""


class grouped:
    """Context in which weights of a model with the same map, shape, dtype and options are mapped by one batched call.

    At the first read of one of them all are evaluated; each later read gives what was evaluated then, until coordinates
    or charts are written to (a step of an optimizer) or a backward pass has gone through, after which the next read
    evaluates anew. Gradients flow to each weight's own coordinates, and a weight that no loss depends on leaves its own
    without any. Weights and gradients are those without the context, but for rounding.

    Wide weights, kernels, weights with a gain, tied ones and those with other parametrizations on top take part; a
    weight whose coordinates are parametrized themselves, or that is one of its kind, is evaluated by itself, and so is
    every weight under `torch.func`, while something traces, and in threads that have not entered the context.

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


class _GroupLayout:
    """The groups of a model, as long as its weights are of the same kinds."""

    def __init__(self, model: nn.Module):
        self.opening = Opening()
        self.modules = {id(module) for module in model.modules()}
        self.parts = _parts(model)
        if any(one._slot is not None for part in self.parts for one in part):
            structure.count += 1  # another layout loses them
        self.made_at = structure.count
        self.groups = [Group(part, self.opening) for part in self.parts if len(part) > 1]

    def still_fits(self, model: nn.Module) -> bool:
        """Returns whether what has changed since was elsewhere; compiled code goes on with the same groups then."""
        now = structure.count
        if self.made_at != now:
            if not (all(group.is_complete() for group in self.groups) and _parts(model) == self.parts):
                return False
            self.modules = {id(module) for module in model.modules()}
            self.made_at = now
        return True


class _Switch:
    """The hooks of a model that is grouped for good; a copy makes a layout of its own."""

    layout: _GroupLayout | None = None

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


class _Opened(threading.local):
    """The layouts that are open in a thread, the last one last; None for a model inside another that is open."""

    def __init__(self) -> None:
        self.layouts: list[_GroupLayout | None] = []


_opened = _Opened()
_layouts: weakref.WeakKeyDictionary[nn.Module, _GroupLayout] = weakref.WeakKeyDictionary()
_laying_out = threading.Lock()


def _open(model: nn.Module) -> _GroupLayout | None:
    is_inside = any(layout is not None and id(model) in layout.modules for layout in _opened.layouts)
    layout = None if is_inside else _layout_of(model)
    _opened.layouts.append(layout)
    if layout is not None:
        layout.opening.depth += 1
    return layout


def _close() -> None:
    layout = _opened.layouts.pop() if _opened.layouts else None
    if layout is not None:
        layout.opening.depth -= 1
        if not layout.opening.depth:
            layout.opening.evaluations.clear()


def _layout_of(model: nn.Module) -> _GroupLayout:
    layout = _layouts.get(model)
    if layout is None or not layout.still_fits(model):
        with _laying_out:
            _layouts[model] = layout = _GroupLayout(model)
    return layout


def _parts(model: nn.Module) -> list[list[CoordinateList]]:
    """Returns the weights of each group; hooks on a map are its own, so that its weight is evaluated alone."""
    units = {id(part): id(unit) for unit in model.modules() if is_sharding_unit(unit) for part in unit.modules()}
    alike: dict[Hashable, list[CoordinateList]] = {}
    lists = {id(weight.coordinate_list): weight.coordinate_list for weight in orthogonal_weights(model)}
    for one in lists.values():
        is_hooked = any(any(call_hooks(part)) for part in one.param.modules())
        if one.ntensors and "parametrizations" not in held_modules(one) and not is_hooked:
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
    """Returns what weights have in common that one call can map."""
    param = coordinate_list.param
    parts = [part for part in param.modules() if isinstance(part, OrthogonalParam)]
    maps = [(type(p), p.shape, p.dtype, p.precision, p.view if isinstance(p, Viewed) else None) for p in parts]
    tensors = [*coordinate_list.parameters(recurse=False), *param.buffers()]
    seen = [(tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in tensors]
    return tuple(maps), repr(param.options()), tuple(seen), param.training
