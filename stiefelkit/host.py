"""The modules whose weights are parametrized: finding them, and the class that torch gives them."""

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from stiefelkit._torch import (
    CHECKPOINTED,
    held_modules,
    held_parameters,
    injected_properties,
    inside_checkpoint,
    is_cached,
    load_pre_hooks,
)
from stiefelkit.batching import leave_seat
from stiefelkit.coordinate_list import CoordinateList
from stiefelkit.errors import CheckpointError, DtypeError, OptionError
from stiefelkit.notices import retire
from stiefelkit.sharding import is_sharding

__all__ = [
    "OrthogonalWeight",
    "adopt_coordinate_list",
    "attach_coordinate_list",
    "check_loading_of",
    "check_module",
    "check_state_dict",
    "checks_loading",
    "coordinate_list_of",
    "coordinate_manifolds",
    "orthogonal_weights",
    "share_coordinate_list",
    "stop_checking",
]


_RESETS = ("reset_parameters", "_reset_parameters")
"""The names of the methods by which torch's modules draw their parameters."""


def check_module(module: Any, who: str, remedy: str = "") -> None:
    """Raises DtypeError unless it is a module; the remedy ends the sentence."""
    if not isinstance(module, nn.Module):
        raise DtypeError(f"{who} needs a torch.nn.Module, got {type(module).__name__}{remedy}.")


class OrthogonalWeight(NamedTuple):
    """An orthogonal weight of a model: where it stands, as `names.Place` has it, and what carries its coordinates."""

    qualified: str
    host: nn.Module
    name: str
    coordinate_list: CoordinateList


def orthogonal_weights(module: nn.Module) -> Iterator[OrthogonalWeight]:
    """Yields every orthogonal weight under a module, shared modules once; traced graphs hold such weights as well."""
    for prefix, host in module.named_modules():
        for name, coordinate_list in _coordinate_lists(host):
            path = [part for part in prefix.split(".") if part and part != CHECKPOINTED]
            yield OrthogonalWeight(".".join([*path, name]), host, name, coordinate_list)


def coordinate_list_of(module: nn.Module, name: str) -> CoordinateList | None:
    """Returns what carries a weight of this module, or None if it has no parametrization of ours."""
    return dict(_coordinate_lists(module)).get(name)


def attach_coordinate_list(
    module: nn.Module, name: str, coordinate_list: CoordinateList, event: str = "sk.orthogonal"
) -> None:
    """Replaces a plain parameter of a module by what a coordinate list evaluates to; the event is who asked for it."""
    held: Any = _parametrizations(module)
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
    """Tells a coordinate list whose weight it is."""
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


def coordinate_manifolds(module: nn.Module) -> dict[str, str]:
    """Returns qualified name to manifold of every coordinate that must stay on one, "0.weight.stiefel".

    An optimizer that does not move along the manifold must not step such a module.
    """
    return {
        f"{weight.qualified}.{name}": manifold
        for weight in orthogonal_weights(module)
        for name, manifold in weight.coordinate_list.param.manifolds.items()
    }


def check_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *, assign: bool = False) -> None:
    """Checks every orthogonal weight of a model against what `load_state_dict` will be given, before it is loaded.

    `load_state_dict` does it by itself for a module with such weights, for the one that `sk.orthogonal` was called on,
    those between, and those that are made around them later. Call this for a model around a module that got its weights
    when the model was there: what stands before that module is written when torch gets to it. A module with a load hook
    of its own, or a `_load_from_state_dict`, may change the entries of the modules inside it: what is under such a one
    is checked when torch gets there.

    Args:
        module: the model.
        state_dict: what will be loaded, with the model's own keys.
        assign: as in `load_state_dict`: tensors take the place of those that are there, dtype included.

    Raises:
        CheckpointError: an entry belongs to another map, shape, field or version, or is a plain weight.
        NonFiniteError: coordinates hold NaN or infinity, or a weight would.
    """
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"check_state_dict needs a mapping of names to tensors, got {type(state_dict).__name__}.")
    _check_tree(module, state_dict, "", assign)


def checks_loading(module: nn.Module) -> bool:
    """Whether a module checks the orthogonal weights under it before torch loads the first of them."""
    return bool(_coordinate_lists(module)) or any(map(_is_ours, load_pre_hooks(module).values()))


def check_loading_of(module: nn.Module, path: str = "") -> None:
    """Has a module, and those on the way to a weight inside, check such weights under them before they are loaded.

    A module with an orthogonal weight of its own does so anyhow.

    Args:
        module: the module.
        path: the weight's name in it, "encoder.0.weight"; all are checked, not this alone.
    """
    for part in path.split("."):
        if not checks_loading(module):
            module.register_load_state_dict_pre_hook(_check_before_loading)
        module = inside_checkpoint(held_modules(module).get(part) or module)


