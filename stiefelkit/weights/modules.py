"""The modules whose weights are parametrized: finding them, and the class that torch gives them."""

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stiefelkit._torch import (
    held_modules,
    held_parameters,
    injected_properties,
    is_cached,
)
from stiefelkit.errors import OptionError
from stiefelkit.weights.coordinate_list import CoordinateList
from stiefelkit.weights.find import coordinate_list_of, held_parametrizations, lists_of
from stiefelkit.weights.group import leave_seat
from stiefelkit.weights.loading import check_tree
from stiefelkit.weights.optimizer_notices import retire

__all__ = ["adopt_coordinate_list", "attach_coordinate_list", "share_coordinate_list"]


_RESETS = ("reset_parameters", "_reset_parameters")
"""The names of the methods by which torch's modules draw their parameters."""


def attach_coordinate_list(
    module: nn.Module, name: str, coordinate_list: CoordinateList, event: str = "sk.orthogonal"
) -> None:
    """Replaces a plain parameter of a module by what a coordinate list evaluates to; the event is who asked for it."""
    held: Any = held_parametrizations(module)
    plain = type(module).__bases__[0] if held else type(module)
    old = held_parameters(module).get(name)
    if old is not None:
        retire([old], f"{plain.__name__}.{name}", event, coordinate_list)
    delattr(module, name)
    if held is None:
        held = module.parametrizations = nn.ModuleDict()
    held[name] = coordinate_list.train(module.training)
    _introduce(module, plain, name, coordinate_list)
    _inject(module, plain, list(held), held_modules(held))


def adopt_coordinate_list(module: nn.Module, name: str, coordinate_list: CoordinateList) -> None:
    """Does for a coordinate list that torch is about to put on a module what `attach_coordinate_list` does.

    The module has a class injected by torch already, and the property of this name.
    """
    plain = type(module).__bases__[0]
    _introduce(module, plain, name, coordinate_list)
    held = {**held_modules(module.parametrizations), name: coordinate_list}  # type: ignore[arg-type]
    _inject(module, plain, list(held), held)


def _introduce(module: nn.Module, plain: Any, name: str, coordinate_list: CoordinateList) -> None:
    """Records in a coordinate list whose weight it is."""
    coordinate_list.weight = f"{plain.__name__}.{name}"
    coordinate_list.gradients = getattr(plain, "frame_gradients", CoordinateList.gradients)
    coordinate_list.is_sparse |= isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    leave_seat(coordinate_list)


def share_coordinate_list(places: Sequence[tuple[nn.Module, str]], coordinate_list: CoordinateList) -> None:
    """Replaces plain parameters of several modules by what one coordinate list evaluates to, named as the first."""
    kinds = None
    for module, name in reversed(places):
        attach_coordinate_list(module, name, coordinate_list)
        kinds = tuple(kind for kind in coordinate_list.gradients if kinds is None or kind in kinds)
    coordinate_list.gradients = kinds or CoordinateList.gradients


