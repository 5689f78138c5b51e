"""Warnings before an optimizer's step: parameters that no module reads, coordinates that weight decay shrinks."""

import operator
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stiefelkit._torch import write_count
from stiefelkit.weights.optimizer_hooks import SupportsCoordinates

__all__ = ["retire", "warn_caller", "watch"]


_LISTED = 3
"""Weights that a warning names; of others it says how many."""


class _Retired(NamedTuple):
    """A parameter given to `retire`, its gradient at that time, and how often that had been written to."""

    parameter: weakref.ref[Tensor]
    weight: str
    event: str
    is_coordinate: bool
    heir: weakref.ref[Any]
    gradient: tuple[weakref.ref[Tensor], int] | None


_coordinate_lists: weakref.WeakSet[SupportsCoordinates] = weakref.WeakSet()
_retired: dict[int, _Retired] = {}
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []
_changes = 0
_params = operator.itemgetter("params")


def watch(coordinate_list: SupportsCoordinates) -> None:
    """Adds a coordinate list, whose coordinates no optimizer should shrink; it is forgotten when it dies."""
    _coordinate_lists.add(coordinate_list)
    _count()


def retire(parameters: Iterable[Tensor], weight: str, event: str, heir: Any, *, are_coordinates: bool = False) -> None:
    """Remembers parameters that a module has given up, as long as somebody else holds them.

    Args:
        parameters: the parameters.
        weight: the weight's name, "Linear.weight".
        event: what took them, "sk.orthogonal".
        heir: the coordinate list or the parameter that took their place; an optimizer that holds this as well is fine.
        are_coordinates: whether they were coordinates, and not the weight itself.
    """
    for p in parameters:
        key = id(p)
        forget = weakref.ref(p, lambda _, key=key: _retired.pop(key, None))
        gradient = None if p.grad is None else (weakref.ref(p.grad), write_count(p.grad))
        _retired[key] = _Retired(forget, weight, event, are_coordinates, weakref.ref(heir), gradient)
    _count()


def warn_caller(text: str) -> None:
    """Warns as from the line outside of this package and of torch that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "stiefelkit.")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _count() -> None:
    global _changes
    _changes += 1
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_look))


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Warns of what an optimizer holds; at its first step, and again after weights or groups have changed."""
    groups = optimizer.param_groups
    stamp = (_changes, sum(map(len, map(_params, groups))))
    if _seen.get(optimizer) == stamp:
        return
    _seen[optimizer] = stamp
    held = {id(p): p for group in groups for p in group["params"]}
    if not held.keys().isdisjoint(_retired):
        _look_for_retired(optimizer, held)
    _look_for_decay(optimizer)


def _look_for_retired(optimizer: torch.optim.Optimizer, held: dict[int, Tensor]) -> None:
    loose: dict[tuple[str, bool], list[_Retired]] = {}
    stale: dict[tuple[str, bool], list[_Retired]] = {}
    for retired in [_retired.pop(key) for key in held if key in _retired]:
        p, heir = retired.parameter(), retired.heir()
        if p is None or not p.requires_grad:
            continue
        successors = [heir] if isinstance(heir, Tensor) else getattr(heir, "coordinates", {}).values()
        old, version = retired.gradient or (lambda: None, 0)
        kind = (retired.event, retired.is_coordinate)
        if p.grad is not None and not (old() is p.grad and version == write_count(p.grad)):
            loose.setdefault(kind, []).append(retired)
        elif not any(id(s) in held for s in successors):
            stale.setdefault(kind, []).append(retired)
    for some in loose.values():
        what, is_one = _in_words(some)
        warn_caller(
            f"{what} still {'gets' if is_one else 'get'} a gradient: another module is tied to "
            f"{'it' if is_one else 'each'}, and the two have come apart; "
            'sk.tie(module, "weight", other, "weight") ties them again, and the optimizer is to be made after that.'
        )
    for some in stale.values():
        what, is_one = _in_words(some)
        warn_caller(
            f"{type(optimizer).__name__} holds {what}, which no module reads any more, and does not train what "
            f"took {'its' if is_one else 'their'} place; make the optimizer afterwards."
        )


