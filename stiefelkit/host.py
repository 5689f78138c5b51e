"""The modules whose weights are parametrized: finding them, and the class that torch gives them.

Everything that leans on private names of torch.nn.utils.parametrize lives here, with tests that say so when torch
renames them.
"""

import copy
import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from typing_extensions import deprecated

from stiefelkit.carrier import CoordinateList
from stiefelkit.errors import CheckpointError, DtypeError, OptionError
from stiefelkit.notices import retire

__all__ = [
    "adopt_carrier",
    "attach_carrier",
    "carrier_of",
    "carriers",
    "check_before_loading",
    "check_module",
    "check_state_dict",
    "manifolds",
    "share_carrier",
]


def check_module(module: Any, who: str, remedy: str = "") -> None:
    """Raises DtypeError unless it is a module; the remedy ends the sentence."""
    if not isinstance(module, nn.Module):
        raise DtypeError(f"{who} needs a torch.nn.Module, got {type(module).__name__}{remedy}.")


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


def attach_carrier(module: nn.Module, name: str, carrier: CoordinateList, event: str = "sk.orthogonal") -> None:
    """Replaces a plain parameter of a module by what a carrier evaluates to; the event is who asked for it."""
    held = _parametrizations(module)
    plain = type(module).__bases__[0] if held else type(module)
    old = module._parameters.get(name)
    if old is not None:
        retire([old], f"{plain.__name__}.{name}", event, carrier)
    delattr(module, name)
    if held is None:
        held = module.parametrizations = nn.ModuleDict()
    held[name] = carrier.train(module.training)
    _introduce(module, plain, name, carrier)
    _inject(module, plain, list(held))


def adopt_carrier(module: nn.Module, name: str, carrier: CoordinateList) -> None:
    """Does for a carrier that torch is about to put on a module what `attach_carrier` does.

    The module has a class injected by torch already, and the property of this name.
    """
    plain = type(module).__bases__[0]
    _introduce(module, plain, name, carrier)
    _inject(module, plain, [*module.parametrizations, name])  # type: ignore[misc]


def _introduce(module: nn.Module, plain: Any, name: str, carrier: CoordinateList) -> None:
    """Tells a carrier whose weight it is."""
    carrier.weight = f"{plain.__name__}.{name}"
    carrier.gradients = getattr(plain, "frame_gradients", CoordinateList.gradients)
    carrier.is_sparse |= isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def share_carrier(places: Sequence[tuple[nn.Module, str]], carrier: CoordinateList) -> None:
    """Replaces plain parameters of several modules by what one carrier evaluates to; its name is the first's."""
    kinds = None
    for module, name in reversed(places):
        attach_carrier(module, name, carrier)
        kinds = carrier.gradients if kinds is None else tuple(kind for kind in carrier.gradients if kind in kinds)
    carrier.gradients = kinds or CoordinateList.gradients


def manifolds(module: nn.Module) -> dict[str, str]:
    """Returns qualified name to manifold of every coordinate that must stay on one, "0.weight.stiefel".

    An optimizer that does not move along the manifold must not step such a module.
    """
    return {
        f"{qualified}.{name}": manifold
        for qualified, _, _, carrier in carriers(module)
        for name, manifold in carrier.param.manifolds.items()
    }


def check_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *, assign: bool = False) -> None:
    """Checks every orthogonal weight of a model against a state dict, before anything is loaded.

    `module.load_state_dict` does it by itself. A module with a load hook of its own, or a `_load_from_state_dict`,
    may change the entries of the modules inside it: what is under such a one is checked when torch gets there.

    Args:
        module: the model.
        state_dict: what `module.load_state_dict` will be given.
        assign: as in `load_state_dict`.

    Raises:
        CheckpointError: an entry belongs to another map, shape, field or version, or is a plain weight.
        NonFiniteError: coordinates hold NaN or infinity, or a weight would.
    """
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"check_state_dict needs a mapping of names to tensors, got {type(state_dict).__name__}.")
    for key in state_dict:
        if not isinstance(key, str):
            raise CheckpointError(
                f"{type(module).__name__} needs a state dict whose keys are strings, got {key!r:.80}."
            )
    _check_tree(module, state_dict, "", assign)


