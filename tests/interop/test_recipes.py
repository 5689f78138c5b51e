"""The recipes of the gallery that need other libraries run as printed, and end with frames."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import stiefelkit as sk

GALLERY = Path(__file__).parents[2] / "docs" / "gallery"


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the page, in a folder of their own, without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    torch.manual_seed(0)
    return {"sk": sk, "torch": torch, "nn": nn}


def ran(title: str, held: dict[str, Any], page: str = "recipes") -> dict[str, Any]:
    """Runs the code under a heading."""
    section = (GALLERY / f"{page}.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code, held)
    return held


def check_frames(net: Any, count: int) -> None:
    drifts = sk.drift(net)
    assert len(drifts) == count
    assert max(drift.bits_lost for drift in drifts.values()) < 1


@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_it_trains_and_restores_as_the_page_says(library: str, held: dict[str, Any]) -> None:
    pytest.importorskip(library, reason="needs the extra [interop]")
    check_frames(ran(library, held)["net"], 2)


def test_the_trainer_of_transformers_trains_and_saves_gpt2_as_the_page_says(held: dict[str, Any]) -> None:
    pytest.importorskip("transformers", reason="needs the extra [interop]")
    pytest.importorskip("accelerate", reason="needs the extra [interop]")
    gpt = ran("GPT-2", held)["gpt"]
    before = gpt.transformer.h[0].attn.c_attn.weight.detach().clone()
    ran("Hugging Face Trainer", held)
    assert not torch.equal(gpt.transformer.h[0].attn.c_attn.weight, before)
    check_frames(gpt, 4)
    saved = load_file("out/best/model.safetensors")
    twin = ran("GPT-2", held)["gpt"]
    twin.load_state_dict(saved, strict=False)  # lm_head is tied, and saved once
    twin.tie_weights()
    tokens = torch.arange(8)[None]
    assert torch.equal(twin.eval()(tokens).logits, gpt.cpu().eval()(tokens).logits)


def test_the_trainer_trains_adapters_and_saves_them_for_peft_and_folded_as_the_page_says(held: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [interop]")
    pytest.importorskip("accelerate", reason="needs the extra [interop]")
    folded = ran("Trainer with adapters", held)["llama"].cpu().eval()
    assert not sk.nn.adapters(folded)
    tokens = torch.arange(8)[None]
    before = folded(tokens).logits
    assert torch.equal(transformers.LlamaForCausalLM.from_pretrained("out/folded").eval()(tokens).logits, before)
    saved = load_file("out/adapter/adapter_model.safetensors")
    assert len(saved) == 4
    assert min(value.abs().max() for value in saved.values()) > 1e-3
    resumed = transformers.LlamaForCausalLM(held["config"]).requires_grad_(False)
    sk.nn.adapt(resumed, ["*.q_proj", "*.v_proj"], block_size=8)
    trainer = transformers.Trainer(resumed, held["arguments"], train_dataset=held["data"])
    (checkpoint,) = {path.name for path in Path("out").glob("checkpoint-16")}
    trainer.train(resume_from_checkpoint=f"out/{checkpoint}")
    assert torch.equal(sk.nn.fold(resumed).cpu().eval()(tokens).logits, before)


def test_accelerate_trains_adapters_and_saves_them_as_the_page_says(held: dict[str, Any]) -> None:
    pytest.importorskip("accelerate", reason="needs the extra [interop]")
    net = ran("accelerate with adapters", held)["accelerator"].unwrap_model(held["net"])
    check_frames(net, 2)
    twin = sk.nn.adapt(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), ["0", "2"], block_size=4)
    sk.nn.load_adapter_state(twin, load_file("adapters.safetensors"))
    for one, other in zip(sk.nn.adapters(twin).values(), sk.nn.adapters(net).values(), strict=True):
        assert torch.equal(one.rotation.weight, other.rotation.weight)
        assert torch.dist(one.rotation.weight, torch.eye(16)) > 1e-2


@pytest.mark.parametrize(("title", "library"), [("lightning", "lightning"), ("Hugging Face Trainer", "accelerate")])
def test_callbacks_log_drift_and_stop_above_a_limit(title: str, library: str, held: dict[str, Any]) -> None:
    pytest.importorskip(library, reason="needs the extra [interop]")
    trainer = ran(title, held, "callbacks")["trainer"]
    is_lightning = library == "lightning"
    logged = trainer.callback_metrics if is_lightning else trainer.state.log_history[0]
    ours, plain = [float(logged[name]) for name in sorted(logged) if name.startswith("bits_lost/")]
    assert ours < 2 < plain
    assert 0 < (trainer.global_step if is_lightning else trainer.state.global_step) < 80