def stop_checking(module: nn.Module) -> None:
    """Takes the hooks of `check_loading_of` from modules that have no orthogonal weights under them any more."""
    for each in module.modules():
        hooks = {} if isinstance(each, torch.jit.ScriptModule) else load_pre_hooks(each)
        for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
            if next(orthogonal_weights(each), None) is None:
                del hooks[key]


def _check_before_loading(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    *args: Any,
) -> None:
    """The hook; torch hands the same list of missing keys to all modules of one load, which serves as its name."""
    _check_tree(module, state_dict, prefix, bool(metadata.get("assign_to_params_buffers")), missing_keys)


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "hook", None) is _check_before_loading


def _check_tree(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    assign: bool,
    load: Any = None,
    empty: dict[int, str | None] | None = None,
) -> None:
    """Checks what is under a module; `empty` has weights of which there is a description alone, so far."""
    found: dict[int, str | None] = {} if empty is None else empty
    if not prefix:
        for key in state_dict:
            if not isinstance(key, str):
                raise CheckpointError(
                    f"{type(module).__name__} needs a state dict whose keys are strings, got {key!r:.80}."
                )
    # torch loads a shared module once under each of its names.
    module = inside_checkpoint(module)
    rewrites = _rewrites_entries(module)
    for name, coordinate_list in _coordinate_lists(module):
        if prefix + name in state_dict:
            raise CheckpointError(
                f"{prefix}{name} needs the coordinates of {coordinate_list.param.title}, got a plain weight; load it "
                "before sk.orthogonal, or assign it with sk.assign_ (sk.check_state_dict checks a whole model at once)."
            )
        path, same_load = f"{prefix}parametrizations.{name}.", None if rewrites else load
        if not coordinate_list.check(state_dict, path, assign, same_load):
            found[id(coordinate_list)] = None
        else:
            found.setdefault(id(coordinate_list), prefix + name)
    if not rewrites:
        for name, child in held_modules(module).items():
            if child is not None and not isinstance(child, CoordinateList):
                _check_tree(child, state_dict, f"{prefix}{name}.", assign, load, found)
    # A module that is shared may have been saved under one of its names; all of them are seen from the outermost.
    halves = [name for name in found.values() if name is not None] if empty is None and not prefix else ()
    for name in halves:
        raise CheckpointError(f"{name} needs its coordinates, got a checkpoint with the description of its map alone.")


def _rewrites_entries(module: nn.Module) -> bool:
    """Whether a module may change a state dict before torch hands it to its children; sharding does not."""
    foreign = not all(_is_ours(hook) or is_sharding(hook) for hook in load_pre_hooks(module).values())
    load = type(module)._load_from_state_dict
    return foreign or not (load is nn.Module._load_from_state_dict or hasattr(load, "checks_coordinates"))


def _parametrizations(module: nn.Module) -> nn.Module | None:
    # Not by getattr: a wrapper may pass on the attributes of the module inside it.
    # A script module has modules of another kind; torch.fx copies the place of a weight as a bare module.
    held = None if isinstance(module, torch.jit.ScriptModule) else held_modules(module).get("parametrizations")
    return held if isinstance(held, nn.ModuleDict) or type(held) is nn.Module else None


def _coordinate_lists(host: nn.Module) -> list[tuple[str, CoordinateList]]:
    held = _parametrizations(host)
    if held is None:
        return []
    return [(name, child) for name, child in held_modules(held).items() if isinstance(child, CoordinateList)]


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
        _check_tree(self, state_dict, prefix, bool(metadata.get("assign_to_params_buffers")), missing_keys)
        plain._load_from_state_dict(self, state_dict, prefix, metadata, strict, missing_keys, *args)

    if plain._load_from_state_dict is nn.Module._load_from_state_dict:
        load.checks_coordinates = True  # type: ignore[attr-defined]

    def set_state(self: nn.Module, state: Any) -> None:
        plain.__setstate__(self, state)
        carried.update({name: weakref.ref(coordinate_list) for name, coordinate_list in _coordinate_lists(self)})

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
    """The property of torch, but that a weight in a group comes from there without a call of modules."""

    def read(self: nn.Module) -> Any:
        if not torch.compiler.is_compiling() and not is_cached():
            seat = vars(held_modules(held_modules(self)["parametrizations"])[name]).get("seat")  # type: ignore[arg-type]
            if seat is not None and seat.is_whole:
                w = seat.read()
                if w is not None:
                    return w
        return plain.fget(self)  # type: ignore[misc]

    return property(read, plain.fset)


def _resetting(plain: Any) -> Any:
    """A method that draws the parameters of a module, which also draws its orthogonal weights, by their own schemes.

    What it writes into those would go nowhere, or into coordinates, without being a frame: it is given other tensors in
    their place. Weights that it assigns or draws itself stay, and those on the meta device.
    """

    def reset(self: nn.Module, *args: Any, **options: Any) -> Any:
        held, attached = dict(_coordinate_lists(self)), type(self)
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
