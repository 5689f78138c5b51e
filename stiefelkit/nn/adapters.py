"""Adapters of whole models: put on by patterns, switched by name, saved apart from the model, folded."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stiefelkit._torch import CHECKPOINTED, held_modules, inside_checkpoint
from stiefelkit.contract.param import Parametrization
from stiefelkit.contract.table import registered
from stiefelkit.errors import CheckpointError, OptionError, UnknownNameError, did_you_mean, needs, shown
from stiefelkit.nn.adapter import Adapter, OrthogonalAdapter, Replacement, replaced
from stiefelkit.nn.butterfly import ButterflyAdapter
from stiefelkit.nn.frozen import OF_PEFT, in_other_adapters, layout_of
from stiefelkit.nn.linear import HadamardLinear
from stiefelkit.nn.low_rank import LowRankAdapter, PrincipalAdapter
from stiefelkit.weights.find import Where, check_module, matches, nearest_of

KINDS = {"butterfly": ButterflyAdapter, "low_rank": LowRankAdapter, "principal": PrincipalAdapter}
"""Adapters by the word that `adapt` takes in place of the map of a rotation."""


class TrainedCopy(Replacement):
    """A module that stays as it is, and a copy of it that is trained and called in its place, for `modules_to_save`."""

    merged = None

    def __init__(self, layer: nn.Module, name: str):
        super().__init__(layer, name)
        self.copy = copy.deepcopy(layer).requires_grad_(True)
        layer.requires_grad_(False)

    @property
    def active(self) -> nn.Module:
        """The module that is called."""
        return self.copy if self.is_on else self.layer

    def __getattr__(self, name: str) -> Any:
        if name in ("layer", "copy") or name.startswith("_") or name in OF_PEFT:
            return super().__getattr__(name)
        return getattr(self.active, name)

    def check_alone(self, chosen: Iterable[str] | None = None) -> None:
        """Raises OptionError for two adapters, on or chosen, with a copy of this module: one alone would train."""
        copies: list[TrainedCopy] = [self]
        while isinstance(inner := copies[-1].layer, TrainedCopy):
            copies.append(inner)
        names = [other.name for other in copies if (other.is_on if chosen is None else other.name in chosen)]
        got = f"those of {names}; sk.nn.use_adapters(model, name) switches the others off"
        needs(len(names) < 2, OptionError, "modules_to_save", "one copy of a module that is on", got)

    def forward(self, *args: object, **options: object) -> Any:
        self.check_recomputed()
        self.check_alone()
        return self.active(*args, **options)

    def folded(self) -> nn.Module:
        self.check_alone()
        return self.active.folded() if isinstance(self.active, Replacement) else self.active


class Site(NamedTuple):
    """A module of a model, without its replacements."""

    name: str
    layer: nn.Module
    around: tuple[Replacement, ...]  # what stands in its place, the outermost first
    is_saved: bool  # whether a copy of it, or of what it is in, is trained


def adapt(
    model: nn.Module,
    where: Where,
    parametrization: Parametrization = "block_diagonal",
    *,
    name: str = "default",
    modules_to_save: str | Sequence[str] = (),
    **options: Any,
) -> nn.Module:
    """Puts an adapter in the place of layers, and returns the model; the adapter, if the model itself is the layer.

    Parameters of other modules keep their `requires_grad`: `model.requires_grad_(False)` first trains adapters only.
    Layers have the names they had without adapters. Those that have an adapter of this name are left alone, so that a
    second call adapts what the first has left; another `name=` adds one, around the layer and those it has: with
    side="in" it acts on the input first, with side="out" on the output last. A layer that stands in several places is
    adapted once, in all of them.

    Args:
        model: the model.
        where: which layers, as in `sk.orthogonal`: "encoder.*.weight" or "encoder.*", several patterns, or a function
            of the weight's name and the layer.
        parametrization: as in `OrthogonalAdapter`; or "butterfly", "principal" or "low_rank", for `ButterflyAdapter`,
            `PrincipalAdapter` and `LowRankAdapter`.
        name: by which `use_adapters`, `adapter_state` and `delete_adapter` know these adapters.
        modules_to_save: patterns of modules that are trained as a whole, a copy of each in its place; of several
            adapters with a copy of one module one may be on.
        **options: as in the class of the adapter.

    Refused are layers inside a layer of PEFT, which would merge into a weight that is computed, and layers that share
    a parameter with a module that trains it; nothing is changed then.

    >>> net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> list(adapters(adapt(net, "*.weight", block_size=4)))
    ['0', '2']
    """
    check_module(model, "adapt")
    is_name = isinstance(parametrization, str)
    if is_name and parametrization not in {*KINDS, *registered.names()}:
        near = did_you_mean(parametrization, [*KINDS, *registered.names()])
        raise UnknownNameError(f"adapt needs an adapter or a map, got {parametrization!r}{near}")
    kind = KINDS.get(parametrization, OrthogonalAdapter) if is_name else OrthogonalAdapter
    if kind is OrthogonalAdapter:
        options["parametrization"] = parametrization
    chosen = _chosen(model, where)
    fresh = {id(site.layer): site for site in chosen if all(other.name != name for other in site.around)}
    got = f"{chosen[0].name}, which has one; another name= adds one more"
    needs(len(fresh) > 0, OptionError, "adapt", "layers without an adapter of this name", got)
    saved = to_save(model, modules_to_save, name, fresh.values())
    return put_on(model, fresh, saved, name, lambda site: kind(site.layer, name=name, **options))


def put_on(
    model: nn.Module, fresh: dict[int, Site], saved: dict[int, Site], name: str, made_for: Callable[[Site], Adapter]
) -> nn.Module:
    """Puts new adapters around layers, and copies in the place of modules, by the ids of both; returns the model."""
    others = in_other_adapters(model)
    for key, site in (fresh | saved).items():
        got = f"{site.name}, inside {others.get(key)}, which merges into it; adapt first, or merge_and_unload"
        needs(key not in others, OptionError, "adapt", "layers of the model itself", got)
    _refuse_trained_elsewhere(model, fresh | saved)
    trained = [p for site in (fresh | saved).values() for p in site.layer.parameters() if p.requires_grad]
    try:
        made: dict[int, Replacement] = {key: made_for(site) for key, site in fresh.items()}
        made |= {key: TrainedCopy(site.layer, name) for key, site in saved.items()}
    except Exception:
        for p in trained:
            p.requires_grad = True
        raise
    for other in made.values():
        other.training = other.layer.training
        for child_name, child in other.named_children() if isinstance(other, Adapter) else ():
            if child_name != "layer":
                child.train(other.training)
    for site in fresh.values():
        for outer in site.around:
            outer.unmerge()
    return replaced(model, made)


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """Returns name to adapter of all those in a model, each once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}


