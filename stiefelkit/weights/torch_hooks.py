"""The hook by which torch's own functions know our maps, and tools that walk through a model leave them in place.

`torch.nn.utils.parametrize.register_parametrization` with one of our maps gives what `sk.orthogonal` gives, with
the map of another weight it shares that one, as `transfer_parametrizations_and_params` does, and what stands inside a
weight is not wrapped for activation checkpointing. Modules without our maps see no difference.
"""

import functools
import weakref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import parametrize

from stiefelkit._torch import class_name, held_modules, inside_checkpoint, load_pre_hooks
from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.errors import OptionError, ShapeError, StiefelkitError, needs, warn_caller
from stiefelkit.weights.coordinate_list import CoordinateList
from stiefelkit.weights.find import WeightPath, check_takes_frames, lists_of
from stiefelkit.weights.modules import adopt_coordinate_list, check_loading_of, checks_loading
from stiefelkit.weights.optimizer_hooks import coordinate_lists, mark_replaced

_hosts: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""To each `module.parametrizations` the module: torch makes the one first, and then tells of the other alone."""


class MapPlaceholder(nn.Module):
    """Stands in a list of torch's for a map, until our list takes its place.

    `shared` is the list of the weight that has the map already, `replaced` the tensor that torch parametrizes, None
    before torch has asked for coordinates.
    """

    map: OrthogonalParam
    shared: CoordinateList | None
    replaced: Tensor | None

    def __init__(self, param: OrthogonalParam):
        super().__init__()
        carriers = coordinate_lists(of_frames=False) if param.is_attached else ()
        shared = next((one for one in carriers if one.param is param), None)
        self.__dict__.update(map=param, shared=shared, replaced=None)  # none is to be registered

    def right_inverse(self, present: Tensor) -> tuple[Tensor, ...]:
        """Returns the coordinates of a plain parameter; those of a weight that is shared as they are."""
        if not isinstance(present, nn.Parameter) or present.layout != torch.strided:
            kind = str(present.layout) if isinstance(present, nn.Parameter) else "a buffer"
            raise OptionError(
                f"{self.map.title} needs a plain parameter, got {kind}; sk.orthogonal says what makes it one."
            )
        self.__dict__["replaced"] = present
        if self.shared is None:
            return self.map.right_inverse(present)
        got = f"{tuple(present.shape)} to be replaced by {self.shared.weight}"
        needs(tuple(present.shape) == self.map.shape, ShapeError, self.map.title, f"shape {self.map.shape}", got)
        return tuple(c.detach() for c in self.shared.coordinates.values())

    def forward(self, *coordinates: Tensor) -> Tensor:
        """Returns the weight."""
        return self.map(*coordinates) if self.shared is None else self.shared()


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
    if present is not None and vars(present).get("_modules", {}).get("base_layer") is child:
        _check_merged(present)
    elif present is not None and "_is_hf_initialized" in vars(child) and parametrize.is_parametrized(present):
        is_resized = vars(child).get("out_features") != vars(present).get("out_features")
        if is_resized and lists_of(present) and not lists_of(child):
            warn_caller(
                f"{name} was orthogonal and is a plain copy of another size now, as transformers makes it; "
                "sk.orthogonal draws an orthogonal weight."
            )
    if isinstance(parent, parametrize.ParametrizationList) and (placeholder := _put_into(parent, name, child)):
        return placeholder
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


def _check_merged(layer: nn.Module, args: object = ()) -> None:
    """Raises OptionError if a layer of PEFT has merged into an orthogonal weight, which is computed at each read."""
    base = held_modules(layer)["base_layer"]
    if base is not None and getattr(layer, "merged", False) and (lost := [one.weight for _, one in lists_of(base)]):
        raise OptionError(
            f"{class_name(layer)} needs a plain weight to be merged into, got {lost[0]}, an orthogonal one, which "
            "stays as it is; unmerge_adapter() goes back, and sk.bake(model) makes a plain weight of it."
        )


def _put_into(parent: parametrize.ParametrizationList, name: str, child: nn.Module) -> nn.Module | None:
    """Returns what stands for a map in a list of torch's: maps are first, and others on top of them."""
    if isinstance(child, OrthogonalParam):
        if name != "0":
            raise OptionError(
                f"{child.title} needs to be the first parametrization of a weight, got one on top of "
                f"{type(parent[0]).__name__}; parametrize.remove_parametrizations first."
            )
        return MapPlaceholder(child)
    if isinstance(parent, CoordinateList) and name.isdigit():
        is_new = all(child is not each for each in parent)
        needs(is_new, OptionError, parent.weight, "parametrizations on top once each", f"{type(child).__name__} twice")
        parent.leave_group()
    return None


def _adopted(parent: nn.Module, name: str, child: parametrize.ParametrizationList) -> CoordinateList | None:
    """Returns the coordinate list that takes the place of torch's list with one of our maps, None for other lists."""
    first = next(iter(child), None)
    if not isinstance(first, MapPlaceholder):
        return None
    host = _hosts[parent]() if parent in _hosts else None
    host = host if host is not None and held_modules(host).get("parametrizations") is parent else None
    if host is not None and isinstance(first.replaced, nn.Parameter):
        try:
            check_takes_frames(WeightPath(name, host, name), first.replaced)
        except StiefelkitError:
            _undo_registration(host, name, first.replaced)
            raise
    if first.shared is not None:
        coordinate_list = first.shared
    else:
        values = [getattr(child, f"original{i}") for i in range(child.ntensors)]
        coordinate_list = CoordinateList(first.map, values, any(value.requires_grad for value in values))
    if host is not None:
        adopt_coordinate_list(host, name, coordinate_list)
    if first.shared is not None and first.replaced is not None:
        mark_replaced([first.replaced], coordinate_list.weight, "sharing a map", coordinate_list)
    return coordinate_list.train(coordinate_list.param.training)


def _undo_registration(host: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Takes back what torch's `register_parametrization` has done to a module when the last step is refused."""
    delattr(type(host), name)
    if not parametrize.is_parametrized(host):
        delattr(host, "parametrizations")
        host.__class__ = type(host).__bases__[0]
    setattr(host, name, weight)


def _is_inside_a_weight(parent: nn.Module, name: str, present: nn.Module) -> bool:
    is_part = isinstance(parent, CoordinateList | OrthogonalParam) or isinstance(present, CoordinateList)
    return is_part or (name == "parametrizations" and checks_loading(parent))
