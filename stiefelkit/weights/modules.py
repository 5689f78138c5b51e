"""Modules whose weights are parametrized, or whose parameters are coordinates: their classes, and what they load."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from stiefelkit import _torch
from stiefelkit.errors import CheckpointError, DtypeError, OptionError, shown
from stiefelkit.tensors import coordinate_dtype, is_sharding
from stiefelkit.weights import find
from stiefelkit.weights.checkpoint import entry_of
from stiefelkit.weights.coordinate_list import CoordinateList, saved_plainly
from stiefelkit.weights.find import WeightPath, held_parametrizations, lists_of, orthogonal_weights
from stiefelkit.weights.optimizer_hooks import mark_replaced, watch_layer
from stiefelkit.weights.outside_writes import Read, look_back, reads

__all__ = ["check_state_dict"]


_SIZES = ("num_embeddings", "embedding_dim", "in_features", "out_features", "in_channels", "out_channels")
"""The attributes by which modules tell the shape of their weights; who resizes one writes to `weight.data` as well."""
_RESETS = ("reset_parameters", "_reset_parameters")  # the methods by which torch's modules draw parameters


def attach_coordinate_list(
    places: Sequence[WeightPath], coordinate_list: CoordinateList, event: str = "sk.orthogonal"
) -> None:
    """Replaces weights, plain or orthogonal, by what one coordinate list evaluates to; it gets the first one's name.

    The event is who asked for it.
    """
    for qualified, module, name in reversed(places):
        held = held_parametrizations(module)
        plain = type(module).__bases__[0] if held else type(module)
        if not isinstance(held, nn.ModuleDict):
            held = module.parametrizations = nn.ModuleDict()
        if name in held:
            old = held[name]
            assert isinstance(old, CoordinateList)
            mark_replaced(old.coordinates.values(), old.weight, event, coordinate_list)
        else:
            weight = qualified if "." in qualified else f"{plain.__name__}.{name}"
            mark_replaced([vars(module)["_parameters"][name]], weight, event, coordinate_list)
            delattr(module, name)
        held[name] = coordinate_list.train(module.training)
        adopt_coordinate_list(module, name, coordinate_list, plain)
        if "." in qualified:
            coordinate_list.weight = qualified


def adopt_coordinate_list(
    module: nn.Module, name: str, coordinate_list: CoordinateList, plain: type[nn.Module] | None = None
) -> None:
    """Records in a coordinate list whose weight it is, and gives the module a class with a property for it.

    `plain` is the class of the module, None if torch has injected one already.
    """
    plain = type(module).__bases__[0] if plain is None else plain
    coordinate_list.weight = f"{plain.__name__}.{name}"
    coordinate_list.leave_group()
    if not (_torch.load_pre_hooks(module) and checks_loading(module)):
        module.register_load_state_dict_pre_hook(_check_before_loading)
    _inject(module, plain, [*{**vars(module)["_modules"]["parametrizations"]._modules, name: None}])


def _inject(module: nn.Module, plain: type[nn.Module], names: Sequence[str]) -> None:
    """Gives a parametrized module an injected class of its own, which can be copied and pickled.

    torch lets deep copies share one injected class: then changing one copy breaks the other, and
    `parametrize.cached()` hands one copy's weight to the other. `names` are those of the weights.
    """
    members: dict[str, object] = {
        "__module__": plain.__module__,  # by which torch.fx knows the layers of torch, to call them whole
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce_ex,
        "__setattr__": _set_attribute,
        "_weights": frozenset(names),
        "_plain_class": plain,  # not the first base for ever: FSDP2 puts a class of its own around
    }
    if plain._save_to_state_dict is not nn.Module._save_to_state_dict:
        members["_save_to_state_dict"] = _save
    for name in _RESETS:
        if hasattr(plain, name):
            members[name] = _resetting(getattr(plain, name))
    for name, found in _torch.injected_properties(names).items():
        members[name] = _reading(name, found)
    module.__class__ = type(f"Parametrized{plain.__name__}", (plain,), members)


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module had before `_inject` gave it another."""
    return type(module)._plain_class  # type: ignore[attr-defined]


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copies a module, into a class of its own; by the plain class's own way, if it has one."""
    plain = _plain_class(self)
    copies: Callable[..., nn.Module] | None = getattr(plain, "__deepcopy__", None)
    if copies is not None:
        replica = copies(self, memo)
        _inject(replica, plain, _names(replica))
        return replica
    memo[id(self)] = replica = _rebuild(plain, _names(self))
    replica.__setstate__(copy.deepcopy(plain.__getstate__(self), memo))
    return replica


def _reduce_ex(self: nn.Module, protocol: object) -> tuple[object, ...]:
    plain = _plain_class(self)
    return _rebuild, (plain, _names(self)), plain.__getstate__(self)


