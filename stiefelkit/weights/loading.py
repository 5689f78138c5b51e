"""Whole state dicts: what they hold for every orthogonal weight is checked before anything is written."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stiefelkit._torch import (
    held_modules,
    inside_checkpoint,
    load_pre_hooks,
)
from stiefelkit.contract.param import title
from stiefelkit.errors import CheckpointError, shown
from stiefelkit.tensors import is_sharding
from stiefelkit.weights.coordinate_list import CoordinateList
from stiefelkit.weights.find import lists_of, orthogonal_weights

__all__ = ["check_loading_of", "check_state_dict", "check_tree", "checks_loading", "stop_checking"]


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
    check_tree(module, state_dict, "", assign)


def checks_loading(module: nn.Module) -> bool:
    """Returns whether a module checks the orthogonal weights under it before torch loads the first of them."""
    return bool(lists_of(module)) or any(map(_is_ours, load_pre_hooks(module).values()))


def check_loading_of(module: nn.Module, path: str = "") -> None:
    """Makes a module, and those on the way to a weight inside, check orthogonal weights before torch loads them.

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
    """Checks a load; its list of missing keys, one object for all modules of a load, identifies it."""
    check_tree(module, state_dict, prefix, bool(metadata.get("assign_to_params_buffers")), missing_keys)


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "hook", None) is _check_before_loading


def check_tree(
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
                    f"{type(module).__name__} needs a state dict whose keys are strings, got {shown(key)}."
                )
    # torch loads a shared module once under each of its names.
    module = inside_checkpoint(module)
    rewrites = _rewrites_entries(module)
    for name, coordinate_list in lists_of(module):
        if prefix + name in state_dict:
            raise CheckpointError(
                f"{prefix}{name} needs the coordinates of {title(coordinate_list.param)}, got a plain weight; load it "
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
                check_tree(child, state_dict, f"{prefix}{name}.", assign, load, found)
    # A module that is shared may have been saved under one of its names; all of them are seen from the outermost.
    halves = [name for name in found.values() if name is not None] if empty is None and not prefix else ()
    for name in halves:
        raise CheckpointError(f"{name} needs its coordinates, got a checkpoint with the description of its map alone.")


def _rewrites_entries(module: nn.Module) -> bool:
    """Returns whether a module may change a state dict before torch hands it to its children; sharding does not."""
    foreign = not all(_is_ours(hook) or is_sharding(hook) for hook in load_pre_hooks(module).values())
    load = type(module)._load_from_state_dict
    return foreign or not (load is nn.Module._load_from_state_dict or hasattr(load, "checks_coordinates"))
