"""Adapters in PEFT's files: OFT, BOFT and HRA are read as exact rotations, and written for PEFT to load."""

import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stiefelkit.errors import CheckpointError, OptionError, StiefelkitError, needs, shown
from stiefelkit.nn.adapter import Adapter, OrthogonalAdapter
from stiefelkit.nn.adapters import Site, TrainedCopy, base_state, put_on, replacements, sites_of, to_save
from stiefelkit.nn.peft_formats import FORMATS, AdapterSpec, Written, read, written
from stiefelkit.weights.find import check_module

_CONFIG, _TENSORS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


def load_peft(model: nn.Module, folder: str | os.PathLike[str], name: str = "default") -> nn.Module:
    """Puts the adapters that PEFT saved into a folder onto a model, as exact rotations, and returns the model.

    OFT becomes `OrthogonalAdapter` with Cayley transforms, HRA the same with reflectors, BOFT `ButterflyAdapter`;
    modules of `modules_to_save` become trained copies. What PEFT computes exactly is computed here too, to rounding. A
    Neumann series (`use_cayley_neumann`, PEFT's default) is no rotation: the nearest one is loaded, a warning gives the
    distance, and `adapter.peft_distance` that of each adapter, 0 for all others. If a file, a layer or a tensor does
    not fit, nothing is changed.

    Args:
        model: the base model, without PEFT around it.
        folder: with adapter_config.json and adapter_model.safetensors.
        name: by which the adapters are switched, saved and deleted.
    """
    check_module(model, "load_peft")
    is_base = not any(cls.__name__ == "PeftModel" and cls.__module__.startswith("peft.") for cls in type(model).__mro__)
    needs(is_base, OptionError, "load_peft", "the base model", f"{type(model).__name__}; model.unload() gives its base")
    config, tensors = _files(Path(folder))
    kind, sites = config["peft_type"], {site.name: site for site in sites_of(model)}
    groups, rest = _by_layer(tensors, kind)
    needs(len(groups) > 0, CheckpointError, "load_peft", f"tensors of {kind}", f"none in {_TENSORS}")
    base = config.get("base_model_name_or_path")
    of_base = f"; the file is of the base {shown(base)}" if base else ""
    missing = [title for title in groups if title not in sites]
    got = f"a model without {', '.join(missing[:3])}{of_base}"
    needs(not missing, CheckpointError, "load_peft", "the base that the file is of", got)
    specs: dict[int, AdapterSpec] = {}
    for title, found in groups.items():
        layer = _free_site(sites, title, name).layer
        try:
            specs[id(layer)] = read(kind, layer, found, config)
        except StiefelkitError as error:
            raise CheckpointError(f"load_peft at {title}: {str(error).removesuffix('.')}{of_base}.") from error
    saved = _modules_to_save(model, sites, rest, config.get("modules_to_save") or (), name)
    fresh = {id(sites[title].layer): sites[title] for title in groups}
    copies = to_save(model, list(saved), name, fresh.values())
    model = put_on(model, fresh, copies, name, lambda site: specs[id(site.layer)].made(site.layer, name))
    far: dict[str, float] = {}
    for site in sites_of(model):
        for other in site.around:
            if other.name == name and isinstance(other, TrainedCopy) and site.name in saved:
                other.copy.load_state_dict(saved[site.name])
            elif other.name == name and isinstance(other, OrthogonalAdapter) and other.peft_distance:
                far[site.name] = other.peft_distance
    if far:
        worst = max(far, key=far.__getitem__)
        warnings.warn(
            f"load_peft loaded the nearest rotations of {len(far)} layers, for which PEFT computes a Neumann series of "
            f"{config['num_cayley_neumann_terms']} terms: up to {far[worst]:.2g} apart in the Frobenius norm, at "
            f"{worst}; adapter.peft_distance has each.",
            stacklevel=2,
        )
    return model


