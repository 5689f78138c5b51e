"""Finding weights of a model by qualified names, patterns and predicates, and refusing those that cannot be taken."""

import fnmatch
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import prune

from stiefelkit._torch import (
    CHECKPOINTED,
    Convolution,
    class_name,
    forward_pre_hooks,
    held_buffers,
    held_modules,
    held_parameters,
    inside_checkpoint,
    pruned_name,
)
from stiefelkit.contract.table import option_names
from stiefelkit.contract.view import View, kernel_views, view_of, views_of_blocks
from stiefelkit.errors import (
    DtypeError,
    OptionError,
    ShapeError,
    UnknownNameError,
    did_you_mean,
    enumerated,
    needs,
    shown,
)
from stiefelkit.weights.coordinate_list import CoordinateList


def check_module(module: object, who: str, remedy: str = "") -> None:
    """Raises DtypeError unless it is a module; the remedy ends the sentence."""
    needs(isinstance(module, nn.Module), DtypeError, who, "a torch.nn.Module", f"{type(module).__name__}{remedy}")


class OrthogonalWeight(NamedTuple):
    """An orthogonal weight of a model: where it stands, as `WeightPath` has it, and what carries its coordinates."""

    qualified: str
    host: nn.Module
    name: str
    coordinate_list: CoordinateList


def orthogonal_weights(module: nn.Module) -> Iterator[OrthogonalWeight]:
    """Yields every orthogonal weight under a module, shared modules once; traced graphs hold such weights as well."""
    for prefix, host in module.named_modules():
        for name, coordinate_list in lists_of(host):
            path = [part for part in prefix.split(".") if part and part != CHECKPOINTED]
            yield OrthogonalWeight(".".join([*path, name]), host, name, coordinate_list)


def coordinate_list_of(module: nn.Module, name: str) -> CoordinateList | None:
    """Returns what carries a weight of this module, or None if it has no parametrization of ours."""
    return dict(lists_of(module)).get(name)


def coordinate_manifolds(module: nn.Module) -> dict[str, str]:
    """Returns qualified name to manifold of every coordinate that must stay on one, "0.weight.stiefel"."""
    return {
        f"{weight.qualified}.{name}": manifold
        for weight in orthogonal_weights(module)
        for name, manifold in weight.coordinate_list.param.manifolds.items()
    }


def held_parametrizations(module: nn.Module) -> nn.Module | None:
    """Returns the module in which torch keeps a module's parametrizations, None if it has none."""
    # Not by getattr: a wrapper may pass on the attributes of the module inside it.
    # A script module has modules of another kind; torch.fx copies the place of a weight as a bare module.
    held = None if isinstance(module, torch.jit.ScriptModule) else held_modules(module).get("parametrizations")
    return held if isinstance(held, nn.ModuleDict) or type(held) is nn.Module else None


def lists_of(host: nn.Module) -> list[tuple[str, CoordinateList]]:
    """Returns name and coordinate list of every orthogonal weight that a module itself has."""
    held = held_parametrizations(host)
    if held is None:
        return []
    return [(name, child) for name, child in held_modules(held).items() if isinstance(child, CoordinateList)]


WILDCARDS = "*?["
Where = str | type[nn.Module] | Sequence[str] | Callable[[str, nn.Module], bool]


class WeightPath(NamedTuple):
    """The place of a weight: its name in a model, "encoder.0.weight", the module that owns it, and its name there."""

    qualified: str
    host: nn.Module
    name: str

    @property
    def title(self) -> str:
        """The qualified name; "Linear.weight" where the model is the host."""
        return self.qualified if "." in self.qualified else f"{class_name(self.host)}.{self.name}"

    @property
    def expression(self) -> str:
        """Python for the host, where the model is called so."""
        path = self.qualified.rpartition(".")[0]
        if all(part.isidentifier() for part in path.split(".")):
            return f"model.{path}"
        return f"model.get_submodule({path!r})" if path else "model"


