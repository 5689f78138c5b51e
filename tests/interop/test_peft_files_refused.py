"""Files for PEFT: what its formats cannot hold is refused in a sentence, and nothing is half-written."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit.errors import CheckpointError, OptionError, UnknownNameError

peft = pytest.importorskip("peft", reason="needs the extra [interop]")
transformers = pytest.importorskip("transformers", reason="needs the extra [interop]")


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.other = self.one
        self.xone = nn.Linear(4, 4)


def net() -> Any:
    return nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(12, 8), "c": nn.Conv2d(2, 2, 3)})


def adapted(where: Any = "a", model: Any = None, **options: Any) -> Any:
    return sk.nn.adapt(net() if model is None else model, where, **options)


def reflected(model: Any) -> Any:
    model["a"].rotation.weight = torch.diag(torch.tensor([-1.0] + [1.0] * 7))
    return model


def nothing(model: Any) -> Any:
    with torch.no_grad():
        model["a"].rotation.parametrizations.weight.reflectors.zero_()
    return model


UNWRITTEN: dict[str, tuple[Any, str]] = {
    "another adapter": (lambda: adapted(parametrization="principal", rank=2), "PrincipalAdapter"),
    "a side": (lambda: adapted(side="out"), "side"),
    "a convolution": (lambda: adapted("c", block_size=2), "kernel"),
    "dropout": (lambda: adapted(parametrization="householder", dropout=0.5), "dropout"),
    "another name": (lambda: adapted(name="b"), "'default'"),
    "no adapter": (net, "an adapter"),
    "frames": (lambda: sk.orthogonal(net(), "a.weight"), "an adapter"),
    "two methods": (lambda: adapted("b", adapted("a", block_size=2), parametrization="householder"), "sizes"),
    "a kernel": (lambda: adapted("c", block_size=2, side="patches"), "1 x 1"),
    "a stride": (
        lambda: adapted("0", nn.Sequential(nn.Conv2d(2, 2, 3, (1, 2))), side="patches", parametrization="householder"),
        "square",
    ),
    "Conv1D": (lambda: adapted("0", nn.Sequential(transformers.pytorch_utils.Conv1D(4, 8))), "Conv1D"),
    "a reflection": (lambda: reflected(adapted(parametrization="cayley")), "eigenvalue"),
    "no reflector": (lambda: nothing(adapted(parametrization="householder")), "reflectors"),
    "sizes": (lambda: adapted("b", adapted("a", block_size=2), block_size=4), "oft_block_size"),
    "bounds": (lambda: adapted("b", adapted("a", block_size=2, bound=0.5), block_size=2, bound=0.25), "sizes"),
    "the model itself": (lambda: sk.nn.adapt(nn.Linear(8, 8), "weight"), "inside"),
    "two places": (lambda: adapted("one", Twice()), "place"),
    "names": (
        lambda: adapted("b", nn.ModuleDict({k: nn.Linear(2, 2) for k in ("b", "one", "xone")}), modules_to_save="one"),
        "xone",
    ),
}


@pytest.mark.parametrize("what", list(UNWRITTEN))
def test_what_peft_cannot_hold_is_refused_and_nothing_is_written(what: str, tmp_path: Path):
    make, word = UNWRITTEN[what]
    with pytest.raises((OptionError, UnknownNameError), match=word):
        sk.nn.save_peft(make(), tmp_path / "ours")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_files_is_left_alone_and_an_empty_one_filled(tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(OptionError, match="folder"):
        sk.nn.save_peft(adapted(side="out"), tmp_path / "full")  # which PEFT cannot hold, either
    (tmp_path / "empty").mkdir()
    sk.nn.save_peft(adapted(), tmp_path / "empty")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "full"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_text", fails)
    refused: Any = ((tmp_path / "ours", tmp_path, "no space"), (None, "a", "None"), ("o", 3, "int"))
    for folder, base, word in refused:
        with pytest.raises(CheckpointError, match=f"folder that can be written.*{word}"):
            sk.nn.save_peft(adapted(), folder, base_model_name_or_path=base)
    assert not list(tmp_path.iterdir())


def test_sizes_that_differ_are_given_by_their_number(tmp_path: Path):
    model = adapted("b", adapted("a", block_size=2), block_size=3)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1)
    plain = net()
    plain.load_state_dict(sk.nn.base_state(model))
    sk.nn.save_peft(model, tmp_path / "ours")
    theirs: Any = peft.PeftModel.from_pretrained(plain, str(tmp_path / "ours"))
    for key, n in (("a", 8), ("b", 12)):
        x = torch.randn(3, n)
        torch.testing.assert_close(theirs.base_model.model[key](x), model[key](x), rtol=0, atol=4e-6)
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert (config["r"], config["oft_block_size"]) == (4, 0)


def test_a_layer_whose_name_ends_that_of_another_is_the_only_target(tmp_path: Path):
    plain = nn.ModuleDict({"a": nn.Linear(8, 8), "n": nn.ModuleDict({"a": nn.Linear(8, 8)})})
    sk.nn.save_peft(adapted("a", copy.deepcopy(plain)), tmp_path / "ours")
    model: Any = peft.PeftModel.from_pretrained(plain, str(tmp_path / "ours"))
    assert "oft_R" in repr(model.base_model.model["a"])
    assert type(model.base_model.model["n"]["a"]) is nn.Linear


@pytest.mark.filterwarnings("ignore:(Failed to load the CUDA extension|Setting boft_n_butterfly_factor to 1)")
def test_one_factor_that_peft_makes_without_its_extension_and_two_places_of_a_layer(tmp_path: Path):
    config = peft.BOFTConfig(boft_block_size=2, boft_n_butterfly_factor=2, target_modules=["one"])
    peft.get_peft_model(Twice(), config).save_pretrained(tmp_path)
    with pytest.raises(OptionError, match="several"):  # PEFT changes the first
        sk.nn.load_peft(Twice(), tmp_path)
    once = nn.ModuleDict({"one": nn.Linear(4, 4), "xone": nn.Linear(4, 4)})
    assert list(sk.nn.adapters(sk.nn.load_peft(once, tmp_path))) == ["one"]


def test_a_model_of_peft_is_told_how_to_get_its_base(tmp_path: Path):
    base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = peft.OFTConfig(oft_block_size=4, target_modules=["0"], use_cayley_neumann=False)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "oft_R" in name:
                p.fill_(0.3)
    model.save_pretrained(tmp_path)
    x = torch.randn(3, 8)
    before = model.eval()(x)
    with pytest.raises(OptionError, match=r"unload"):
        sk.nn.load_peft(model, tmp_path)
    loaded = sk.nn.load_peft(model.unload(), tmp_path)
    torch.testing.assert_close(loaded(x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("saves_a_module", [False, True], ids=["adapters", "modules_to_save"])
def test_a_wrong_base_is_answered_with_what_differs(saves_a_module: bool, tmp_path: Path):
    def base(inputs: int = 8, classes: int = 3) -> Any:
        inner = nn.ModuleDict({"up": nn.Linear(inputs, 8), "down": nn.Linear(8, 8)})
        return nn.ModuleDict({"body": inner, "head": nn.Linear(8, classes)})

    def refused(model: Any, word: str) -> None:
        state = copy.deepcopy(model.state_dict())
        with pytest.raises(CheckpointError, match=word):
            sk.nn.load_peft(model, tmp_path / "ours")
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())

    saved = ["head"] if saves_a_module else []
    model = sk.nn.adapt(base(), "body.*", block_size=4, modules_to_save=saved)
    sk.nn.save_peft(model, tmp_path / "ours", base_model_name_or_path="my/base")
    outer = nn.ModuleDict({"net": base()})
    refused(outer, "my/base")
    assert len(sk.nn.adapters(sk.nn.load_peft(outer.get_submodule("net"), tmp_path / "ours"))) == 2
    refused(base()["body"], r"body\.")
    refused(base(inputs=12), r"body\.up")
    if saves_a_module:
        refused(base(classes=5), r"head\.weight")