def save_peft(
    model: nn.Module,
    folder: str | os.PathLike[str],
    name: str = "default",
    *,
    base_model_name_or_path: str | None = None,
    task_type: str | None = None,
) -> None:
    """Writes the adapters of a name, and copies of `modules_to_save`, into a folder that PEFT loads.

    `PeftModel.from_pretrained(base, folder)` computes what the model does with these adapters, to rounding. The files
    are written into a folder beside it, which is renamed when they are complete.

    Args:
        model: a model with adapters.
        folder: empty, or not there.
        name: of the adapters.
        base_model_name_or_path: what PEFT's configuration says of the base; the model's `name_or_path` if left out.
        task_type: as in PEFT's configuration, "CAUSAL_LM" for instance.
    """
    replacements(model, "save_peft", name)
    place = Path(folder)
    is_free = not place.exists() or (place.is_dir() and not any(place.iterdir()))
    needs(is_free, OptionError, "save_peft", "a folder that is empty or not there", shown(str(folder), 300))
    try:
        tensors, config = _contents(list(sites_of(model)), name)
    except OptionError as error:
        raise OptionError(
            f"{str(error).removesuffix('.')}; sk.nn.adapter_state(model, {name!r}) holds any adapter, and "
            "sk.nn.fold(model) makes a plain model."
        ) from error
    config["base_model_name_or_path"] = base_model_name_or_path or getattr(model, "name_or_path", None) or None
    config["task_type"] = task_type
    written_out = {_PREFIX + key: t.detach().cpu().clone().contiguous() for key, t in tensors.items()}
    beside = place.parent / f".{place.name}.{uuid.uuid4().hex}"
    try:
        beside.mkdir(parents=True)
        save_file(written_out, beside / _TENSORS, metadata={"format": "pt"})
        (beside / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        if place.exists():
            place.rmdir()
        beside.rename(place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _contents(sites: Sequence[Site], name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of adapters of a name and of trained copies, and the configuration of PEFT for them."""
    held = [(site, other) for site in sites for other in site.around if other.name == name]
    done: dict[str, Written] = {}
    for site, other in held:
        if isinstance(other, Adapter):
            try:
                done[site.name] = written(other)
            except OptionError as error:
                raise OptionError(f"{str(error).removesuffix('.')}, at {site.name or 'the model itself'}.") from error
    is_inside = "" not in done and len({id(other) for _, other in held}) == len(held)
    needs(is_inside, OptionError, "save_peft", "layers inside a model, each in one place of it", "another")
    copies = {site.name: other.copy.state_dict() for site, other in held if isinstance(other, TrainedCopy)}
    # PEFT reads a list as ends of names, and a text as a pattern of whole names.
    ends = tuple(f".{title}" for title in done)
    is_end = any(site.name.endswith(ends) and site.name not in done for site in sites)
    target = "|".join(map(re.escape, done)) if is_end else list(done)
    config = _config(done) | {"target_modules": target, "modules_to_save": sorted(copies) or None}
    for title in copies:
        others = [site.name for site in sites if site.name.endswith(title) and site.name != title]
        got = f"{title} and {', '.join(others)}"
        needs(not others, OptionError, "save_peft", "modules_to_save of which no name ends another", got)
    tensors = {f"{title}.{end}": t for title, w in done.items() for end, t in w.tensors.items()}
    tensors |= {f"{title}.{key}": t for title, state in copies.items() for key, t in state.items()}
    return tensors, config


def _files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the configuration, with the defaults of what is left out, and the tensors."""
    hub = "is missing; huggingface_hub.snapshot_download(...) fetches one from the hub, and returns the folder"
    got = f"{shown(str(folder), 300)}, which {'is a file; give its folder' if folder.exists() else hub}"
    needs(folder.is_dir(), CheckpointError, "load_peft", "a folder that PEFT saved into", got)
    for file, remedy in ((_CONFIG, ""), (_TENSORS, "; PEFT's save_pretrained writes it in place of a .bin")):
        there = ", ".join(sorted(p.parent.name for p in folder.glob(f"*/{file}")))
        got = f"{shown(str(folder), 300)} without{f'; adapters are in its folders {there}' if there else remedy}"
        needs((folder / file).is_file(), CheckpointError, "load_peft", file, got)
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / _TENSORS)
    except (ValueError, OSError, SafetensorError) as error:
        raise CheckpointError(
            f"load_peft needs whole files, got {shown(str(folder), 300)}: {str(error).removesuffix('.')}."
        ) from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in FORMATS:
        raise CheckpointError(f"load_peft needs a peft_type of {', '.join(FORMATS)}, got {shown(kind)}.")
    config = {"bias": "none", "modules_to_save": None, **FORMATS[kind].settings, **config}
    needs(config["bias"] == "none", CheckpointError, "load_peft", 'bias="none"', shown(config["bias"]))
    for key, default in FORMATS[kind].settings.items():
        kinds = (int, float) if type(default) is float else (type(default),)
        needs(type(config[key]) in kinds, CheckpointError, "load_peft", f"{key} as in {default!r}", shown(config[key]))
    return config, tensors


def _by_layer(tensors: Mapping[str, Tensor], kind: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Returns the tensors of each layer by the ends of their keys, and all others."""
    groups: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    for key, value in tensors.items():
        short = key.removeprefix(_PREFIX)
        end = next((end for end in FORMATS[kind].keys if short.endswith(f".{end}")), None)
        if end is None:
            rest[short] = value
        else:
            groups.setdefault(short.removesuffix(f".{end}"), {})[end] = value
    return groups, rest


def _free_site(sites: Mapping[str, Site], title: str, name: str) -> Site:
    is_free = all(other.name != name for other in sites[title].around)
    needs(is_free, OptionError, "load_peft", "a name= that is free", f"{shown(name)}, which {title} has")
    return sites[title]


def _modules_to_save(
    model: nn.Module, sites: Mapping[str, Site], rest: Mapping[str, Tensor], patterns: Sequence[str], name: str
) -> dict[str, dict[str, Tensor]]:
    """Returns the states of modules that are trained as a whole; other tensors must be those of the base."""
    saved: dict[str, dict[str, Tensor]] = {}
    base = base_state(model)
    for key, value in rest.items():
        titles = [s for s in sites if s and key.startswith(f"{s}.") and any(s.endswith(p) for p in patterns)]
        if titles:
            title = max(titles, key=len)
            saved.setdefault(title, {})[key.removeprefix(f"{title}.")] = value
            continue
        plain = key.replace(".base_layer.", ".")
        is_same = plain in base and torch.equal(base[plain].cpu(), value)
        got = f"{key} left over, which is not the model's"
        needs(is_same, CheckpointError, "load_peft", "tensors of adapters and of modules_to_save", got)
    for title, state in saved.items():
        wanted = _free_site(sites, title, name).layer.state_dict()
        for key in [*wanted, *state]:
            there, got = ("none" if s is None else tuple(s.shape) for s in (wanted.get(key), state.get(key)))
            shape = f"{title}.{key} of the shape in the model, {there}"
            needs(there == got, CheckpointError, "load_peft", shape, f"{got} in the file")
    return saved


def _config(done: Mapping[str, Written]) -> dict[str, Any]:
    """Returns the configuration that all adapters have in common."""
    first = next(iter(done.values()))
    for title, other in done.items():
        is_same = (other.kind, other.settings) == (first.kind, first.settings)
        got = f"{other.kind} with {other.settings} at {title}, and {first.kind} with {first.settings}"
        needs(is_same, OptionError, "save_peft", "adapters that differ by sizes alone", got)
    keys = FORMATS[first.kind].sizes
    common = [i for i in range(len(keys)) if len({other.sizes[i] for other in done.values()}) == 1]
    got = f"{sorted({other.sizes for other in done.values()})}"
    needs(len(common) > 0, OptionError, "save_peft", f"one {' or '.join(keys)} for all layers", got)
    chosen = {key: first.sizes[i] if i == common[0] else 0 for i, key in enumerate(keys)}
    return {"peft_type": first.kind, "bias": "none", "inference_mode": True, **first.settings, **chosen}