def find_path(model: nn.Module, name: str) -> WeightPath:
    """Returns where a name points to, "encoder.0.weight"; raises UnknownNameError if no such module is inside."""
    if not isinstance(name, str):
        raise UnknownNameError(f"{class_name(model)} needs the name of a weight, got {shown(name)}.")
    path, _, last = name.rpartition(".")
    host: Any = inside_checkpoint(model)
    for part in path.split(".") if path else []:
        # Not by getattr, which a wrapper may pass on.
        children = held_modules(host)
        host = children[part] if part in children else None
        if host is None:
            near = nearest_of(name, [place.qualified for place in _weights(model)])
            raise UnknownNameError(f"{class_name(model)} has no module {path!r}{near}")
        host = inside_checkpoint(host)
    return WeightPath(name, host, last)


def find_weight(model: nn.Module, name: str, who: str) -> OrthogonalWeight:
    """Returns an orthogonal weight; raises DtypeError or UnknownNameError where there is none of this name."""
    check_module(model, who)
    held = [weight.qualified for weight in orthogonal_weights(model)]
    place = find_path(model, name)
    coordinate_list = coordinate_list_of(place.host, place.name)
    if coordinate_list is None:
        is_plain = place.name in dict(place.host.named_parameters(recurse=False))
        hint = ", only a plain one; call sk.orthogonal first." if is_plain else nearest_of(name, held)
        raise UnknownNameError(f"{class_name(model)} has no orthogonal weight {name!r}{hint}")
    return OrthogonalWeight(*place, coordinate_list)


def choose(model: nn.Module, where: Where, who: str = "orthogonal", of_buffers: bool = False) -> list[WeightPath]:
    """Returns the weights that `where=` of `stiefelkit.orthogonal` means, in the model's order, each once."""
    places, matrices, chosen = _weights(model, "", of_buffers), matrices_of(model, of_buffers), []
    patterns: list[Any] = [*where] if isinstance(where, Sequence) and not isinstance(where, str) else [where]
    classes = [p for p in patterns if isinstance(p, type) and issubclass(p, nn.Module)]
    is_predicate = callable(where) and not isinstance(where, type)
    if not patterns or not (is_predicate or all(isinstance(p, str) or p in classes for p in patterns)):
        raise OptionError(
            f'{who} needs where= as a pattern of names ("encoder.*.weight"), a class of modules, a sequence of such or '
            f"a function (name, module) -> bool, got {shown(where)}."
        )
    for pattern in patterns:
        if isinstance(pattern, str):
            matched = [place for place in places if place.qualified == pattern]
            matched = matched or [place for place in matrices if fnmatch.fnmatchcase(place.qualified, pattern)]
        elif is_predicate:
            matched = [place for place in matrices if pattern(place.qualified, place.host)]
        else:
            matched = [place for place in matrices if isinstance(place.host, pattern)]
        if not matched:
            which = "" if is_predicate else pattern.__name__ if pattern in classes else repr(pattern)
            typed, names = pattern if isinstance(pattern, str) else "", [place.qualified for place in matrices]
            near = nearest_of(typed, names, takes_patterns=True)
            raise UnknownNameError(f"where={which} needs to match a weight of {class_name(model)}, got none{near}")
        chosen += matched
    meant = {place[1:] for place in chosen}
    return [*{place[1:]: place for place in reversed(places) if place[1:] in meant}.values()][::-1]


def matrices_of(model: nn.Module, of_buffers: bool = False) -> list[WeightPath]:
    """Returns every weight of a model, and buffer if asked for, that has two dimensions or more, or may have."""
    held = [(place, held_parameters(place.host).get(place.name)) for place in _weights(model, "", of_buffers)]
    held = [(place, held_buffers(place.host).get(place.name) if p is None else p) for place, p in held]
    return [place for place, p in held if p is None or is_lazy(p) or p.dim() >= 2]