def _inject(
    module: nn.Module, plain: Any, names: Sequence[str], held: Mapping[str, nn.Module | None] | None = None
) -> None:
    """Gives a parametrized module an injected class of its own, which copies, pickles and checks what it loads.

    torch lets deep copies share one injected class: then changing one copy breaks the other, and
    `parametrize.cached()` hands one copy's weight to the other.
    """
    carried = {name: weakref.ref(child) for name, child in (held or {}).items() if child is not None}

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        if hasattr(plain, "__deepcopy__"):
            replica = plain.__deepcopy__(self, memo)
            _inject(replica, plain, list(replica.parametrizations), held_modules(replica.parametrizations))
            return replica
        memo[id(self)] = replica = _rebuild(plain, list(self.parametrizations))  # type: ignore[arg-type]
        replica.__setstate__(copy.deepcopy(plain.__getstate__(self), memo))
        return replica

    def reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (plain, list(self.parametrizations)), plain.__getstate__(self)  # type: ignore[arg-type]

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        # nn.Module would try to register a Parameter beside the property, and fail.
        if isinstance(value, nn.Parameter) and name in self.__dict__.get("_modules", {}).get("parametrizations", ()):
            value = value.detach()
        plain.__setattr__(self, name, value)

    def load(
        self: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *args: Any,
    ) -> None:
        check_tree(self, state_dict, prefix, bool(metadata.get("assign_to_params_buffers")), missing_keys)
        plain._load_from_state_dict(self, state_dict, prefix, metadata, strict, missing_keys, *args)

    if plain._load_from_state_dict is nn.Module._load_from_state_dict:
        load.checks_coordinates = True  # type: ignore[attr-defined]

    def set_state(self: nn.Module, state: Any) -> None:
        plain.__setstate__(self, state)
        carried.update({name: weakref.ref(coordinate_list) for name, coordinate_list in lists_of(self)})

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        pruned = coordinate_list_of(self, name.removesuffix("_orig")) if isinstance(name, str) else None
        if pruned is not None and not isinstance(param, nn.Parameter):
            raise OptionError(
                f"torch.nn.utils.prune needs a plain weight, got {pruned.weight}, of which a part would be no frame; "
                "sk.bake makes it plain."
            )
        plain.register_parameter(self, name, param)
        if param is None or name not in carried or coordinate_list_of(self, name) is not None:
            return
        gone = carried.pop(name)()
        if isinstance(gone, CoordinateList):  # torch.nn.utils.parametrize.remove_parametrizations leaves a parameter
            retire(gone.coordinates.values(), gone.weight, "remove_parametrizations", param, are_coordinates=True)

    methods = {
        "__deepcopy__": deepcopy,
        "__reduce_ex__": reduce_ex,
        "__setattr__": set_attribute,
        "__setstate__": set_state,
        "_load_from_state_dict": load,
        "register_parameter": register_parameter,
    }
    resets = {name: _resetting(getattr(plain, name)) for name in _RESETS if hasattr(plain, name)}
    properties = {name: _reading(name, found) for name, found in injected_properties(names).items()}
    module.__class__ = type(f"Parametrized{plain.__name__}", (plain,), methods | resets | properties)


def _reading(name: str, plain: property) -> property:
    """Returns the property of torch, but that a weight in a group comes from there without a call of modules."""

    def read(self: nn.Module) -> Any:
        if not torch.compiler.is_compiling():
            held = vars(self)["_modules"]["parametrizations"]
            seat = vars(vars(held)["_modules"][name]).get("seat")
            if seat is not None and seat.is_whole and not is_cached():
                w = seat.read()
                if w is not None:
                    return w
        return plain.fget(self)  # type: ignore[misc]

    return property(read, plain.fset)


def _resetting(plain: Any) -> Any:
    """Makes `reset_parameters` draw the orthogonal weights of a module too, by their own schemes.

    What it writes into those would go nowhere, or into coordinates, without being a frame: it is given other tensors in
    their place. Weights that it assigns or draws itself stay, and those on the meta device.
    """

    def reset(self: nn.Module, *args: Any, **options: Any) -> Any:
        held, attached = dict(lists_of(self)), type(self)
        before = {name: coordinate_list.fills for name, coordinate_list in held.items()}
        blanks = {name: coordinate_list.blank() for name, coordinate_list in held.items()}
        fakes = {
            name: property(lambda self, w=w: w, getattr(attached, name).fset)  # type: ignore[misc]
            for name, w in blanks.items()
        }
        self.__class__ = type(attached.__name__, (attached,), fakes)
        try:
            out = plain(self, *args, **options)
        finally:
            self.__class__ = attached
        for name, coordinate_list in held.items():
            if coordinate_list.fills == before[name] and not blanks[name].is_meta:
                coordinate_list.draw_()
        return out

    return reset


def _rebuild(plain: Any, names: Sequence[str]) -> nn.Module:
    module = plain.__new__(plain)
    _inject(module, plain, names)
    return module
