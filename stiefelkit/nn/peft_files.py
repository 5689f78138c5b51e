"""Adapters in PEFT's files: OFT, BOFT and HRA are read as exact rotations, and written for PEFT to load."""

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stiefelkit._torch import held_modules
from stiefelkit.errors import CheckpointError, OptionError, needs, shown
from stiefelkit.files import checked_cast, free_place, importing, parse_tensors, read_file, read_json, whole_folder
from stiefelkit.nn.adapter import Adapter, OrthogonalAdapter, Replacement
from stiefelkit.nn.adapters import Site, TrainedCopy, base_state, put_on, replacements, sites_of, to_save
from stiefelkit.nn.frozen import attribute
from stiefelkit.nn.peft_formats import FORMATS, read, written
from stiefelkit.numbers import integer, one_of
from stiefelkit.weights.find import check_module

_CONFIG, _TENSORS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
_HEADS = ("classifier", "score", "qa_outputs")  # which PEFT adds to modules_to_save, by the task, for any model


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
    config, tensors = _files(folder)
    kind, sites = config["peft_type"], {site.name: site for site in sites_of(model)}
    places = Counter(id(child) for module in model.modules() for child in held_modules(module).values())
    of_base = f", of the base {config['base_model_name_or_path']}" if config.get("base_model_name_or_path") else ""
    with importing("load_peft", f"{folder}{of_base}"):
        groups, rest = _by_layer(tensors, kind)
        missing = [title for title in groups if title not in sites]
        needs(not missing, CheckpointError, "It", "the base that it is of", f"a model without {', '.join(missing[:3])}")
        whole = config.get("modules_to_save") or ()
        saved = _modules_to_save(model, sites, rest, [whole] if isinstance(whole, str) else whole)
        fresh = {id(sites[title].layer): sites[title] for title in groups}
        needs(len(fresh) == len(groups), CheckpointError, "It", "each layer once", "one by two names")
        for title, site in sites.items():
            is_adapted, kinds = _is_adapted(config, title), (*FORMATS[kind].keys.values(),)
            is_fit = is_adapted is not False if title in groups else not is_adapted or id(site.layer) in fresh
            got = f"{'some' if title in groups else 'none'} of {title}"
            wanted = "tensors of the layers of target_modules, exclude_modules and layers_to_transform"
            needs(is_fit or not isinstance(site.layer, kinds), CheckpointError, "It", wanted, got)
    for title in (*groups, *saved):
        around = sites[title].around
        is_once = places[id(around[0] if around else sites[title].layer)] < 2
        got = f"{title} in several, of which PEFT changes one"
        needs(is_once, OptionError, "load_peft", "layers in one place", got)
        is_free = all(other.name != name for other in around)
        needs(is_free, OptionError, "load_peft", "a name= that is free", f"{shown(name)}, which {title} has")

    def made(site: Site) -> OrthogonalAdapter:
        with importing("load_peft", f"{folder}, {site.name}{of_base}"), torch.no_grad():
            return read(kind, site.layer, name, groups[site.name], config)

    model = put_on(model, fresh, to_save(model, list(saved), name, fresh.values()), name, made)
    put = [(site.name, other) for site in sites_of(model) for other in site.around if other.name == name]
    for title, other in put:
        if isinstance(other, TrainedCopy) and title in saved:
            other.copy.load_state_dict(saved[title])
    distances = ((title, other.peft_distance) for title, other in put if isinstance(other, OrthogonalAdapter))
    if far := {title: distance for title, distance in distances if distance}:
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
    free_place("save_peft", folder)
    sites = list(sites_of(model))
    held = [(site, other) for site in sites for other in site.around if other.name == name]
    try:
        done = {site.name: written(other, site.name) for site, other in held if isinstance(other, Adapter)}
        config = _config({title: entries for title, (_, entries) in done.items()})
        contents = contents_of("save_peft", sites, held, {title: t for title, (t, _) in done.items()}, config)
    except OptionError as error:
        remedy = f"sk.nn.adapter_state(model, {name!r}) holds any adapter, and sk.nn.fold(model) makes a plain model"
        raise OptionError(f"{str(error).removesuffix('.')}; {remedy}.") from error
    write_files("save_peft", folder, *contents, base_model_name_or_path or attribute(model, "name_or_path"), task_type)


