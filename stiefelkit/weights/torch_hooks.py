"""The hook by which torch's own functions know our maps, and tools that walk through a model leave them in place.

`torch.nn.utils.parametrize.register_parametrization` with one of our maps gives what `sk.orthogonal` gives,
`transfer_parametrizations_and_params` shares a weight, and what stands inside a weight is not wrapped for activation
checkpointing. Modules without our maps see no difference.
"""

import functools
import inspect
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import parametrize

from stiefelkit._torch import class_name, held_modules, inside_checkpoint, load_pre_hooks, registering
from stiefelkit.contract.param import OrthogonalParam, title
from stiefelkit.errors import OptionError, warn_caller
from stiefelkit.weights.coordinate_list import CoordinateList
from stiefelkit.weights.find import Place, lists_of, plain_weight
from stiefelkit.weights.group import leave_seat
from stiefelkit.weights.modules import adopt_coordinate_list, check_loading_of, checks_loading
from stiefelkit.weights.optimizer_hooks import retire
from stiefelkit.weights.transfer import Handed

_hosts: weakref.WeakKeyDictionary[nn.ModuleDict, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""To each `module.parametrizations` the module: torch makes the one first, and then tells of the other alone."""


@functools.cache
def install() -> None:
    """Registers torch's hook on every module that becomes another's child, once."""
    register_module_module_registration_hook(_take_in)  # type: ignore[arg-type]


def _take_in(parent: nn.Module, name: str, child: nn.Module | None) -> nn.Module | None:
    """Returns the module to be registered, None for the one that is given."""
    if child is None or "_modules" not in vars(child) or isinstance(parent, torch.jit.ScriptModule):
        return None
    present = vars(parent)["_modules"].get(name)
    if child is present:
        return None  # put back where it was
    if getattr(present, "base_layer", None) is child:
        _check_merged(present)
    elif present is not None and "_is_hf_initialized" in vars(child) and parametrize.is_parametrized(present):
        is_resized = vars(child).get("out_features") != vars(present).get("out_features")
        if is_resized and lists_of(present) and not lists_of(child):
            warn_caller(
                f"{name} was orthogonal and is a plain copy of another size now, as transformers makes it; "
                "sk.orthogonal draws an orthogonal weight."
            )
    if isinstance(parent, parametrize.ParametrizationList):
        _check_place(parent, name, child)
    if type(child) is nn.ModuleDict and name == "parametrizations":
        _hosts[child] = weakref.ref(parent)
    elif type(child) is parametrize.ParametrizationList:
        return _adopted(parent, name, child)
    elif present is not None and inside_checkpoint(child) is present and _is_inside_a_weight(parent, name, present):
        return present
    elif (load_pre_hooks(child) or "parametrizations" in vars(child)["_modules"]) and checks_loading(child):
        check_loading_of(parent)
        if name == "base_layer" and hasattr(type(parent), "merged"):
            parent.register_forward_pre_hook(_check_merged)
    return None


def _check_merged(layer: Any, args: Any = ()) -> None:
    """Raises OptionError if a layer of PEFT has merged into an orthogonal weight, which is computed at each read."""
    if getattr(layer, "merged", False) and (lost := [one.weight for _, one in lists_of(layer.base_layer)]):
        raise OptionError(
            f"{class_name(layer)} needs a plain weight to be merged into, got {lost[0]}, an orthogonal one, which "
            "stays as it is; unmerge_adapter() goes back, and sk.bake(model) makes a plain weight of it."
        )


def _check_place(parent: parametrize.ParametrizationList, name: str, child: nn.Module) -> None:
    """Raises OptionError unless a parametrization may stand where torch puts it: maps first, others on top of them.

    A map is asked for what `sk.orthogonal` needs, before torch has written anything.
    """
    is_first = isinstance(child, OrthogonalParam | Handed) and not isinstance(parent, CoordinateList)
    place = registering() if is_first and name == "0" else None
    if place is not None:
        module, weight = place
        plain_weight(Place(weight, module, weight))
    if isinstance(child, OrthogonalParam) and name != "0":
        raise OptionError(
            f"{title(child)} needs to be the first parametrization of a weight, got one on top of "
            f"{type(parent[0]).__name__}; parametrize.remove_parametrizations first."
        )
    if isinstance(child, OrthogonalParam) and hasattr(child, "_is_attached"):
        raise OptionError(
            f"{title(child)} needs to be a new map for each weight, got that of another; make one, or share the weight "
            "by parametrize.transfer_parametrizations_and_params."
        )
    if isinstance(parent, CoordinateList) and name.isdigit() and name != "0":
        try:
            inspect.signature(child.forward).bind(None)
        except TypeError as error:
            raise OptionError(
                f"{parent.weight}, a {title(parent.param)}'s, needs parametrizations on top that take one tensor, got "
                f"{type(child).__name__}; gain= of sk.orthogonal scales a frame, and sk.bake makes it a plain weight."
            ) from error
        leave_seat(parent)


def _adopted(parent: nn.Module, name: str, child: parametrize.ParametrizationList) -> CoordinateList | None:
    """Returns the coordinate list that takes the place of torch's list with one of our maps, None for other lists."""
    param = next(iter(child), None)
    host = _hosts[parent]() if parent in _hosts else None  # type: ignore[index, operator]
    if isinstance(param, Handed):
        coordinate_list = param.coordinate_list
    elif isinstance(param, OrthogonalParam):
        values = [getattr(child, f"original{i}") for i in range(child.ntensors)]
        coordinate_list = CoordinateList(param, values, any(value.requires_grad for value in values))
    else:
        return None
    if host is not None and held_modules(host).get("parametrizations") is parent:
        adopt_coordinate_list(host, name, coordinate_list)
    else:
        coordinate_list.is_sparse = True  # for all that is known here
        leave_seat(coordinate_list)
    if isinstance(param, Handed) and param.replaced is not None:
        retire([param.replaced], coordinate_list.weight, "transfer_parametrizations_and_params", coordinate_list)
    return coordinate_list.train(param.training)


def _is_inside_a_weight(parent: nn.Module, name: str, present: nn.Module) -> bool:
    """Returns whether a module is a coordinate list, what holds it, or part of it."""
    is_part = isinstance(parent, CoordinateList | OrthogonalParam) or isinstance(present, CoordinateList)
    return is_part or (name == "parametrizations" and checks_loading(parent))