def fold(model: nn.Module) -> nn.Module:
    """Puts a plain layer with the changed weight in the place of every adapter, and returns the model.

    What is off is left out; a module of `modules_to_save` is replaced by its copy.
    """
    held = replacements(model, "fold")
    needs(any(other.is_on for other in held), OptionError, "fold", "an adapter that is on", "all of them off")
    inside = {id(other.layer) for other in held}
    return replaced(model, {id(other): other.folded() for other in held if id(other) not in inside})


def use_adapters(model: nn.Module, names: str | Iterable[str]) -> None:
    """Switches adapters of a model on that have one of some names, and all others off; `()` is none.

    Each changes its layer together with those that were put on it before. Merged ones are unmerged.
    """
    chosen = _listed(names)
    held = replacements(model, "use_adapters", *chosen)
    for other in held:
        if isinstance(other, TrainedCopy):
            other.check_alone(chosen)
    for other in held:
        other.unmerge()
        other.is_on = other.name in chosen


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switches all adapters of a model off inside a block, merged ones too: it computes what its base does.

    >>> net = adapt(nn.Linear(8, 8), "weight")
    >>> with without_adapters(net):
    ...     torch.equal(net(torch.ones(8)), net.layer(torch.ones(8)))
    True
    """
    before = {other: (other.is_on, other.merged) for other in replacements(model, "without_adapters")}
    try:
        for other in before:
            other.is_on = False
        yield
    finally:
        for other in {*before, *(module for module in model.modules() if isinstance(module, Replacement))}:
            was, merged = before.get(other, (other.is_on, None))
            if other.merged is not merged:  # inside the block, without the others
                other.unmerge()
            other.is_on = was


def delete_adapter(model: nn.Module, name: str) -> nn.Module:
    """Takes the adapters of a name out of a model, and returns it; parameters of the layers stay frozen.

    Other adapters around the same layers are unmerged.
    """
    held = replacements(model, "delete_adapter", name)
    for other in held:
        other.unmerge()
    return replaced(model, {id(other): other.layer for other in held if other.name == name})


def adapter_state(model: nn.Module, name: str = "default") -> dict[str, Tensor]:
    """Returns the state of the adapters of a name, copies of `modules_to_save` too, without that of their layers.

    Keys, and the shape of each tensor, are those of a model with these adapters alone.
    """
    replacements(model, "adapter_state", name)
    state = model.state_dict()
    return {short: state[key] for key, (owner, short) in _owners(model, state).items() if owner == name}


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state of a model without its adapters, with each key and shape that it had before."""
    state = model.state_dict()
    return {short: state[key] for key, (owner, short) in _owners(model, state).items() if owner is None}


