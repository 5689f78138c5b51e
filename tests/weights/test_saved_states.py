"""What earlier versions saved loads bit for bit, means the same weights, and goes on from there."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import saved_states
import torch
from safetensors.torch import load_file
from saved_states import DATA, NETS, OPTIMIZERS, WEIGHTS, frames_and_coordinates, optimizer, resume, states
from torch import Tensor

MODULES = WEIGHTS | NETS
SAVED = {folder.name: torch.load(folder / "states.pt", weights_only=True) for folder in sorted(DATA.iterdir())}


def names(*kinds: str) -> Any:
    """Runs a test on everything of some kinds that a version has saved."""
    found = [(version, kind, name) for version, saved in SAVED.items() for kind in kinds for name in saved[kind]]
    return pytest.mark.parametrize(("version", "kind", "name"), found)


def require_same_bits(found: Any, expected: Any, where: str) -> None:
    assert type(found) is type(expected), where
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found.detach(), expected.detach()), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            require_same_bits(found[key], expected[key], f"{where} {key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            require_same_bits(one, other, f"{where} {i}")
    else:
        assert found == expected, where


def require_close(found: Any, expected: Any, eps_times: float, where: str) -> None:
    """Tensors alike to a few roundings of their dtype, as other processors round otherwise."""
    assert sorted(found) == sorted(expected), where
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, f"{where} {key}"
        if value.is_floating_point() or value.is_complex():
            off = torch.linalg.vector_norm((found[key] - value).to(torch.complex128))
            permitted = eps_times * torch.finfo(value.dtype).eps * torch.linalg.vector_norm(value.to(torch.complex128))
            assert off <= permitted, f"{where} {key}: off by {off}, permitted {permitted}"
        else:
            assert torch.equal(found[key], value), f"{where} {key}"


@names("weights", "nets")
def test_modules_load_bit_for_bit_and_have_the_weights_they_had(version: str, kind: str, name: str) -> None:
    record, module = SAVED[version][kind][name], MODULES[name]()
    module.load_state_dict(record["state"])
    require_same_bits(dict(module.state_dict()), record["state"], name)
    require_close(saved_states.weights(module), record["weights"], 4, name)
    if "x" in record:
        out = module(record["x"])
        require_close({"out": out[0] if isinstance(out, tuple) else out}, {"out": record["out"]}, 64, name)


@names("optimizers")
def test_optimizers_load_bit_for_bit_and_step_as_they_did(version: str, kind: str, name: str) -> None:
    record, model = SAVED[version][kind][name], frames_and_coordinates()
    moves = optimizer(name, model)
    model.load_state_dict(record["before"]["model"])
    moves.load_state_dict(record["before"]["optimizer"])
    require_same_bits(states(model, moves), record["before"], name)
    saved_states.step(model, moves, record["gradients"])
    found, after = states(model, moves), record["after"]
    require_close(found["model"], after["model"], 4, name)
    assert found["optimizer"]["param_groups"] == after["optimizer"]["param_groups"]
    assert found["optimizer"]["state"].keys() == after["optimizer"]["state"].keys()


@pytest.mark.parametrize("version", SAVED)
def test_runs_resume_from_where_they_were(version: str, tmp_path: Path) -> None:
    run = shutil.copytree(DATA / version / "run", tmp_path / "run")
    resume(run, 4)
    found = load_file(run / "checkpoints" / "step-00000004" / "tensors.safetensors")
    expected = load_file(DATA / version / "run-after-4-steps.safetensors")
    assert list(found) == list(expected)
    weights, after = [{k: t for k, t in each.items() if k.startswith("model/")} for each in (found, expected)]
    require_close(weights, after, 1e4, "the model after four steps")


def test_everything_that_can_be_saved_is_saved_by_some_version() -> None:
    for kind, known in {"weights": WEIGHTS, "nets": NETS, "optimizers": OPTIMIZERS}.items():
        assert {name for saved in SAVED.values() for name in saved[kind]} == set(known)
