"""Rotated decoders as plain files beside compressed-tensors' `transform_config`, for what quantizes and serves them."""

import copy
import json
import os
from typing import Any

import torch
from torch import nn

from stiefelkit.errors import OptionError, needs, shown
from stiefelkit.files import whole_folder
from stiefelkit.functional import hadamard_transform
from stiefelkit.nn.decoders import rotation_sites
from stiefelkit.nn.frozen import attribute
from stiefelkit.nn.key_rotation import KeyRotation
from stiefelkit.nn.linear import HadamardLinear
from stiefelkit.nn.rotation import rotate_
from stiefelkit.tensors import working_dtype

_CONFIG = "transform_config"


def save_transforms(model: Any, folder: str | os.PathLike[str]) -> None:
    """Writes a rotated decoder into a folder of `save_pretrained`, with its online transforms in the configuration.

    Rotations of the stream and of heads (R1, R2) are in the weights. An online transform (R4) is an entry of
    `transform_config` in config.json, in the words of compressed-tensors: the Hadamard matrix on the inputs of down
    projections, and its inverse on their weights. The weights in the file are those without it, worked out in float64
    and rounded once, so that whoever loads the file computes what the model does: a plain `from_pretrained` without
    the transforms, and with them `compressed_tensors.transform.apply_transform_config(model, TransformConfig(**entry))`
    or `load_transforms`. Servers that read `quantization_config` alone see a plain model. The folder is written whole,
    or not at all.

    Args:
        model: a model of transformers, after `rotate_` or `Rotated.fold`.
        folder: empty, or not there.

    Refused is what no plain load computes, as layer norms that became root mean squares, and adapters; and what
    compressed-tensors has no word for: Hadamard matrices whose order is no power of two, other layers than `nn.Linear`,
    and rotated keys (R3), whose queries alone its 0.20 rotates in models of transformers 5.24.
    """
    is_theirs = any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__)
    needs(is_theirs, OptionError, "save_transforms", "a model of transformers", type(model).__name__)
    is_free = not any(isinstance(module, KeyRotation) for module in model.modules())
    needs(is_free, OptionError, "save_transforms", "keys as they are", "rotated ones; restore_keys_ first")
    online = {name: m for name, m in model.named_modules() if isinstance(m, HadamardLinear)}
    for name, layer in online.items():
        n = layer.in_features
        wanted = "Hadamard matrices of a power of two, as compressed-tensors has"
        got = f"{name} with {n} inputs, block={layer.options['block']} and order={layer.options['order']}"
        is_known = n & (n - 1) == 0 and not any(layer.options.values())
        needs(is_known, OptionError, "save_transforms", wanted, got)
    _check_plain(model, online)
    state = {key: t for key, t in model.state_dict().items() if key.removesuffix(".hadamard") not in online}
    for name, layer in online.items():
        w = layer.weight.detach()
        state[f"{name}.weight"] = hadamard_transform(w.to(working_dtype(w.dtype))).to(w.dtype)
    is_double = any(layer.weight.dtype == torch.float64 for layer in online.values())
    groups = {"R4": _group(list(online), "float64" if is_double else "float32")} if online else {}
    with whole_folder("save_transforms", folder) as beside:
        model.save_pretrained(beside, state_dict=state)
        file = beside / "config.json"
        entries = json.loads(file.read_text(encoding="utf-8")) | {_CONFIG: {"config_groups": groups}}
        entries.pop("stiefelkit_online", None)  # which says that the weights are transformed
        file.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.no_grad()
def load_transforms(model: nn.Module) -> nn.Module:
    """Rotates a model as the `transform_config` of its file says, and returns it: `save_transforms` the other way.

    Args:
        model: a decoder as `from_pretrained` loaded it from the folder; its down projections become `HadamardLinear`,
            and the entry of its configuration goes, so that nothing applies it again.
    """
    config = attribute(model, "config")
    given = attribute(config, _CONFIG)
    groups = given.get("config_groups") if isinstance(given, dict) else None
    got = "none; rotate_ rotates any decoder" if given is None else shown(given)
    needs(groups is not None, OptionError, "load_transforms", f"a model whose configuration has a {_CONFIG}", got)
    sites, names = rotation_sites(model), {id(m): name for name, m in model.named_modules()}
    downs = [names[id(layer)] for layer in sites.downs]
    known = [{}, *({"R4": _group(downs, dtype)} for dtype in ("float32", "float64"))]
    wanted = "no transform, or R4 of all down projections, as save_transforms writes them"
    needs(groups in known, OptionError, "load_transforms", wanted, shown(groups, 300))
    if groups:
        rotate_(sites=sites, online=True)
    delattr(config, _CONFIG)
    return model


def _group(targets: list[str], dtype: str) -> dict[str, Any]:
    """Returns a scheme of compressed-tensors: a Hadamard matrix on the inputs of layers, its inverse on their weights.

    All entries are there, as a program writes them that reads and writes the file again.
    """
    places = (("input", False), ("weight_input", True))
    apply = [{"targets": targets, "location": at, "inverse": inverse, "ignore": []} for at, inverse in places]
    of_type = {"type": "hadamard", "randomize": False, "requires_grad": False, "head_dim": None}
    return {**of_type, "precision": f"torch.{dtype}", "apply": apply}


def _check_plain(model: Any, online: dict[str, HadamardLinear]) -> None:
    """Raises OptionError unless the class makes the same modules of the configuration, so that a plain load does."""
    with torch.device("meta"):
        fresh = type(model)(copy.deepcopy(model.config))
    inside = tuple(f"{name}." for name in online)
    kinds = {name: nn.Linear if name in online else type(m) for name, m in model.named_modules()}
    kinds = {name: kind for name, kind in kinds.items() if not name.startswith(inside)}
    plain = {name: type(m) for name, m in fresh.named_modules()}
    for name in {**kinds, **plain}:
        has, makes = (of.get(name, type(None)).__name__ for of in (kinds, plain))
        got = f"{has} at {name}, where {type(model).__name__} of its configuration has {makes}"
        is_same = kinds.get(name) is plain.get(name)
        needs(is_same, OptionError, "save_transforms", "modules that a plain load makes", got)
    for key in model.state_dict().keys() ^ fresh.state_dict().keys():
        is_known = key.removesuffix(".hadamard") in online
        needs(is_known, OptionError, "save_transforms", "the keys of a plain load", f"{key} missing or left over")