def _look_for_decay(optimizer: torch.optim.Optimizer) -> None:
    decayed: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0)
        if isinstance(decay, int | float) and decay > 0:
            decayed.update((id(p), group) for p in group["params"] if p.requires_grad)
    if not decayed:
        return
    shrunk = [
        (coordinate_list, name, decayed[id(c)])
        for coordinate_list in list(_coordinate_lists)
        for name, c in coordinate_list.coordinates.items()
        # A group that goes by the coordinate's name was asked for; the decay of a gain is that of a weight.
        if id(c) in decayed
        and name != "gain"
        and decayed[id(c)].get("name") != name
        and name not in coordinate_list.param.manifolds
    ]
    if not shrunk:
        return
    order, names = {key: i for i, key in enumerate(decayed)}, _qualified_names()
    shrunk.sort(key=lambda entry: order[id(entry[0].coordinates[entry[1]])])
    weights = list({id(owner): names.get(id(owner), owner.weight) for owner, _, _ in shrunk}.values())
    coordinates = ", ".join(dict.fromkeys(repr(name) for _, name, _ in shrunk))
    decays = {float(group["weight_decay"]) for _, _, group in shrunk}
    warn_caller(
        f"{type(optimizer).__name__} shrinks {coordinates} of {_listed(weights)} by weight_decay"
        f"{'=' if len(decays) == 1 else ' up to '}{max(decays):g}, which moves the frame{'s'[: len(weights) > 1]} and "
        "regularises nothing; sk.optim.parameter_groups(model, lr=...) gives coordinates none."
    )


def _in_words(retired: list[_Retired]) -> tuple[str, bool]:
    """Returns what parameters were, "Linear.weight as it was before sk.orthogonal", and whether that is one thing."""
    names = _qualified_names()
    weights = list(dict.fromkeys(names.get(id(r.heir()), r.weight) for r in retired))
    is_one = len(weights) == 1 and not retired[0].is_coordinate
    of = "the coordinates of " if retired[0].is_coordinate else ""
    return f"{of}{_listed(weights)} as {'it was' if is_one else 'they were'} before {retired[0].event}", is_one


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _qualified_names() -> dict[int, str]:
    """Returns id to name, "encoder.0.weight", of coordinate lists and parameters in sight of the caller of `step`.

    These are among the local and global variables of the functions at work, and the attributes of their `self`. Of two
    names the longer one is taken, that of the outer module. (To ask the garbage collector for all modules would do harm
    to other threads, in the midst of making a tuple.)
    """
    coordinate_lists = {id(coordinate_list) for coordinate_list in list(_coordinate_lists)}
    names: dict[int, str] = {}
    for model in _in_sight().values():
        for name, member in _named(model, "", coordinate_lists, set()):
            if name.count(".") > names.get(id(member), "").count("."):
                names[id(member)] = name
    return names


def _in_sight() -> dict[int, nn.Module]:
    models: dict[int, nn.Module] = {}
    frame: Any = sys._getframe(1)
    while frame is not None:
        attributes = getattr(frame.f_locals.get("self"), "__dict__", None)
        seen = [frame.f_locals, frame.f_globals, attributes if isinstance(attributes, dict) else {}]
        for value in [value for held in seen for value in list(held.values())]:
            if issubclass(type(value), nn.Module):
                models[id(value)] = value
        frame = frame.f_back
    return models


def _named(module: nn.Module, prefix: str, coordinate_lists: set[int], seen: set[int]) -> Iterator[tuple[str, Any]]:
    seen.add(id(module))
    for name, p in _held(module, "_parameters").items():
        yield prefix + name, p
    for name, child in _held(module, "_modules").items():
        if id(child) in coordinate_lists:
            yield prefix.removesuffix("parametrizations.") + name, child
        elif child is not None and id(child) not in seen:
            yield from _named(child, f"{prefix}{name}.", coordinate_lists, seen)


def _held(module: nn.Module, key: str) -> dict[str, Any]:
    # Not by getattr: a module may be half made, or pass on the attributes of another.
    held = vars(module).get(key)
    return held if isinstance(held, dict) else {}
