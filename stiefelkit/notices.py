"""What an optimizer would do without a word, said once before its step: train what nobody reads, shrink coordinates."""

import warnings
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stiefelkit._torch import write_count

__all__ = ["retire", "watch"]


class _Carrier(Protocol):
    weight: str

    @property
    def param(self) -> Any: ...

    @property
    def coordinates(self) -> dict[str, nn.Parameter]: ...


class _Retired(NamedTuple):
    """A parameter that a module has given up.

    Attributes:
        parameter: the parameter.
        what: what it was, for messages.
        heir: the carrier, or the parameter, that took its place.
        gradient: its gradient then, and how often that had been written to.
    """

    parameter: weakref.ref[Tensor]
    what: str
    heir: weakref.ref[Any]
    gradient: tuple[weakref.ref[Tensor], int] | None


_carriers: weakref.WeakSet[_Carrier] = weakref.WeakSet()
_retired: dict[int, _Retired] = {}
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []
_changes = 0


def watch(carrier: _Carrier) -> None:
    """Adds a carrier, whose coordinates no optimizer should shrink; it is forgotten when it dies."""
    _carriers.add(carrier)
    _count()


def retire(parameters: Iterable[Tensor], what: str, heir: Any) -> None:
    """Remembers parameters that a module has given up, as long as somebody else holds them.

    Args:
        parameters: the parameters.
        what: what they were, "Linear.weight as it was before sk.orthogonal".
        heir: the carrier or the parameter that took their place; an optimizer that holds this as well is fine.
    """
    for p in parameters:
        key = id(p)
        forget = weakref.ref(p, lambda _, key=key: _retired.pop(key, None))
        gradient = None if p.grad is None else (weakref.ref(p.grad), write_count(p.grad))
        _retired[key] = _Retired(forget, what, weakref.ref(heir), gradient)
    _count()


def _count() -> None:
    global _changes
    _changes += 1
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_look))


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Warns of what an optimizer holds; at its first step, and again after weights or groups have changed."""
    groups = optimizer.param_groups
    stamp = (_changes, sum([len(group["params"]) for group in groups]))
    if _seen.get(optimizer) == stamp:
        return
    _seen[optimizer] = stamp
    held = {id(p): p for group in groups for p in group["params"]}
    for key in held.keys() & _retired.keys():
        _speak_of(optimizer, _retired.pop(key), held)
    _look_for_decay(optimizer)


def _speak_of(optimizer: torch.optim.Optimizer, found: _Retired, held: dict[int, Tensor]) -> None:
    p, heir = found.parameter(), found.heir()
    if p is None or not p.requires_grad:
        return
    successors = [heir] if isinstance(heir, Tensor) else getattr(heir, "coordinates", {}).values()
    old, version = found.gradient or (lambda: None, 0)
    if p.grad is not None and not (old() is p.grad and version == write_count(p.grad)):
        warnings.warn(
            f"{found.what} still gets a gradient: another module is tied to it, and the two have come apart; "
            'sk.tie(module, "weight", other, "weight") ties them again.',
            stacklevel=6,
        )
    elif not any(id(s) in held for s in successors):
        warnings.warn(
            f"{type(optimizer).__name__} holds {found.what}, which no module reads any more, and does not train what "
            "took its place; make the optimizer afterwards.",
            stacklevel=6,
        )


def _look_for_decay(optimizer: torch.optim.Optimizer) -> None:
    decayed: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0)
        if isinstance(decay, int | float) and decay > 0:
            decayed.update((id(p), group) for p in group["params"])
    if not decayed:
        return
    for carrier in list(_carriers):
        for name, c in carrier.coordinates.items():
            group = decayed.get(id(c))
            # A group that goes by the coordinate's name was asked for.
            if group is not None and group.get("name") != name and name not in carrier.param.manifolds:
                warnings.warn(
                    f"{type(optimizer).__name__} shrinks {name!r} of {carrier.weight} by weight_decay="
                    f"{group['weight_decay']:g}, which moves the frame and regularises nothing; "
                    "sk.optim.parameter_groups(model, lr=...) gives coordinates none.",
                    stacklevel=5,
                )
                return
