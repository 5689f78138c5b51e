"""Hundreds of damaged folders of PEFT: each is loaded to finite numbers, or refused in a line that names its file.

Bytes of both files are damaged, entries of the configuration, and tensors: names, dtypes, shapes and numbers.
STIEFELKIT_MUTATIONS sets how many there are of each method and file.
"""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from file_mutations import MUTATIONS, Draw, mutated, put
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.errors import CheckpointError, OptionError, StiefelkitError
from stiefelkit.nn import peft_files
from stiefelkit.testing.seeds import seed

COUNT = int(os.environ.get("STIEFELKIT_MUTATIONS", "40"))
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
METHODS: dict[str, dict[str, Any]] = {
    "OFT": {"block_size": 4},
    "COFT": {"block_size": 4, "shared": True, "bound": 0.5},
    "BOFT": {"parametrization": "butterfly", "block_size": 2, "factors": 2},
    "HRA": {"parametrization": "householder", "reflections": 2},
}
DTYPES = (torch.float64, torch.float16, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn)
NUMBERS = (float("nan"), float("inf"), 1e300, 1e30, 0.0, -1.0)


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(6, 3))


@pytest.fixture(params=METHODS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = sk.nn.adapt(net(), ["0", "1"], **METHODS[request.param], modules_to_save="2")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * p.requires_grad)
    sk.nn.save_peft(model, tmp_path / "peft")
    return tmp_path / "peft"


def damaged_tensors(path: Path, draw: Draw) -> str:
    """Changes one tensor of a file, and returns how."""
    tensors = load_file(path)
    key = draw.choice(sorted(tensors))
    t = tensors.pop(key)
    other = draw.choice([key.removeprefix("base_model.model."), f"{key}x", key.replace("0", "1"), "base_model.model."])
    dtype, number = draw.choice(DTYPES), draw.choice(NUMBERS)
    changes: dict[str, dict[str, Tensor]] = {
        "dropped": {},
        "renamed": {other: t},
        "doubled": {key: t, other: t + 1},
        f"made {dtype}": {key: t.to(dtype)},
        f"filled with {number}": {key: torch.full_like(t, number, dtype=torch.float64)},
        "with one number changed": {key: t.double().view(-1).index_fill(0, torch.tensor(0), number).view_as(t)},
        "cut": {key: t[:-1].clone()},
        "flat": {key: t.flatten()},
        "empty": {key: t.new_zeros(0)},
    }
    how = draw.choice(sorted(changes))
    save_file({**tensors, **changes[how]}, path)
    return f"{key} {how}"