def _set_attribute(self: nn.Module, name: str, value: Any) -> None:
    """Assigns a Parameter to an orthogonal weight by its values; refuses other sizes, and priors of Pyro."""
    plain = _plain_class(self)
    # nn.Module would try to register a Parameter beside the property, and fail; others put things behind the property.
    if isinstance(value, nn.Parameter):
        value = value.detach() if name in _names(self) else value
    elif name in type(self)._weights and not isinstance(value, Tensor) and name in _names(self):  # type: ignore[attr-defined]
        wanted = "a tensor while it is orthogonal"
        raise DtypeError(f"{plain.__name__}.{name} needs {wanted}, got {type(value).__name__}; sk.bake makes it plain.")
    if name in _SIZES and (size := vars(self).get(name, value)) != value:
        needs = f"{plain.__name__} needs {name}={size} while its {' and '.join(_names(self))} is orthogonal"
        raise OptionError(f"{needs}, got {value}; sk.bake makes a plain weight, which can be resized.")
    plain.__setattr__(self, name, value)


def _save(self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Saves a module that lists entries of its own, without the weight that it has read for that."""
    _plain_class(self)._save_to_state_dict(self, destination, prefix, keep_vars)
    for name, _ in lists_of(self):
        destination.pop(prefix + name, None)


def _reading(name: str, plain: property) -> property:
    """Returns the property of torch, but that a weight in a group comes from there without a call of modules.

    What is read is watched for writes, which groups do by themselves.
    """
    evaluate: Callable[[nn.Module], Tensor] = plain.fget  # type: ignore[assignment]

    def read(self: nn.Module) -> Tensor:
        if torch.compiler.is_compiling():
            return evaluate(self)
        carrier = vars(vars(self)["_modules"]["parametrizations"])["_modules"][name]
        held = vars(carrier)
        if (stand_in := held.get("stand_in")) is not None:
            return stand_in
        slot, weight = held.get("_slot"), held.get("weight")
        try:
            if slot is not None and slot.is_whole and not _torch.is_cached():
                w = slot.read(carrier)
                if w is not None:
                    return w
            is_kept = _torch.is_cached() and not _torch.is_jit_traced()  # torch refuses to trace what is cached
            w = _kept(carrier, (id(plain), name)) if is_kept else evaluate(self)
        except AttributeError as error:
            # From a property, nn.Module would take it for its own, and say that the module has no such weight.
            raise RuntimeError(f"{_torch.class_name(self)}.{name} cannot be computed: {error}") from error
        is_plain = weight and type(w) is Tensor and not w.is_inference()
        if is_plain and not (_torch.is_transformed() or _torch.dispatch_modes()):
            one = Read(w, look_back)
            one.alias, one.count, one.name = w.detach(), _torch.write_count(w), weight
            reads[id(one)] = one
        return w

    return property(read, plain.fset)


def _kept(carrier: nn.Module, reader: tuple[int, str]) -> Tensor:
    """Returns the weight that `parametrize.cached()` keeps, or evaluates it.

    Adjoints and checkpoints read first without gradients, and then in the backward pass: readers with gradients have a
    weight of their own, and those in backward passes, by which the graph may be gone, one each.
    """
    kept, key = _torch.cached_weights(), (*reader, torch.is_grad_enabled())
    w = None if _torch.is_in_backward() else kept.get(key)
    if w is None:
        with saved_plainly():
            w = carrier()
        if not _torch.is_in_backward():
            kept[key] = w
    return w


@functools.lru_cache(256)
def _resetting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `reset_parameters` draw the orthogonal weights of a module too, by their own schemes.

    What it writes into those would go nowhere, or into coordinates, without being a frame: it is given other tensors in
    their place. Weights that it assigns or draws itself stay, and those on the meta device.
    """

    def reset(self: nn.Module, *args: object, **options: object) -> object:
        before = [(one, one.fills) for _, one in lists_of(self)]
        for one, _ in before:
            one.stand_in = torch.zeros(one.param.shape, dtype=one.param.dtype, device=one.original0.device)
        try:
            out = plain(self, *args, **options)
        finally:
            for one, _ in before:
                one.stand_in = None
        for one, fills in before:
            if one.fills == fills and not one.original0.is_meta:
                one.draw_()
        return out

    return reset


def _names(module: nn.Module) -> list[str]:
    held = held_parametrizations(module)
    return [] if held is None else [*_torch.held_modules(held)]


def _rebuild(plain: type[nn.Module], names: Sequence[str]) -> nn.Module:
    module = plain.__new__(plain)
    _inject(module, plain, names)
    return module


def check_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *, assign: bool = False) -> None:
    """Checks every orthogonal weight of a model against what `load_state_dict` will be given, before it is loaded.

    `load_state_dict` does it by itself for a module with such weights, for the one that `sk.orthogonal` was called on,
    those between, and those that are made around them later. Call this for a model around a module that got its weights
    when the model was there. What is under a module with a load hook of its own, or a `_load_from_state_dict`, which
    may change entries, is checked when torch gets there.

    Args:
        module: the model.
        state_dict: what will be loaded, with the model's own keys.
        assign: as in `load_state_dict`: tensors take the place of those that are there, dtype included.
    """
    find.check_module(module, "check_state_dict")
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"check_state_dict needs a mapping of names to tensors, got {type(state_dict).__name__}.")
    check_tree(module, state_dict, "", assign)