def load_adapter_state(model: nn.Module, state: Mapping[str, Tensor], name: str = "default") -> None:
    """Loads a state that `adapter_state` gave into the adapters of a name, which may be another than it came from.

    Args:
        model: a model with adapters of this name.
        state: tensors by their keys, each of the shape in the model; nothing is loaded if one does not fit.
        name: of the adapters.
    """
    replacements(model, "load_adapter_state", name)
    present, who = model.state_dict(), "load_adapter_state"
    keys = {short: key for key, (owner, short) in _owners(model, present).items() if owner == name}
    for key in {**keys, **state}:
        got = f"{shown(key)} {'missing' if key in keys else 'left over'}"
        needs(key in keys and key in state, CheckpointError, who, f"the keys of the adapters {name!r}", got)
        there, given = present[keys[key]], state[key]
        fits = (given.shape == there.shape or there.dtype == torch.uint8) and given.is_complex() == there.is_complex()
        wanted, got = (f"{tuple(t.shape)} and {t.dtype}" for t in (there, given))
        needs(fits, CheckpointError, who, f"{key} of shape {wanted}", got)
    model.load_state_dict({keys[key]: value for key, value in state.items()}, strict=False)


def replacements(model: nn.Module, who: str, *names: object) -> list[Replacement]:
    """Returns all that adapters of a model are; raises UnknownNameError if there is none, or none of a name."""
    check_module(model, who)
    held = [module for module in model.modules() if isinstance(module, Replacement)]
    if not held:
        raise UnknownNameError(f"{who} needs a model with an adapter, got {type(model).__name__} without.")
    known = sorted({other.name for other in held})
    for name in names:
        needs(name in known, UnknownNameError, who, f"the name of an adapter, one of {known}", shown(name))
    return held


def _listed(names: str | Iterable[str]) -> list[str]:
    return list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [names]


def _owners(model: nn.Module, state: Iterable[str]) -> dict[str, tuple[str | None, str]]:
    """Returns for each key of a state dict the name of the adapters it belongs to, None for the base, and its own key.

    That is the key in a model without other adapters: "0.layer.rotation.x" of the second around a layer is
    "0.rotation.x", and "0.layer.layer.weight" is "0.weight".
    """
    held = [(path, m.name) for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, Replacement)]
    names = {".".join(part for part in path.split(".") if part != CHECKPOINTED): name for path, name in held}
    online = {path for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, HadamardLinear)}
    found: dict[str, tuple[str | None, str]] = {}
    for key in state:
        parts, short, owner = key.split("."), [], None
        for i, part in enumerate(parts):
            around = names.get(".".join(parts[:i]))
            if around is None or part != "layer":
                short.append(part)
                owner = owner or around
        if owner is None and short[-2:-1] == ["linear"] and ".".join(short[:-2]) in online:
            del short[-2]  # whose keys are those of a plain layer
        found[key] = owner, ".".join(short)
    return found