def fault_of(folder: Path) -> str:
    """What is wrong about loading a folder, if anything."""
    model = net()
    state = copy.deepcopy(model.state_dict())
    try:
        loaded = sk.nn.load_peft(model, folder)
    except (CheckpointError, OptionError) as error:
        is_same = all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        if not is_same or not all(p.requires_grad for p in model.parameters()):
            return "something changed"
        return "" if str(folder) in str(error) and len(str(error).splitlines()) == 1 else f"no sentence: {error}"
    except (Exception, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    if not all(torch.equal(value, state[key]) for key, value in sk.nn.base_state(loaded).items()):
        return "another base"
    if not all(value.isfinite().all() for value in loaded.state_dict().values()):
        return "not finite"
    if any(drift.bits_lost > 2 for drift in sk.drift(loaded).values()):
        return "no frame"
    is_moderate = all(value.abs().max() < 1e15 for value in loaded.state_dict().values())
    return "not finite" if is_moderate and not loaded(torch.ones(2, 8)).isfinite().all() else ""


@pytest.mark.filterwarnings("ignore:load_peft loaded the nearest rotations")
@pytest.mark.parametrize("file", [CONFIG, TENSORS, "tensors"])
def test_damaged_folders_are_refused_or_loaded_to_finite_numbers(saved: Path, file: str):
    draw, failures = Draw(seed(1)), []
    path = saved / (TENSORS if file == "tensors" else file)
    original = path.read_bytes()
    of_bytes = [name for name in MUTATIONS if "key" not in name and "changed" not in name]
    for _ in range(COUNT):
        if file == "tensors":
            name = damaged_tensors(path, draw)
        elif file == CONFIG:
            name, damaged = mutated(original, draw)
            put(path, damaged)
        else:
            name = draw.choice(of_bytes)
            put(path, MUTATIONS[name](original, draw))
        if fault := fault_of(saved):
            failures.append(f"{fault}: {name}")
        if path.is_dir():
            path.rmdir()
        path.write_bytes(original)
    assert fault_of(saved) == ""
    assert not failures, "\n".join(failures[:50])


@pytest.mark.parametrize("saved", ["OFT"], indirect=True)
def test_the_trial_sees_what_is_silent_and_what_is_raw(saved: Path, monkeypatch: pytest.MonkeyPatch):
    """The saboteurs: an import that checks no numbers, and one that breaks."""
    tensors = load_file(saved / TENSORS)
    save_file({key: value / (".2." not in key) for key, value in tensors.items()}, saved / TENSORS)
    assert fault_of(saved) == ""

    class Bug(Exception):
        pass

    def broken(*_: Any) -> Tensor:
        raise Bug

    for check in (lambda _, value, *__: value, broken):
        monkeypatch.setattr(peft_files, "checked_cast", check)
        monkeypatch.setattr("stiefelkit.nn.peft_formats.checked_cast", check)
        assert fault_of(saved)


HEAD = {"modules_to_save": ["2"]}
LOADED_BEFORE: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "numbers beyond the layer's": ({}, {"0.oft_R.weight": torch.full((2, 6), 1e300, dtype=torch.float64)}),
    "NaN of a module": (HEAD, {"2.weight": torch.full((3, 6), torch.nan), "2.bias": torch.ones(3)}),
    "a complex module": (HEAD, {"2.weight": torch.ones(3, 6, dtype=torch.complex64), "2.bias": torch.ones(3)}),
    "many terms": ({"use_cayley_neumann": True, "num_cayley_neumann_terms": 100_000}, {}),
    "a bound without end": ({"coft": True, "eps": 1e300}, {}),
    "one layer by two names": ({}, {"base_model.model.0.oft_R.weight": torch.ones(2, 6)}),
    "another block size": ({"oft_block_size": 2}, {}),
    "another number of blocks": ({"oft_block_size": 0, "r": 4}, {}),
    "a negative size": ({"oft_block_size": -4}, {}),
    "another target": ({"target_modules": ["1"]}, {}),
    "a target without tensors": ({"target_modules": ["0", "1"]}, {}),
    "a layer that is excluded": ({"target_modules": ["0"], "exclude_modules": ["0"]}, {}),
    "another number of a layer": ({"target_modules": ["0"], "layers_to_transform": 1}, {}),
    "a module without tensors": (HEAD, {}),
    "an unknown module": ({"modules_to_save": ["head"]}, {}),
    "complex numbers of the base": ({}, {"1.weight": net()[1].weight.detach().to(torch.complex64)}),
}


@pytest.mark.parametrize("what", LOADED_BEFORE)
def test_what_a_file_must_not_hold_is_refused(what: str, tmp_path: Path):
    config, tensors = LOADED_BEFORE[what]
    config = {"peft_type": "OFT", "use_cayley_neumann": False, **config}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    save_file({"0.oft_R.weight": torch.ones(2, 6), **tensors}, tmp_path / TENSORS)
    with pytest.raises(CheckpointError):
        sk.nn.load_peft(net(), tmp_path)
    assert fault_of(tmp_path) == ""


def test_names_that_are_no_folders_and_files_without_end_are_refused(saved: Path, monkeypatch: pytest.MonkeyPatch):
    for place in ("x" * 5000, "a\0b", 3):
        with pytest.raises(StiefelkitError):
            sk.nn.load_peft(net(), place)  # type: ignore[arg-type]
    with open(saved / CONFIG, "ab") as file:
        file.truncate(3 << 30)
    with pytest.raises(CheckpointError, match="too large"):
        sk.nn.load_peft(net(), saved)


def test_the_links_of_a_hubs_cache_are_followed(saved: Path, tmp_path: Path):
    (tmp_path / "snapshot").mkdir()
    for file in (CONFIG, TENSORS):
        (tmp_path / "snapshot" / file).symlink_to(saved / file)
    assert len(sk.nn.adapters(sk.nn.load_peft(net(), tmp_path / "snapshot"))) == 2
