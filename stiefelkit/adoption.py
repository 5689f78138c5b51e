"""Maps that torch's own functions put on weights, or hand on to other modules.

`torch.nn.utils.parametrize.register_parametrization` with one of our maps gives what `sk.orthogonal` gives, and
`transfer_parametrizations_and_params` shares a weight. Models without our maps see no difference.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import parametrize

from stiefelkit._torch import held_modules
from stiefelkit.coordinate_list import CoordinateList
from stiefelkit.errors import OptionError, ShapeError
from stiefelkit.host import adopt_coordinate_list, attach_coordinate_list, check_before_loading, coordinate_list_of
from stiefelkit.notices import retire
from stiefelkit.param import OrthogonalParam

__all__ = ["install"]

_hosts: weakref.WeakKeyDictionary[nn.ModuleDict, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""To each `module.parametrizations` the module: torch makes the one first, and then tells of the other alone."""


def install() -> None:
    """Has torch's functions know our maps; once."""
    plain = parametrize.transfer_parametrizations_and_params
    if hasattr(plain, "knows_coordinate_lists"):
        return
    register_module_module_registration_hook(_adopt)  # type: ignore[arg-type]

    @functools.wraps(plain)
    def transfer(from_module: nn.Module, to_module: nn.Module, tensor_name: str | None = None) -> nn.Module:
        names: Any = (tensor_name,)
        if tensor_name is None:
            names = list(from_module.parametrizations) if parametrize.is_parametrized(from_module) else []  # type: ignore[arg-type]
        for name in names:
            coordinate_list = coordinate_list_of(from_module, name)
            if coordinate_list is None:
                plain(from_module, to_module, name)
            else:
                _share(coordinate_list, to_module, name)
        return to_module

    transfer.knows_coordinate_lists = True  # type: ignore[attr-defined]
    parametrize.transfer_parametrizations_and_params = transfer
    parametrize.remove_parametrizations = _removing(parametrize.remove_parametrizations)


def _removing(plain: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Has optimizers told, as `sk.bake` does, that the coordinates of a weight are no more."""

    @functools.wraps(plain)
    def remove(module: nn.Module, tensor_name: str, leave_parametrized: bool = True) -> nn.Module:
        coordinate_list = coordinate_list_of(module, tensor_name)
        plain(module, tensor_name, leave_parametrized)
        if coordinate_list is not None:
            given_up, heir = coordinate_list.coordinates.values(), getattr(module, tensor_name)
            retire(given_up, coordinate_list.weight, "remove_parametrizations", heir, are_coordinates=True)
        return module

    return remove


def _adopt(parent: nn.Module, name: str, child: nn.Module | None) -> nn.Module | None:
    """Puts a `CoordinateList` in the place of torch's list with one of our maps; torch calls it for every module."""
    if name == "parametrizations" and type(child) is nn.ModuleDict:
        _hosts[child] = weakref.ref(parent)
    if isinstance(child, OrthogonalParam) and isinstance(parent, parametrize.ParametrizationList):
        _check_place(parent, name, child)
    if type(child) is not parametrize.ParametrizationList:
        return None
    param = next(iter(child), None)
    if not isinstance(param, OrthogonalParam):
        return None
    values = [getattr(child, f"original{i}") for i in range(child.ntensors)]
    if not all(isinstance(value, nn.Parameter) for value in values):
        return None
    check_before_loading()
    coordinate_list = CoordinateList(param, values, any(value.requires_grad for value in values))
    host = _hosts[parent]() if parent in _hosts else None  # type: ignore[index, operator]
    if host is not None and held_modules(host).get("parametrizations") is parent:
        adopt_coordinate_list(host, name, coordinate_list)
    else:
        coordinate_list.is_sparse = True  # for all that is known here
    return coordinate_list.train(param.training)


def _check_place(parent: parametrize.ParametrizationList, name: str, param: OrthogonalParam) -> None:
    if name != "0":
        raise OptionError(
            f"{param.title} needs to be the first parametrization of a weight, got one on top of "
            f"{type(parent[0]).__name__}; parametrize.remove_parametrizations first."
        )
    if param.is_attached:
        raise OptionError(
            f"{param.title} needs to be a new map for each weight, got that of another; make one, or share the weight "
            "by parametrize.transfer_parametrizations_and_params."
        )


def _share(coordinate_list: CoordinateList, to_module: nn.Module, name: str) -> None:
    """Has a weight of another module be the same weight, with the same coordinates."""
    present = getattr(to_module, name, None)
    kind = type(to_module).__name__
    if parametrize.is_parametrized(to_module, name):
        raise OptionError(
            f"transfer_parametrizations_and_params needs a plain weight to replace, got {kind}.{name}, parametrized "
            "already; parametrize.remove_parametrizations first."
        )
    shape = tuple(coordinate_list().shape)
    if isinstance(present, Tensor) and tuple(present.shape) != shape:
        raise ShapeError(
            f"transfer_parametrizations_and_params needs {kind}.{name} of shape {shape}, got {tuple(present.shape)}."
        )
    if present is None:
        to_module.register_parameter(name, None)
    attach_coordinate_list(to_module, name, coordinate_list, "transfer_parametrizations_and_params")