def plain_weight(place: WeightPath) -> nn.Parameter:
    """Returns the parameter at a place; raises OptionError or UnknownNameError if none there can be made orthogonal."""
    host, name = place.host, place.name
    if isinstance(host, torch.jit.ScriptModule):
        raise OptionError(f"An orthogonal weight needs a module before torch.jit.script, got {place.title} of another.")
    weight = held_parameters(host).get(name)
    if weight is None:
        _refuse_what_is_there(place)
        near = nearest_of(name, [other.qualified for other in matrices_of(host)])
        raise UnknownNameError(f"{class_name(host)} has no parameter {shown(name)}{near}")
    check_takes_frames(place, weight)
    return weight


def check_takes_frames(place: WeightPath, weight: nn.Parameter) -> None:
    """Raises OptionError unless a parameter has values, in rows, and a module that reads it as it is."""
    host, name = place.host, place.name
    if is_lazy(weight):
        raise OptionError(f"An orthogonal weight needs a shape, got {place.title}; call the model on a batch first.")
    if isinstance(host, nn.RNNBase):
        raise OptionError(
            f"An orthogonal weight needs a module that reads it at each forward, got {class_name(host)}, which keeps "
            "its own list of weights; use sk.nn.OrthogonalRNN, sk.models.create, or a cell of torch with blocks=."
        )
    if isinstance(host, nn.Embedding | nn.EmbeddingBag):
        options = ("max_norm", host.max_norm), ("padding_idx", host.padding_idx), ("sparse", host.sparse or None)
        for key, value in options:
            if value is not None:
                without = f"{place.expression}.{key} = {False if key == 'sparse' else None} first"
                raise OptionError(
                    f"An orthogonal weight needs an embedding that leaves it alone, got {place.title} with {key}="
                    f"{value}, {_OWN_WAYS[key]}; {without}."
                )
    if weight.layout != torch.strided:
        dense = f"{place.expression}.{name} = torch.nn.Parameter({place.expression}.{name}.to_dense())"
        raise _not_plain(place, "a sparse tensor", f"{dense} makes it one")


def views_of(
    place: WeightPath,
    weight: Tensor,
    who: str,
    view: str | None,
    blocks: int | Sequence[int] | None,
    dim: int,
    is_rms: bool = False,
) -> tuple[View, ...]:
    """Returns how a weight is read, run by run of its blocks; checks that it is a matrix, or kernel, that can be."""
    host = place.host if isinstance(place.host, Convolution) and place.name == "weight" else None
    groups, flaw = 0 if host is None else host.groups, None
    if weight.dim() < 2:
        flaw = "a matrix or a batch of matrices"
    elif weight.numel() == 0:
        flaw = "at least one row and one column"
    elif groups and view is None:
        *most, last = [f'"{key}"' for key in kernel_views(groups)]
        flaw = f"view={', '.join(most)} or {last} for a kernel"
    if flaw is not None:
        raise ShapeError(f"{who} on {place.title} needs {flaw}, got shape {tuple(weight.shape)}.")
    if not (weight.is_floating_point() or weight.is_complex()) or weight.itemsize == 1:
        raise DtypeError(f"{who} on {place.title} needs a floating weight of 16 bits or more, got {weight.dtype}.")
    # Of matrices only the gain depends on it, so that embeddings and heads may be one parameter without.
    out_dim = int(is_rms and has_inputs_first(place.host)) if host is None else int(host.transposed)
    whole = view_of("matrix" if view is None else view, tuple(weight.shape), out_dim, groups or 1)
    try:
        return (whole,) if blocks is None else views_of_blocks(whole, blocks, dim)
    except ShapeError as error:
        raise ShapeError(f"{who} on {place.title}: {error}") from None