def sites_of(module: nn.Module, name: str = "", is_saved: bool = False) -> Iterator[Site]:
    """Yields the modules of a model under all of their names, replacements passed over."""
    module = inside_checkpoint(module)
    around: list[Replacement] = []
    while isinstance(module, Replacement):
        around.append(module)
        module = module.layer
    is_saved |= any(isinstance(other, TrainedCopy) for other in around)
    yield Site(name, module, tuple(around), is_saved)
    for child_name, child in held_modules(module).items():
        if child is not None:
            yield from sites_of(child, f"{name}.{child_name}".lstrip("."), is_saved)


def _chosen(model: nn.Module, where: Where) -> list[Site]:
    """Returns the layers that are meant, each once, without those inside others of them."""
    sites = [site for site in sites_of(model) if not site.is_saved and layout_of(site.layer) is not None]
    keys = {site.name: f"{site.name}.weight".lstrip(".") for site in sites}
    if isinstance(where, type):
        of_each = {where.__name__: [site for site in sites if isinstance(site.layer, where)]}
    elif callable(where):
        of_each = {"where": [site for site in sites if where(keys[site.name], site.layer)]}
    else:
        of_each = {p: [s for s in sites if matches(s.name, p) or matches(keys[s.name], p)] for p in _listed(where)}
    for pattern in (pattern for pattern, found in of_each.items() if not found):
        near = nearest_of(pattern, sorted({*keys.values()}), takes_patterns=True)
        wanted = "to match layers with in_features and out_features, none of an adapter"
        raise UnknownNameError(f"adapt of {type(model).__name__} needs {shown(pattern)} {wanted}, got none{near}")
    meant = [site for site in sites if any(site in found for found in of_each.values())]
    once = {id(site.layer): site for site in reversed(meant)}
    inside = {id(inner) for site in once.values() for inner in site.layer.modules() if inner is not site.layer}
    return [site for site in meant if once.get(id(site.layer)) is site and id(site.layer) not in inside]


def to_save(model: nn.Module, patterns: str | Sequence[str], name: str, fresh: Iterable[Site]) -> dict[int, Site]:
    """Returns the modules that are trained as a whole."""
    found: dict[int, Site] = {}
    adapted, sites = {id(site.layer) for site in fresh}, list(sites_of(model))
    for pattern in _listed(patterns):
        matched = [site for site in sites if site.name and matches(site.name, pattern)]
        if not matched:
            near = nearest_of(pattern, [site.name for site in sites if site.name], takes_patterns=True)
            raise UnknownNameError(f"modules_to_save={shown(pattern)} matches no module{near}")
        for site in matched:
            inner = [m for m in site.layer.modules() if isinstance(m, Replacement) or id(m) in adapted]
            is_free = not (inner or any(isinstance(other, Adapter) for other in site.around))
            got = f"{site.name}; leave its layers out of where="
            needs(is_free, OptionError, "adapt", "modules_to_save without adapters in them", got)
            if all(other.name != name for other in site.around):
                found[id(site.layer)] = site
    return found


def _refuse_trained_elsewhere(model: nn.Module, sites: Mapping[int, Site]) -> None:
    """Raises OptionError if a parameter of the layers is trained by a module that is not among them."""
    names: dict[int, str] = {}
    for site in sites.values():
        names |= {id(p): f"{site.name}.{k}".lstrip(".") for k, p in site.layer.named_parameters() if p.requires_grad}
    modules = model.named_modules(remove_duplicate=False)
    inside = tuple(f"{path}.".lstrip(".") for path, module in modules if id(module) in sites)
    for name, p in model.named_parameters(remove_duplicate=False):
        got = f"{names.get(id(p))}, which {name} trains; model.requires_grad_(False) first, or untie them"
        is_free = id(p) not in names or name.startswith(inside)
        needs(is_free, OptionError, "adapt", "parameters that it may freeze", got)