def write_files(
    who: str,
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    base: str | os.PathLike[str] | None,
    task_type: str | None,
) -> None:
    """Writes tensors, by the keys of a model without PEFT, and a configuration into a new folder that PEFT loads."""
    written_out = {_PREFIX + key: t.detach().cpu().clone().contiguous() for key, t in tensors.items()}
    with whole_folder(who, folder) as beside:
        entries = {**config, "base_model_name_or_path": os.fspath(base) if base else None, "task_type": task_type}
        text = json.dumps(entries, indent=2, sort_keys=True, allow_nan=False)
        save_file(written_out, beside / _TENSORS, metadata={"format": "pt"})
        (beside / _CONFIG).write_text(text, encoding="utf-8")


def contents_of(
    who: str,
    sites: Sequence[Site],
    held: Sequence[tuple[Site, Replacement]],
    done: Mapping[str, Mapping[str, Tensor]],
    config: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of adapted layers and of trained copies, and the configuration of PEFT for them."""
    is_inside = "" not in done and len({id(other) for _, other in held}) == len(held)
    needs(is_inside, OptionError, who, "layers inside a model, each in one place of it", "another")
    copies = {site.name: other.copy.state_dict() for site, other in held if isinstance(other, TrainedCopy)}
    # PEFT reads a list as ends of names, and a text as a pattern of whole names.
    ends = tuple(f".{title}" for title in done)
    is_end = any(site.name.endswith(ends) and site.name not in done for site in sites)
    target = "|".join(map(re.escape, done)) if is_end else list(done)
    for title in copies:
        others = [site.name for site in sites if site.name.endswith(title) and site.name != title]
        got = f"{title} and {', '.join(others)}"
        needs(not others, OptionError, who, "modules_to_save of which no name ends another", got)
    tensors = {f"{title}.{end}": t for title, of_layer in done.items() for end, t in of_layer.items()}
    tensors |= {f"{title}.{key}": t for title, state in copies.items() for key, t in state.items()}
    return tensors, {**config, "target_modules": target, "modules_to_save": sorted(copies) or None}


def _files(given: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the configuration, with the defaults of what is left out, and the tensors."""
    with importing("load_peft", given):
        folder = Path(given)
        hub = "huggingface_hub.snapshot_download(...) fetches one from the hub, and returns its folder"
        needs(folder.is_dir(), CheckpointError, "It", "to be a folder that PEFT saved into", f"another; {hub}")
        for file, remedy in ((_CONFIG, ""), (_TENSORS, "; PEFT's save_pretrained writes it in place of a .bin")):
            there = ", ".join(sorted(p.parent.name for p in folder.glob(f"*/{file}")))
            got = f"none{f'; adapters are in its folders {there}' if there else remedy}"
            needs((folder / file).is_file(), CheckpointError, "It", file, got)
    with importing("load_peft", folder / _CONFIG):
        config = read_json((folder / _CONFIG).resolve())  # of the hub's cache all files are links
        kind = str(config.get("peft_type"))
        needs(kind in FORMATS, CheckpointError, "It", f"a peft_type of {', '.join(FORMATS)}", shown(kind))
        sizes = dict.fromkeys(FORMATS[kind].sizes, (0, integer(0)))
        for key, (default, check) in {"bias": ("none", one_of("none")), **sizes, **FORMATS[kind].settings}.items():
            config[key] = check.require("It", key, config.get(key, default))
    with importing("load_peft", folder / _TENSORS):
        return config, parse_tensors(read_file((folder / _TENSORS).resolve()))


def _by_layer(tensors: Mapping[str, Tensor], kind: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Returns the tensors of each layer by the ends of their keys, and all others."""
    short = {key.removeprefix(_PREFIX): value for key, value in tensors.items()}
    needs(len(short) == len(tensors), CheckpointError, "It", f"each name once, with or without {_PREFIX}", "one twice")
    groups: dict[str, dict[str, Tensor]] = {}
    for key in [*short]:
        for end in FORMATS[kind].keys:
            if key.endswith(f".{end}"):
                groups.setdefault(key.removesuffix(f".{end}"), {})[end] = short.pop(key)
                break
    is_old = any(key.endswith(".oft_r") for key in short)
    remedy = ", but oft_r of PEFT before 0.16, which computes another function; merge_and_unload() there folds it"
    needs(len(groups) > 0, CheckpointError, "It", f"tensors of {kind}", f"none in {_TENSORS}{remedy if is_old else ''}")
    return groups, short


def _modules_to_save(
    model: nn.Module, sites: Mapping[str, Site], rest: Mapping[str, Tensor], patterns: Sequence[str]
) -> dict[str, dict[str, Tensor]]:
    """Returns the states of modules that are trained as a whole; other tensors must be those of the base."""
    saved: dict[str, dict[str, Tensor]] = {}
    base, ends = base_state(model), tuple(patterns)
    for key, value in rest.items():
        titles = [title for title in sites if title and key.startswith(f"{title}.") and title.endswith(ends)]
        if titles:
            title = max(titles, key=len)
            saved.setdefault(title, {})[key.removeprefix(f"{title}.")] = value
            continue
        there = base.get(key.replace(".base_layer.", "."), torch.tensor(torch.nan, device="cpu"))  # equal to none
        is_same = there.is_complex() == value.is_complex() and torch.equal(there.cpu(), value.to(there.dtype))
        wanted = "tensors of adapters, of modules_to_save and of the base"
        needs(is_same, CheckpointError, "It", wanted, f"{key} of {value.dtype} left over, which is not the model's")
    for title, state in saved.items():
        there = sites[title].layer.state_dict()
        for key in {**there, **state}:
            is_known, word = key in there and key in state, "missing" if key in there else "left over"
            needs(is_known, CheckpointError, title, "all of its tensors and no other", f"{key} {word}")
            state[key] = checked_cast(f"{title}.{key}", state[key], there[key].dtype, there[key].shape)
    inside = {id(inner) for title in saved for inner in sites[title].layer.modules()}
    for pattern in patterns:
        named = [site for site in sites.values() if site.name and site.name.endswith(pattern)]
        is_known = pattern in _HEADS or len(named) > 0
        needs(is_known, CheckpointError, "It", "modules_to_save that the base has", shown(pattern))
        for site in named:
            has_tensors = not site.layer.state_dict() or any(id(inner) in inside for inner in site.layer.modules())
            needs(has_tensors, CheckpointError, "It", "tensors of all modules_to_save", f"none of {site.name}")
    return saved


def _is_adapted(config: Mapping[str, Any], title: str) -> bool | None:
    """Returns whether PEFT adapts a layer of a name; None where a pattern says so: a stranger's may take for ever."""
    targets, excluded, layers = map(config.get, ("target_modules", "exclude_modules", "layers_to_transform"))
    layers = [layers] if isinstance(layers, int) else layers or []
    numbers = {int(part) for part in title.split(".")[:-1] if part.isdecimal()}

    def is_in(names: object) -> bool:
        return isinstance(names, list) and f".{title}".endswith(tuple(f".{name}" for name in names))

    if is_in(excluded) or (isinstance(targets, list) and not is_in(targets)) or (layers and numbers.isdisjoint(layers)):
        return False
    is_counted = not layers or (numbers <= {*layers} and re.match(r".*?\.[^.]*\.\d+\.", title))  # as PEFT counts
    is_saved = any(f".{name}." in f".{title}." for name in config.get("modules_to_save") or ())
    has_patterns = not isinstance(targets, list) or isinstance(excluded, str) or config.get("layers_pattern")
    return True if is_counted and not is_saved and not has_patterns else None


def _config(done: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the entries that all adapters have in common: one of their sizes, and all others."""
    first = next(iter(done.values()))
    sizes = FORMATS[first["peft_type"]].sizes
    for title, other in done.items():
        own = {key: value for key, value in other.items() if key not in sizes and first.get(key) != value}
        needs(not own, OptionError, "save_peft", "adapters that differ by sizes alone", f"{own} at {title}")
    common = [key for key in sizes if len({other[key] for other in done.values()}) == 1]
    got = f"{sorted({tuple(map(other.get, sizes)) for other in done.values()})}"
    needs(len(common) > 0, OptionError, "save_peft", f"one {' or '.join(sizes)} for all layers", got)
    return {"bias": "none", "inference_mode": True, **first, **{key: 0 for key in sizes if key != common[0]}}
