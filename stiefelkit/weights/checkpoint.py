"""The entries of one orthogonal weight in a state dict: description of its map, coordinates and chart."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from stiefelkit.contract import table
from stiefelkit.contract.composite import SideBySide
from stiefelkit.contract.param import OrthogonalParam, coordinate_dtypes, each_frame
from stiefelkit.contract.scaled import Scaled
from stiefelkit.contract.view import Viewed
from stiefelkit.errors import CheckpointError, NonFiniteError, needs, shown
from stiefelkit.metrics import frame_tolerance, orthogonality_error
from stiefelkit.tensors import full_tensor, local_part

EXTRA = "_extra_state"  # the key of a description in a state dict: torch's name for what is no tensor of the module
_FORMAT = 1
_LONGEST = 1 << 20  # bytes of a description that are read; those written have a few hundred
_WITHIN_THE_LAW = 1e4
"""Up to here the law of scale says that any coordinates give a frame; beyond, the weight itself is looked at."""
_SAVED_NAMES: dict[type, str] = {
    Scaled: "stiefelkit.parametrizations.scaled:Scaled",
    Viewed: "stiefelkit.parametrizations.viewed:Viewed",
    SideBySide: "stiefelkit.parametrizations._inner:SideBySide",
}
"""The names of wrappers in checkpoints. They stay when a class moves to another file."""
_FIXED = ("shape", "field")  # entries that no assignment changes
_REMEDY = "; to change it, load into the old kind of weight and assign that to the new one with sk.assign_"
_OF_A_MEAN = "; integers of a mean of state dicts need to be those of one of them, as they are"
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def _describe_map(param: OrthogonalParam) -> dict[str, Any]:
    """Returns name in the registry, class and version of a map and of those inside it."""
    cls = type(param)
    return {
        "name": table.registered.name_of(cls),
        "class": _SAVED_NAMES.get(cls, f"{cls.__module__}:{cls.__qualname__}"),
        "version": param.version,
        "inner": [_describe_map(child) for child in param.children() if isinstance(child, OrthogonalParam)],
    }


def describe(param: OrthogonalParam) -> dict[str, Any]:
    """Returns what a checkpoint says of a weight: the map, its version, field, shape, options and coordinates."""
    return {
        "format": _FORMAT,
        "map": _describe_map(param),
        "field": "complex" if param.is_complex else "real",
        "shape": list(param.shape),
        "options": param.options(),
        "coordinates": list(param.coordinates),
    }


def written(description: dict[str, Any]) -> list[int]:
    """Returns a description as checkpoints hold it: the bytes of its JSON."""
    return list(json.dumps(description).encode())


def read_description(state: Any, weight: str, own: Any = None) -> dict[str, Any] | None:
    """Returns what a checkpoint says of a weight, None if that is to the byte what the weight itself does."""
    why = _flaw(state)
    if why is None and (state.dtype != torch.uint8 or state.dim() != 1 or state.is_meta or len(state) > _LONGEST):
        why = f"{state.dtype} of shape {tuple(state.shape)} on {state.device}"
    if why is None:
        found = state.tolist()
        if own is not None and found == written(own):
            return None
        with contextlib.suppress(ValueError, RecursionError):
            description = json.loads(bytes(found).decode())
            if isinstance(description, dict):
                return description
    raise CheckpointError(
        f"{weight} needs a checkpoint that names its map, JSON in a uint8 tensor, got an unreadable entry"
        f"{f' ({why})' if why else ''}{_OF_A_MEAN if 'float' in (why or '') else ''}."
    )


def _check_description(theirs: dict[str, Any], ours: dict[str, Any], weight: str) -> None:
    for key, mine in ours.items():
        fits = _is_same_map(theirs.get(key), mine) if key == "map" else _is_same(theirs.get(key), mine)
        if not fits:
            raise CheckpointError(
                f"{weight} needs a checkpoint with {key} {in_words(mine)}, got {in_words(theirs.get(key))}"
                f"{'' if key in _FIXED else _REMEDY}."
            )


def _is_same(theirs: object, ours: object) -> bool:
    """Returns whether two values are written alike: 1, True and 1.0 are not."""
    try:
        return json.dumps(theirs, sort_keys=True) == json.dumps(ours, sort_keys=True)
    except (ValueError, RecursionError):
        return False


def _is_same_map(theirs: Any, ours: dict[str, Any]) -> bool:
    """Returns whether two descriptions mean one map: the class may move if the registered name stays."""
    if not isinstance(theirs, dict) or not _is_same(theirs.get("version"), ours["version"]):
        return False
    named = ours["name"] is not None and theirs.get("name") == ours["name"]
    inner = theirs.get("inner", [])
    return (
        (named or theirs.get("class") == ours["class"])
        and isinstance(inner, list)
        and len(inner) == len(ours["inner"])
        and all(_is_same_map(a, b) for a, b in zip(inner, ours["inner"], strict=True))
    )


def in_words(value: object, depth: int = 3) -> str:
    """Returns a map as "householder, version 1", anything else as Python writes it, in 200 characters at most."""
    if not (isinstance(value, dict) and "class" in value) or not depth:
        return shown(value, 200)
    title = f"{value.get('name') or value['class']!s:.200}, version {value.get('version')!s:.200}"
    held = value.get("inner")
    inner = [in_words(child, depth - 1) for child in held[:3]] if isinstance(held, list) else []
    return f"{title} ({'; '.join(inner)})" if inner else title


def check_state(
    param: OrthogonalParam,
    coordinates: Mapping[str, Tensor],
    state_dict: Mapping[str, Any],
    prefix: str,
    weight: str,
    assign: bool,
) -> bool:
    """Raises CheckpointError or NonFiniteError unless the entries under a prefix are of this map and can replace ours.

    Returns whether there is a description alone, as of a shared module that was saved under another of its names.
    """
    weight = "".join(prefix.removesuffix(".").rpartition("parametrizations.")[::2]) or weight
    if prefix + EXTRA not in state_dict:
        if not any(key.startswith(prefix) for key in state_dict):
            return False
        raise CheckpointError(
            f"{weight} needs a checkpoint that names its map (key {prefix + EXTRA}), got one without; "
            "load into torch's own parametrization, assign the weight with sk.assign_, and save again."
        )
    own, shapes = describe(param), param.coordinates
    described = read_description(state_dict[prefix + EXTRA], weight, own)
    if described is not None:
        _check_description(described, own, weight)
    buffers, values, choices = dict(param.named_buffers()), {}, {}
    own_keys = [(name, f"{prefix}original{i}", c, shapes[name]) for i, (name, c) in enumerate(coordinates.items())]
    chart = [(name, f"{prefix}0.{name}", choice, choice.shape) for name, choice in buffers.items()]
    if not any(key in state_dict for _, key, *_ in (*own_keys, *chart)):
        return bool(own_keys or chart)
    for found, entries in ((values, own_keys), (choices, chart)):
        for name, key, ours, shape in entries:
            what, may_be_meta = f"{weight} ({name})", assign or ours.is_meta
            found[name] = entry_of(state_dict.get(key), key, what, ours, tuple(shape), may_be_meta)
    for name in values.keys() & param.manifolds.keys():
        w = full_tensor(values[name])
        error, permitted = orthogonality_error(w).max(), frame_tolerance(w.shape[-1], w.dtype)
        if not w.is_meta and not error.item() <= permitted:
            wanted = f"orthonormal columns, ||W^H W - I||_F <= {permitted:.2g}, got {error.item():.2g}"
            remedy = "sk.functional.nearest_frame gives the nearest, to be assigned with sk.assign_"
            raise CheckpointError(f"{weight} ({name}) needs {wanted}; {remedy}.")
    if any([choice.is_meta for choice in choices.values()]):
        return False
    # Names of buffers in a map inside differ from those of the chart.
    names = {id(choice): name for name, choice in param.chart.items()}
    reason = param.check_chart({names[id(c)]: choices[name] for name, c in buffers.items()})
    if reason is not None:
        raise CheckpointError(f"{weight} needs {reason}, got a checkpoint with others.")
    _check_weight(param, values, choices, weight)
    return False


def _flaw(value: object) -> str | None:
    """Returns why something is no tensor that one may read entry by entry, in words; None if it is."""
    if not isinstance(value, Tensor):
        return "none" if value is None else type(value).__name__
    if is_lazy(value):
        return "an uninitialized parameter"
    if value.is_nested or value.is_quantized or value.layout != torch.strided:
        return "a nested tensor" if value.is_nested else "a quantized one" if value.is_quantized else str(value.layout)
    return None


def entry_of(value: Any, key: str, what: str, ours: Tensor, shape: tuple[int, ...], may_be_meta: bool) -> Tensor:
    """Returns the tensor under a key of a state dict if it can take the place of ours, whose shape is given."""
    flaw = _flaw(value)
    if flaw is not None:
        raise CheckpointError(f"{what} needs a dense tensor under the key {key}, got {flaw}.")
    if tuple(value.shape) != shape:
        raise CheckpointError(f"{what} needs shape {shape}, got {tuple(value.shape)}.")
    single, double = (torch.complex64, torch.complex128) if ours.is_complex() else (torch.float32, torch.float64)
    inexact = ours.is_floating_point() or ours.is_complex()
    if inexact and value.dtype not in (single, double):
        got = f"a checkpoint cast to {value.dtype}"
        remedy = "load it in the dtype that it was saved in, and cast the model after that; "
        remedy += "if that is lost, tensor.float() is a weight nearby"
        raise CheckpointError(f"{what} needs {single} or {double}, got {got}; {remedy}.")
    if not inexact and value.dtype not in _INTEGERS:
        raise CheckpointError(f"{what} needs integers, got {value.dtype}{_OF_A_MEAN}.")
    if value.is_meta:
        needs(may_be_meta, CheckpointError, what, "values, or assign=True", "a tensor on the meta device")
        return value
    local = local_part(value)
    if not torch.isfinite(local).all():
        raise NonFiniteError(f"{what} needs finite coordinates, got NaN or infinity.")
    if inexact and not torch.isfinite(local.to(ours.dtype)).all():
        largest = local.abs().max().item()
        raise NonFiniteError(f"{what} needs coordinates that {ours.dtype} holds, got one of modulus {largest:.2g}.")
    return value


@torch.no_grad()
def _check_weight(param: OrthogonalParam, values: dict[str, Tensor], chart: dict[str, Tensor], weight: str) -> None:
    """Raises NonFiniteError or CheckpointError where coordinates beyond the law of scale make no frame."""
    if any([value.is_meta for value in values.values()]):
        return
    gathered = {name: full_tensor(value) for name, value in values.items()}
    largest = max((c.abs().max().item() for c in gathered.values() if c.numel()), default=0.0)
    if largest <= _WITHIN_THE_LAW:
        return
    device, dtypes = next(iter(gathered.values())).device, coordinate_dtypes(param)
    cast = tuple(c.to(device=device, dtype=dtypes[name]) for name, c in gathered.items())
    w = torch.func.functional_call(param, {name: choice.to(device) for name, choice in chart.items()}, cast)
    for frames in each_frame(param.frames(w)):
        error = orthogonality_error(frames).max().item()
        bound = max(param.error_bound(*cast), frame_tolerance(frames.shape[-1], frames.dtype))
        if not error <= bound:
            kind = CheckpointError if error < float("inf") else NonFiniteError
            raise kind(
                f"{weight} needs coordinates whose weight is a frame, ||W^H W - I||_F <= {bound:.2g}, got some of "
                f"modulus {largest:.2g} that give {error:.2g}."
            )