def _check_tree(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, assign: bool) -> None:
    # torch loads a shared module once under each of its names.
    for name, _ in _own_carriers(module):
        _check_host(module, name, state_dict, prefix, assign)
    if not _rewrites_entries(module):
        for name, child in module._modules.items():
            if child is not None and not isinstance(child, CoordinateList):
                _check_tree(child, state_dict, f"{prefix}{name}.", assign)


def _rewrites_entries(module: nn.Module) -> bool:
    """Whether a module may change a state dict before torch hands it to its children; sharding does not."""
    hooks = module._load_state_dict_pre_hooks.values()
    foreign = any(not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.") for hook in hooks)
    load = type(module)._load_from_state_dict
    return foreign or not (load is nn.Module._load_from_state_dict or hasattr(load, "checks_carriers"))


def check_before_loading() -> None:
    """Has `load_state_dict` of every module check the orthogonal weights under it before torch writes anything.

    torch writes module by module and offers no hook at the beginning, for a root that is not ours. Models without
    orthogonal weights see no difference.
    """
    plain = nn.Module.load_state_dict
    if hasattr(plain, "checks_carriers"):
        return

    @functools.wraps(plain)
    def load_state_dict(
        self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        if isinstance(state_dict, Mapping) and next(carriers(self), None) is not None:
            check_state_dict(self, state_dict, assign=assign)
        return plain(self, state_dict, strict=strict, assign=assign)

    load_state_dict.checks_carriers = True  # type: ignore[attr-defined]
    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _refuse_norms_by_hooks() -> None:
    """Has torch's older norms, which look for a plain parameter, say so where they find a weight of ours."""
    for kind, name in (("weight_norm", "WeightNorm"), ("spectral_norm", "SpectralNorm")):
        # By its name: in torch.nn.utils the function stands in the place of its module.
        norm = getattr(importlib.import_module(f"torch.nn.utils.{kind}"), name)
        plain = norm.apply
        if hasattr(plain, "checks_carriers"):
            continue
        checked = _refusing(getattr(plain, "__wrapped__", plain), kind)
        if hasattr(plain, "__deprecated__"):  # inside: that warning names the caller's line
            checked = deprecated(plain.__deprecated__, category=FutureWarning)(checked)
        checked.checks_carriers = True
        norm.apply = staticmethod(checked)


def _refusing(plain: Any, kind: str) -> Any:
    @functools.wraps(plain)
    def apply(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        carrier = carrier_of(module, name)
        if carrier is not None:
            raise OptionError(
                f"{kind} needs a plain parameter, got {carrier.weight}, a {carrier.param.title}'s; sk.bake it first, "
                "or scale the frame with gain= of sk.orthogonal."
            )
        return plain(module, name, *args, **kwargs)

    return apply


def _parametrizations(module: nn.Module) -> nn.ModuleDict | None:
    # Not by getattr: a wrapper may pass on the attributes of the module inside it.
    # A script module has modules of another kind.
    held = None if isinstance(module, torch.jit.ScriptModule) else module._modules.get("parametrizations")
    return held if isinstance(held, nn.ModuleDict) else None


def _own_carriers(host: nn.Module) -> list[tuple[str, CoordinateList]]:
    held = _parametrizations(host) or {}
    return [(name, carrier) for name, carrier in held.items() if isinstance(carrier, CoordinateList)]


def _check_host(host: nn.Module, name: str, state_dict: Mapping[str, Any], prefix: str, assign: bool) -> None:
    carrier: CoordinateList = host.parametrizations[name]  # type: ignore[index, assignment]
    inside = f"{prefix}parametrizations.{name}."
    if prefix + name in state_dict:
        raise CheckpointError(
            f"{prefix}{name} needs the coordinates of {carrier.param.title}, got a plain weight; load it before "
            "sk.orthogonal, or assign it with sk.assign_ (sk.check_state_dict checks a whole model at once)."
        )
    carrier.check(state_dict, inside, assign)


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

    def load(self: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        for name, _ in _own_carriers(self):
            _check_host(self, name, state_dict, prefix, bool(metadata.get("assign_to_params_buffers")))
        plain._load_from_state_dict(self, state_dict, prefix, metadata, *args)

    if plain._load_from_state_dict is nn.Module._load_from_state_dict:
        load.checks_carriers = True  # type: ignore[attr-defined]
    check_before_loading()
    _refuse_norms_by_hooks()

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
