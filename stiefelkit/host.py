"""The modules whose weights are parametrized: finding them, and the class that torch gives them.

Everything that leans on private names of torch.nn.utils.parametrize lives here, with tests that say so when torch
renames them.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from stiefelkit.carrier import CoordinateList
from stiefelkit.errors import CheckpointError

__all__ = ["attach_carrier", "carrier_of", "carriers", "check_state_dict", "manifolds"]


def carriers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, CoordinateList]]:
    """Yields (qualified weight name, host, name, carrier) for every weight under a module, shared ones once."""
    for prefix, host in module.named_modules():
        for name, carrier in _own_carriers(host):
            yield (f"{prefix}.{name}" if prefix else name), host, name, carrier


def carrier_of(module: nn.Module, name: str) -> CoordinateList | None:
    """Returns what carries a weight of this module, or None if it has no parametrization of ours."""
    held = _parametrizations(module)
    carrier = held[name] if held is not None and name in held else None
    return carrier if isinstance(carrier, CoordinateList) else None


def attach_carrier(module: nn.Module, name: str, carrier: CoordinateList) -> None:
    """Replaces a plain parameter of a module by what a carrier evaluates to."""
    held = _parametrizations(module)
    plain = type(module).__bases__[0] if held else type(module)
    delattr(module, name)
    if held is None:
        held = module.parametrizations = nn.ModuleDict()
    held[name] = carrier.train(module.training)
    carrier.weight = f"{plain.__name__}.{name}"
    carrier.gradients = getattr(plain, "frame_gradients", CoordinateList.gradients)
    _inject(module, plain, list(held))


def manifolds(module: nn.Module) -> dict[str, str]:
    """Returns qualified name to manifold of every coordinate that must stay on one, "0.weight.stiefel".

    An optimizer that does not move along the manifold must not step such a module.
    """
    return {
        f"{qualified}.{name}": manifold
        for qualified, _, _, carrier in carriers(module)
        for name, manifold in carrier.param.manifolds.items()
    }


def check_state_dict(module: nn.Module, state_dict: dict[str, Any]) -> None:
    """Checks every orthogonal weight of a model against a state dict, before anything is loaded.

    Args:
        module: the model.
        state_dict: what `module.load_state_dict` will be given.

    Raises:
        CheckpointError: an entry belongs to another map, shape, field or version, or is a plain weight.
        NonFiniteError: coordinates hold NaN or infinity.
    """
    for host_name, host in module.named_modules():
        for name, _ in _own_carriers(host):
            _check_host(host, name, state_dict, f"{host_name}." if host_name else "")


def _parametrizations(module: nn.Module) -> nn.ModuleDict | None:
    # Not by getattr: a wrapper may pass on the attributes of the module inside it.
    held = module._modules.get("parametrizations")
    return held if isinstance(held, nn.ModuleDict) else None


def _own_carriers(host: nn.Module) -> list[tuple[str, CoordinateList]]:
    held = _parametrizations(host) or {}
    return [(name, carrier) for name, carrier in held.items() if isinstance(carrier, CoordinateList)]


def _check_host(host: nn.Module, name: str, state_dict: dict[str, Any], prefix: str) -> None:
    carrier: CoordinateList = host.parametrizations[name]  # type: ignore[index, assignment]
    inside = f"{prefix}parametrizations.{name}."
    if prefix + name in state_dict:
        raise CheckpointError(
            f"{prefix}{name} needs the coordinates of {carrier.param.title}, got a plain weight; load it before "
            "sk.orthogonal, or assign it with sk.assign_ (sk.check_state_dict checks a whole model at once)."
        )
    carrier.check(state_dict, inside)


def _inject(module: nn.Module, plain: Any, names: Sequence[str]) -> None:
    """Gives a parametrized module an injected class of its own, which copies, pickles and checks what it loads.

    torch lets deep copies share one injected class: then changing one copy breaks the other, and
    `parametrize.cached()` hands one copy's weight to the other.
    """

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        if hasattr(plain, "__deepcopy__"):
            replica = plain.__deepcopy__(self, memo)
            _inject(replica, plain, list(replica.parametrizations))
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

    def load(self: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, _ in _own_carriers(self):
            _check_host(self, name, state_dict, prefix)
        plain._load_from_state_dict(self, state_dict, prefix, *args)

    methods = {
        "__deepcopy__": deepcopy,
        "__reduce_ex__": reduce_ex,
        "__setattr__": set_attribute,
        "_load_from_state_dict": load,
    }
    # torch makes the properties; on a bare module, since it insists that the names are no attributes yet.
    bare = nn.Module()
    parametrize._inject_new_class(bare)  # type: ignore[attr-defined]
    for name in names:
        parametrize._inject_property(bare, name)  # type: ignore[attr-defined]
    properties = {name: vars(type(bare))[name] for name in names}
    module.__class__ = type(f"Parametrized{plain.__name__}", (plain,), {**methods, **properties})


def _rebuild(plain: Any, names: Sequence[str]) -> nn.Module:
    module = plain.__new__(plain)
    _inject(module, plain, names)
    return module