def _stacked_in(place: WeightPath) -> tuple[str, str] | None:
    """Returns what a layer of torch or transformers keeps side by side in a weight, and the `blocks=` for it."""
    host, name = place.host, place.name
    if isinstance(host, nn.MultiheadAttention) and name == "in_proj_weight":
        return "q, k and v", f"blocks=3 makes a frame of each, blocks={3 * host.num_heads} of each head's"
    for cls in type(host).__mro__:
        if cls.__name__ in _GATES and name in ("weight_ih", "weight_hh"):
            return "its gates", f"blocks={_GATES[cls.__name__]} makes a frame of each"
    w, is_turned = held_parameters(host).get(name), not isinstance(host, nn.Linear | Convolution)
    if name != "weight" or w is None or w.dim() < 2 or (is_turned and not _is_conv1d(host)):
        return None
    inputs, outputs = w.shape[:2] if is_turned else w.shape[1::-1]
    dim = ", dim=1" if is_turned else ""
    called = re.search(_CALLED, place.qualified.rpartition(".")[0].rpartition(".")[2])
    if called and called.group() == "gate_up":
        return "gate and up", f"blocks=2{dim} makes a frame of each"
    if outputs in (2 * inputs, 3 * inputs) and (called or is_turned):
        count = outputs // inputs
        each = f"blocks={count}{dim} makes a frame of each, if heads do not alternate"
        return f"{count} square matrices", f"{each}, blocks={count} * heads{dim} of each head's"
    return ("several matrices", f"blocks=(size, size, ...){dim} makes a frame of each") if called else None


def _is_conv1d(host: nn.Module) -> bool:
    return any(cls.__name__ == "Conv1D" for cls in type(host).__mro__)


def has_inputs_first(host: nn.Module) -> bool:
    """Returns whether weights are inputs by outputs, as of embeddings, or `Conv1D` and experts of transformers."""
    is_embedding = isinstance(host, nn.Embedding | nn.EmbeddingBag)
    return is_embedding or vars(host).get("is_transposed") is True or _is_conv1d(host)


def notes_on(
    module: nn.Module, tied: Collection[list[WeightPath]], view: str | None, unblocked: type | None
) -> list[str]:
    """Returns what is to be said of weights that are made orthogonal, each with all of its places.

    Whether they are frozen, tied to one that stays plain, of several groups under a view of one, or, if `unblocked` is
    the class of a map without blocks, several matrices in one.
    """
    notes: list[str] = []
    frozen: list[WeightPath] = []
    stacked: dict[tuple[str, str], list[str]] = {}
    weights, taken = {}, set()
    for places in tied:
        weight = held_parameters(places[0].host)[places[0].name]
        weights[weight] = places
        frozen += [] if weight is None or weight.requires_grad else places[:1]
        for place in places:
            taken.add((place.host, place.name))
            kind = None if unblocked is None else _stacked_in(place)
            if kind is not None:
                stacked.setdefault(kind, []).append(place.title)
    if frozen:
        first = frozen[0]
        notes.append(
            f"{enumerated([place.title for place in frozen])}: frozen, and therefore a frozen frame; "
            f"{first.expression}.parametrizations.{first.name}.requires_grad_() trains {first.title}."
        )
    if view is not None and not view.startswith("group_"):
        kernels = [p for p in itertools.chain(*tied) if isinstance(p.host, Convolution) and p.name == "weight"]
        titles = [place.title for place in kernels if place.host.groups > 1]  # type: ignore[union-attr]
        if titles:
            notes.append(
                f"{', '.join(titles)}: a convolution of several groups is not an isometry with view={view!r}, which "
                f'makes one matrix of all groups; view="group_{view}" makes one of each.'
            )
    for other in _weights(module):
        places = weights.get(held_parameters(other.host).get(other.name), ())
        if places and (other.host, other.name) not in taken:
            first, names = places[0], [place.qualified for place in (*places, other)]
            notes.append(
                f"{first.qualified} and {other.qualified} were one parameter and are now two; "
                f"sk.tie({first.expression}, {first.name!r}, {other.expression}, {other.name!r}) ties them, as "
                f"where={names!r} in place of the name does; make the optimizer after that."
            )
    for (held, remedy), titles in stacked.items():
        remedy += f', of "rebased" with {unblocked.__name__} inside' if "blocks" in option_names(unblocked) else ""  # type: ignore[union-attr, arg-type]
        notes.append(
            f"{enumerated(titles)}: {held} side by side became one frame, and none of them is a frame by "
            f"itself; {remedy}; blocks=1 keeps one frame without this note."
        )
    return notes


