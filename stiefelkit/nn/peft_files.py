"""Adapters in PEFT's files: OFT, BOFT and HRA are read as exact rotations, and written for PEFT to load."""

import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stiefelkit.errors import CheckpointError, OptionError, StiefelkitError, shown
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
    distance, and `adapter.peft_distance` that of each adapter, 0 for all others.

    Args:
        model: the base model, without PEFT around it.
        folder: with adapter_config.json and adapter_model.safetensors.
        name: by which the adapters are switched, saved and deleted.

    Raises:
        CheckpointError: a file is missing or damaged, the method or a setting is another, a layer is not in the model,
            or a tensor has the wrong shape or values.
        DtypeError, OptionError: as `adapt`. Nothing is changed then.
    """
    check_module(model, "load_peft")
    if any(cls.__name__ == "PeftModel" and cls.__module__.startswith("peft.") for cls in type(model).__mro__):
        raise OptionError(
            f"load_peft needs the base model, got {type(model).__name__}; use model.unload(), the base without the "
            "layers of PEFT, which get_base_model() keeps."
        )
    config, tensors = _files(Path(folder))
    kind, sites = config["peft_type"], {site.name: site for site in sites_of(model)}
    groups, rest = _by_layer(tensors, kind)
    if not groups:
        raise CheckpointError(f"load_peft needs tensors of {kind}, got none in {_TENSORS}.")
    base = config.get("base_model_name_or_path")
    of_base = f"; the file is of the base {shown(base)}" if base else ""
    _check_base(sites, groups, of_base)
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

    Raises:
        UnknownNameError: no adapter of the model has this name.
        OptionError: PEFT has no format for one of the adapters, or for all of them together; or the folder has files.
    """
    replacements(model, "save_peft", name)
    place = Path(folder)
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise OptionError(f"save_peft needs a folder that is empty or not there, got {shown(str(folder), 300)}.")
    try:
        tensors, config = _contents(list(sites_of(model)), name)
    except OptionError as error:
        raise OptionError(
            f"{str(error).removesuffix('.')}; sk.nn.adapter_state(model, {name!r}) holds any adapter, and "
            "sk.nn.fold(model) makes a plain model, both to be saved without PEFT."
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
    if "" in done or len({id(other) for _, other in held}) < len(held):
        raise OptionError("save_peft needs layers inside a model, each in one place of it, as PEFT does, got another.")
    copies = {site.name: other.copy.state_dict() for site, other in held if isinstance(other, TrainedCopy)}
    config = _config(done) | {"target_modules": _target(list(done), sites), "modules_to_save": sorted(copies) or None}
    for title in copies:
        others = [site.name for site in sites if site.name.endswith(title) and site.name != title]
        if others:
            raise OptionError(
                f"save_peft needs modules_to_save of which no name ends another, got {title} and {others[0]}."
            )
    tensors = {f"{title}.{end}": t for title, w in done.items() for end, t in w.tensors.items()}
    tensors |= {f"{title}.{key}": t for title, state in copies.items() for key, t in state.items()}
    return tensors, config


def _files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the configuration, with the defaults of what is left out, and the tensors."""
    if not folder.is_dir():
        hub = "huggingface_hub.snapshot_download(...) fetches one from the hub, and returns the folder"
        got = "which is a file; give its folder" if folder.exists() else f"which is missing; {hub}"
        raise CheckpointError(f"load_peft needs a folder that PEFT saved into, got {shown(str(folder), 300)}, {got}.")
    for file in (_CONFIG, _TENSORS):
        if not (folder / file).is_file():
            there = sorted(p.parent.name for p in folder.glob(f"*/{_CONFIG}"))
            remedy = f"; adapters are in its folders {', '.join(there)}" if there else ""
            remedy = "; PEFT's save_pretrained writes it in place of a .bin" if file == _TENSORS else remedy
            raise CheckpointError(f"load_peft needs {file}, got {shown(str(folder), 300)} without{remedy}.")
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
    if config["bias"] != "none":
        raise CheckpointError(f'load_peft needs bias="none", got {shown(config["bias"])}: biases stay frozen here.')
    for key, default in FORMATS[kind].settings.items():
        kinds = (int, float) if type(default) is float else (type(default),)
        if type(config[key]) not in kinds:
            raise CheckpointError(f"load_peft needs {key} as in {default!r}, got {shown(config[key])}.")
    names = config["modules_to_save"]
    if not (names is None or (isinstance(names, list) and all(isinstance(n, str) for n in names))):
        raise CheckpointError(f"load_peft needs modules_to_save as a list of names, got {shown(names)}.")
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


def _check_base(sites: Mapping[str, Site], titles: Iterable[str], remedy: str) -> None:
    """Raises CheckpointError if a layer is not in the model, with the module inside or around it that has all."""
    missing = [title for title in titles if title not in sites]
    if not missing:
        return
    first, more = missing[0], f" and {len(missing) - 1} more of its layers" if len(missing) > 1 else ""
    for site in sites:
        inner, outer = site.removesuffix(f".{first}"), first.removesuffix(f".{site}")
        if inner != site and all(f"{inner}.{title}" in sites for title in titles):
            remedy = f"; model.get_submodule({inner!r}) has them{remedy}"
        if outer != first and all(title.removeprefix(f"{outer}.") in sites for title in titles):
            remedy = f"; the file is of a model that has this one as {outer!r}{remedy}"
    raise CheckpointError(
        f"load_peft needs the base that the file is of, got a model without the layer {first}{more}{remedy}."
    )


def _free_site(sites: Mapping[str, Site], title: str, name: str) -> Site:
    """Returns the layer of a name."""
    if any(other.name == name for other in sites[title].around):
        raise OptionError(
            f"load_peft needs a name that is free, got {shown(name)}, which {title} has; name= is another."
        )
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
        if plain not in base or not torch.equal(base[plain].cpu(), value):
            raise CheckpointError(
                f"load_peft needs tensors of adapters and of modules_to_save, got {key} left over, which is not the "
                "model's."
            )
    for title, state in saved.items():
        wanted = _free_site(sites, title, name).layer.state_dict()
        for key in [*wanted, *state]:
            needs, got = ("none" if s is None else tuple(s.shape) for s in (wanted.get(key), state.get(key)))
            if needs != got:
                raise CheckpointError(
                    f"load_peft needs {title}.{key} of the shape in the model, {needs}, got {got} in the file."
                )
    return saved


def _config(done: Mapping[str, Written]) -> dict[str, Any]:
    """Returns the configuration that all adapters have in common."""
    first = next(iter(done.values()))
    for title, other in done.items():
        if (other.kind, other.settings) != (first.kind, first.settings):
            raise OptionError(
                f"save_peft needs adapters that differ by sizes alone, as one configuration has them, got "
                f"{other.kind} with {other.settings} at {title}, and {first.kind} with {first.settings}."
            )
    keys = FORMATS[first.kind].sizes
    common = [i for i in range(len(keys)) if len({other.sizes[i] for other in done.values()}) == 1]
    if not common:
        sizes = {other.sizes for other in done.values()}
        raise OptionError(f"save_peft needs one {' or '.join(keys)} for all layers, got {sorted(sizes)}.")
    chosen = {key: first.sizes[i] if i == common[0] else 0 for i, key in enumerate(keys)}
    return {"peft_type": first.kind, "bias": "none", "inference_mode": True, **first.settings, **chosen}


def _target(titles: list[str], sites: Sequence[Site]) -> list[str] | str:
    """Returns PEFT's target_modules: names, or a pattern of them if a name ends another's."""
    ends = tuple(f".{title}" for title in titles)
    if any(site.name.endswith(ends) for site in sites if site.name not in titles):
        return "|".join(map(re.escape, titles))
    return titles