def checks_loading(module: nn.Module) -> bool:
    """Returns whether a module checks the orthogonal weights under it before torch loads the first of them."""
    return any(map(_is_ours, _torch.load_pre_hooks(module).values()))


def check_loading_of(module: nn.Module, path: str = "") -> None:
    """Makes a module, and those on the way to a weight inside, check all orthogonal weights before torch loads them."""
    for part in path.split("."):
        if not checks_loading(module):
            module.register_load_state_dict_pre_hook(_check_before_loading)
        module = _torch.inside_checkpoint(_torch.held_modules(module).get(part) or module)


def stop_checking(module: nn.Module) -> None:
    """Takes the hooks of `check_loading_of` from modules that have no orthogonal weights under them any more."""
    for each in module.modules():
        hooks = {} if isinstance(each, torch.jit.ScriptModule) else _torch.load_pre_hooks(each)
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
    *args: object,
) -> None:
    """Checks a load; its list of missing keys, one object for all modules of a load, identifies it."""
    check_tree(module, state_dict, prefix, bool(metadata.get("assign_to_params_buffers")), missing_keys)


def _is_ours(hook: object) -> bool:
    return getattr(hook, "hook", None) is _check_before_loading


def check_tree(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    assign: bool,
    load: object = None,
    empty: dict[int, str | None] | None = None,
) -> None:
    """Checks what is under a module; `empty` has weights of which there is a description alone, so far."""
    found: dict[int, str | None] = {} if empty is None else empty
    wrong = next((key for key in state_dict if not isinstance(key, str)), "") if not prefix else ""
    if not isinstance(wrong, str):
        raise CheckpointError(f"{type(module).__name__} needs a state dict whose keys are strings, got {shown(wrong)}.")
    # torch loads a shared module once under each of its names.
    module = _torch.inside_checkpoint(module)
    # A module may change entries before torch hands them to its children; sharding does not.
    rewrites = not all(_is_ours(hook) or is_sharding(hook) for hook in _torch.load_pre_hooks(module).values())
    known = nn.Module._load_from_state_dict, CoordinateParameters._load_from_state_dict
    rewrites |= type(module)._load_from_state_dict not in known
    if isinstance(module, CoordinateParameters) and not rewrites:
        module.check_coordinates(state_dict, prefix)
    for name, coordinate_list in lists_of(module):
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
        for name, child in _torch.held_modules(module).items():
            if child is not None and not isinstance(child, CoordinateList):
                check_tree(child, state_dict, f"{prefix}{name}.", assign, load, found)
    # A module that is shared may have been saved under one of its names; all of them are seen from the outermost.
    half = next((name for name in found.values() if name is not None), None) if empty is None and not prefix else None
    if half is not None:
        raise CheckpointError(f"{half} needs its coordinates, got a checkpoint with the description of its map alone.")


class CoordinateParameters(nn.Module):
    """A layer with parameters of its own that are coordinates: float32 or better under every cast and load.

    `stiefelkit.optim.parameter_groups` gives them groups of their own, without weight decay.
    """

    coordinate_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of the coordinates, without the suffixes of layers and directions ("_l0_reverse")."""

    def __init__(self) -> None:
        super().__init__()
        self._announce()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._announce()

    def _announce(self) -> None:
        """Registers the layer, so that an optimizer which would shrink its coordinates warns."""
        if self.coordinate_parameters:
            watch_layer(self, _torch.class_name(self))

    def coordinate_keys(self) -> dict[str, str]:
        """Returns name of parameter, "angle_l0", to that of its coordinate, "angle".

        Of a coordinate that torch's `register_parametrization` was given, these are the parameters behind it.
        """
        held = {key: key for key, p in self._parameters.items() if p is not None}
        for key, behind in cast(nn.ModuleDict, self.parametrizations).items() if is_parametrized(self) else ():
            if type(behind) is ParametrizationList:
                held |= {f"parametrizations.{key}.{own}": key for own, _ in behind.named_parameters()}
        names = self.coordinate_parameters
        return {own: name for own, key in held.items() for name in names if f"{key}_l".startswith(f"{name}_l")}

    def check_coordinates(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raises CheckpointError or NonFiniteError if a coordinate would be loaded from what it cannot hold."""
        for key in self.coordinate_keys():
            if (name := f"{prefix}{key}") in state_dict:
                ours = self.get_parameter(key)
                entry_of(state_dict[name], name, name, ours, tuple(ours.shape), True)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.check_coordinates(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CoordinateParameters":
        held = [self.get_parameter(key) for key in self.coordinate_keys()]
        own = {id(t) for p in held for t in (p, p.grad) if t is not None and not t.is_complex()}

        def apply(t: Tensor) -> Tensor:
            moved = fn(t)
            wanted = coordinate_dtype(moved.dtype)
            if id(t) not in own or moved.dtype == wanted:
                return moved
            # From what it was: no digit goes through the coarser dtype.
            return (moved if t.is_meta or moved.is_meta else t).to(device=moved.device, dtype=wanted)

        super()._apply(apply, recurse)
        return self