_OWN_WAYS = {
    "max_norm": "which scales rows",
    "padding_idx": "whose row would be trained, and part of the frame",
    "sparse": "though all rows are of one frame, whose gradient is dense",
}
"""Options by which embeddings write to rows, or leave one out, with what they do."""
_GATES = {"LSTMCell": 4, "GRUCell": 3}
_CALLED = re.compile("qkv|query_key_value|kv_proj|to_kv|c_attn|gate_up")  # layers whose outputs are cut


def _weights(module: nn.Module, prefix: str = "", of_buffers: bool = False) -> list[WeightPath]:
    """Returns every parameter of a model, parametrized weight, and buffer if asked for, under each of its names."""
    module = inside_checkpoint(module)
    if isinstance(module, torch.jit.ScriptModule):
        return []
    children, places = held_modules(module), []
    parametrized = children.get("parametrizations")
    held = list(parametrized) if isinstance(parametrized, nn.ModuleDict) else []
    buffers = held_buffers(module) if of_buffers else {}
    for name, p in {**held_parameters(module), **buffers, **dict.fromkeys(held, module)}.items():
        if p is not None:
            places.append(WeightPath(prefix + name, module, name))
    for name, child in children.items():
        if child is not None and not (name == "parametrizations" and held):
            places += _weights(child, f"{prefix}{name}.", of_buffers)
    return places


def matches(name: str, pattern: str) -> bool:
    """Returns whether a name is a pattern, or is matched by it; * stands for any characters."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def nearest_of(name: object, names: Sequence[str], near: Sequence[str] = (), takes_patterns: bool = False) -> str:
    """Returns what `did_you_mean` says, or a name, or a pattern of names, with these parts: "*.q_proj.weight"."""
    for pattern in (f"{start}{name}{end}" for end in ("", ".weight", ".*") for start in ("", "*.") if name):
        met = [other for other in (*near, *names) if matches(other, pattern)]
        if met:
            return f'; did you mean "{pattern if takes_patterns and len(met) > 1 else met[0]}"?'
    return did_you_mean(name, names, near)


def _not_plain(place: WeightPath, what: str, remedy: str) -> OptionError:
    return OptionError(f"An orthogonal weight needs a plain parameter, got {place.title}, {what}; {remedy}.")


def _refuse_what_is_there(place: WeightPath) -> None:
    """Raises OptionError for a tensor of this name that is no parameter."""
    host, name = place.host, place.name
    held = held_parametrizations(host)
    if held is not None and name in held_modules(held):
        remedy = "sk.bake it first"
        if coordinate_list_of(host, name) is None:
            remedy = f"torch.nn.utils.parametrize.remove_parametrizations({place.expression}, {name!r}) first"
        raise _not_plain(place, "parametrized already", remedy)
    for hook in forward_pre_hooks(host).values():
        kind = type(hook).__module__.rpartition(".")[2]
        if kind in ("weight_norm", "spectral_norm") and getattr(hook, "name", None) == name:
            remedy = f"torch.nn.utils.remove_{kind}({place.expression}, {name!r}) first"
            raise _not_plain(place, f"under {kind}", remedy)
        if isinstance(hook, prune.BasePruningMethod) and pruned_name(hook) == name:
            raise _not_plain(place, "pruned", f"torch.nn.utils.prune.remove({place.expression}, {name!r}) first")
    for kind, holder, held in (("a buffer", "_buffers", held_buffers(host)), ("a tensor", "__dict__", vars(host))):
        if isinstance(held.get(name), Tensor):
            parameter = f"torch.nn.Parameter({place.expression}.{holder}.pop({name!r}))"
            raise _not_plain(place, kind, f"{place.expression}.{name} = {parameter} makes it one")
