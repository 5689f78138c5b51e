"""The hook by which torch's own functions know our maps, and tools that walk through a model leave them in place.

`torch.nn.utils.parametrize.register_parametrization` with one of our maps gives what `sk.orthogonal` gives,
`transfer_parametrizations_and_params` shares a weight, and what stands inside a weight is not wrapped for activation
checkpointing. Modules without our maps see no difference.
"""

import functools
import inspect
import weakref

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import parametrize

from stiefelkit._torch import held_modules, inside_checkpoint, load_pre_hooks, registering
from stiefelkit.contract.param import OrthogonalParam, title
from stiefelkit.errors import OptionError
from stiefelkit.weights.coordinate_list import CoordinateList
from stiefelkit.weights.find import Place, plain_weight
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
    return None


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
    if isinstance(parent, CoordinateList | OrthogonalParam) or isinstance(present, CoordinateList):
        return True
    return name == "parametrizations" and checks_loading(parent)
