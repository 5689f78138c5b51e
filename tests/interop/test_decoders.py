"""Rotations of whole decoders of transformers: the same logits, whatever the family, the ties and the dtype."""

import dataclasses
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_laws import check_decoder, tiny_decoder
from decoder_table import made
from optimizers_at_hand import descend
from safetensors.torch import load_file
from torch import nn

import stiefelkit as sk
from stiefelkit import init
from stiefelkit.errors import DtypeError, NotAFrameError, OptionError, ShapeError
from stiefelkit.nn.decoders import decoders
from stiefelkit.testing import seeds

transformers: Any = pytest.importorskip("transformers")

KINDS = {name.removesuffix("Model"): family for family, places in decoders.items() for name in places.classes}
FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Phi3", "GPT2", "GPTNeoX"]


def decoder(family: str, is_tied: bool = False, groups: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    return made(family, dtype, tie_word_embeddings=is_tied, num_key_value_heads=groups)[0]


def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(24).view(2, 12)).logits.detach().double()


def rotation(n: int = 32) -> torch.Tensor:
    return init.haar((n, n), generator=seeds.generator())


@pytest.mark.parametrize("family", KINDS)
def test_every_family_keeps_the_laws(family):
    check_decoder(KINDS[family], decoder(family))


@pytest.mark.parametrize(("is_tied", "groups"), [(False, 1), (True, 4)], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_after_both_rotations(family, is_tied, groups):
    model = decoder(family, is_tied, groups)
    before = logits(model)
    sites = sk.nn.rotation_sites(model)
    head_size = sites.heads[0].size
    heads = [init.haar((one.groups, head_size, head_size), generator=seeds.generator()) for one in sites.heads]
    w = model.get_input_embeddings().weight.clone()
    sk.nn.rotate_(rotation(), sites=sites, heads=heads, online=True)
    assert torch.dist(logits(model), before) <= 1e-5 * before.norm()
    assert torch.dist(model.get_input_embeddings().weight, w) > 0.1 * w.norm()
    assert sum(isinstance(m, sk.nn.HadamardLinear) for m in model.modules()) == 2
    sites = sk.nn.rotation_sites(model)
    for call in (sk.nn.rotate_, sk.nn.Rotated):
        with pytest.raises(OptionError, match="once"):
            call(sites=sites, online=True)
    sk.nn.rotate_(rotation(), sites=sites, heads=rotation(head_size))
    assert torch.dist(logits(model), before) <= 1e-5 * before.norm()


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_bfloat16_weights_are_rounded_once(family):
    exact, model = decoder(family, dtype=torch.float64), decoder(family, dtype=torch.bfloat16)
    exact.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
    before = logits(model)
    for one in (exact, model):
        sk.nn.rotate_(rotation(), sites=sk.nn.rotation_sites(one))
    rounded = {key: value.bfloat16() for key, value in exact.state_dict().items()}
    assert all(torch.equal(value, rounded[key]) for key, value in model.state_dict().items())
    assert torch.dist(logits(model), before) <= 0.1 * before.norm()


def test_a_tied_head_that_need_not_differ_stays_tied_and_keys_are_those_of_the_model():
    model = decoder("Llama", is_tied=True)
    model.model.norm.weight.data.fill_(1.0)
    before, keys = logits(model), model.state_dict().keys()
    sk.nn.rotate_(rotation(), sites=sk.nn.rotation_sites(model), heads=rotation(8))
    assert model.state_dict().keys() == keys
    assert not hasattr(model.config, "stiefelkit_online")
    assert model.lm_head.weight is not model.model.embed_tokens.weight or model.config.tie_word_embeddings
    assert torch.dist(logits(model), before) <= 1e-5 * before.norm()


def test_a_rotated_model_is_saved_and_loaded(tmp_path):
    for family in ("Llama", "Gemma"):
        model = decoder(family, is_tied=True)
        sk.nn.rotate_(rotation(), sites=sk.nn.rotation_sites(model), heads=rotation(8))
        model.save_pretrained(tmp_path / family)
        loaded = type(model).from_pretrained(tmp_path / family)
        assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX"])
def test_an_online_rotation_is_loaded_as_the_page_says_and_by_no_plain_class(family, tmp_path):
    model = decoder(family)
    sk.nn.rotate_(sk.nn.mean_preserving(rotation()), sites=sk.nn.rotation_sites(model), heads=rotation(8), online=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        type(model).from_pretrained(tmp_path)
    fresh = type(model)(type(model.config).from_pretrained(tmp_path)).eval()
    assert fresh.config.stiefelkit_online
    sk.nn.rotate_(sites=sk.nn.rotation_sites(fresh), online=True)
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors") if family == "Llama" else model.state_dict())
    assert torch.dist(logits(fresh), logits(model)) <= 1e-5 * logits(model).norm()


def test_what_is_not_known_or_does_not_fit_is_refused_and_nothing_written():
    model = decoder("Llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sites = sk.nn.rotation_sites(model)
    cases: Any = (
        (ShapeError, {"rotation": rotation(16)}),
        (NotAFrameError, {"rotation": 2 * rotation()}),
        (ShapeError, {"heads": rotation(4)}),
        (OptionError, {"heads": [rotation(8)]}),
    )
    for error, arguments in cases:
        with pytest.raises(error, match=r"^rotate_ needs"):
            sk.nn.rotate_(**({"rotation": None} | arguments), sites=sites)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for call in (
        lambda: sk.nn.rotation_sites(nn.Linear(4, 4)),
        lambda: sk.nn.rotation_sites(model.model),
        lambda: sk.nn.rotate_(rotation(), sites=model),
        lambda: sk.nn.absorb_norms_(model),
        lambda: sk.nn.Rotated(model),
        lambda: sk.nn.rotated(model, model),
    ):
        with pytest.raises(OptionError, match="rotation_sites"):
            call()


@pytest.mark.parametrize("layers", ["q_proj", "v_proj", "down_proj"])
def test_a_decoder_with_adapters_is_refused_with_the_way_out(layers):
    model = decoder("Llama")
    sk.nn.adapt(model, f"*.{layers}.weight", block_size=8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(DtypeError, match="fold"):
        sk.nn.rotate_(rotation(), sites=sk.nn.rotation_sites(model), heads=rotation(8), online=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_norms_that_no_rotation_passes_are_refused():
    for name in ("Gemma2", "Gemma3Text", "Olmo2", "Olmo3", "Exaone4", "Glm4", "Bloom"):
        with pytest.raises(OptionError, match=name):
            sk.nn.rotation_sites(tiny_decoder(f"{name}Model"))
    sites = sk.nn.rotation_sites(tiny_decoder("OlmoModel", clip_qkv=0.5))
    with pytest.raises(OptionError, match="clip"):
        sk.nn.rotate_(sites=sites, heads=rotation(8))


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
@pytest.mark.parametrize("family", ["Qwen2", "GPT2", "Mixtral"])
def test_classifiers_have_a_head_that_reads_the_stream(family, task):
    model = tiny_decoder(f"{family}Model", task, **decoders[KINDS[family]].classes[f"{family}Model"])
    check_decoder(KINDS[family], model, ("norms", "rotations"))
    with pytest.raises(OptionError, match="score"):
        sk.nn.rotation_sites(model.base_model)


def test_packed_experts_are_rounded_by_rows_and_what_they_have_no_place_for_is_refused():
    model = decoder("Mixtral")
    for options in ({}, {"activation_bits": None, "online": True}):
        with pytest.raises(OptionError, match="experts"):
            sk.nn.rotated(model, **options)
    with pytest.raises(OptionError, match="experts"):
        sk.nn.rotate_(sites=sk.nn.rotation_sites(model), online=True)
    before = logits(model)
    rotated = sk.nn.rotated(model, activation_bits=None)
    assert 1e-3 < torch.dist(logits(rotated), before) / before.norm() < 0.5
    assert torch.dist(logits(rotated.fold()), before) <= 1e-5 * before.norm()
    for name in [name for name, _ in model.named_modules() if name.endswith("norm")]:
        model.set_submodule(name, nn.LayerNorm(32))
    nn.init.ones_(model.model.layers[0].post_attention_layernorm.bias)
    with pytest.raises(OptionError, match="a bias"):
        sk.nn.rotate_(rotation(), sites=sk.nn.rotation_sites(model))


@pytest.mark.parametrize("old", [{"multi_query": True}, {"multi_query": False, "parallel_attn": False}, {}])
def test_packed_values_are_those_of_the_heads_of_keys_or_refused(old):
    falcon: Any = tiny_decoder("FalconModel", **old, new_decoder_architecture=not old, num_kv_heads=4 if old else 2)
    check_decoder("falcon", falcon)
    if old:
        return
    sites = sk.nn.rotation_sites(falcon)
    falcon.config.num_kv_heads = 4
    with pytest.raises(ShapeError, match="96 rows"):
        sk.nn.rotation_sites(falcon)
    beyond = dataclasses.replace(sites.heads[0], rows=torch.arange(60, 76))
    with pytest.raises(ShapeError, match="up to 75"):
        sk.nn.rotate_(sites=dataclasses.replace(sites, heads=[beyond]), heads=rotation(8))


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Phi3", "GPTNeoX"])
def test_a_decoder_that_is_rotated_as_it_runs_computes_the_same_unrounded_and_folded(family):
    model = decoder(family, is_tied=True)
    before = logits(model)
    sites = sk.nn.rotation_sites(model)
    rotated = sk.nn.Rotated(sites, weight_bits=None, activation_bits=None, online=True, generator=seeds.generator())
    with torch.no_grad():
        frame: Any
        for frame in rotated.head_rotations:
            frame.weight = init.haar(tuple(frame.weight.shape), torch.float32, seeds.generator())
    assert torch.dist(logits(model), before) <= 1e-5 * before.norm()
    assert torch.dist(logits(rotated), before) <= 1e-5 * before.norm()
    assert rotated.fold() is model
    assert torch.dist(logits(model), before) <= 1e-5 * before.norm()
    rotated.rotation.weight = rotation().float()  # type: ignore[assignment]
    assert torch.dist(logits(rotated), before) <= 1e-5 * before.norm()  # layers that transform their input do so here
    rotated.fold()
    assert torch.dist(logits(model), before) <= 1e-5 * before.norm()
    with pytest.raises(OptionError, match="once"):
        sk.nn.rotate_(sites=sites, online=True)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "GPTNeoX"])
def test_sites_follow_what_is_replaced_and_sites_found_before_are_refused(family):
    model = decoder(family)
    before = logits(model)
    sites, early = sk.nn.rotation_sites(model), sk.nn.rotation_sites(model)
    for online in (False, True, False):
        sk.nn.rotate_(rotation(), sites=sites, heads=rotation(8), online=online)
        assert torch.dist(logits(model), before) <= 1e-5 * before.norm()
    found = sk.nn.rotation_sites(model)
    assert (sites.norms, sites.writers, sites.downs) == (found.norms, found.writers, found.downs)
    assert [(one.value, one.output) for one in sites.heads] == [(one.value, one.output) for one in found.heads]
    for use in (lambda: sk.nn.rotate_(rotation(), sites=early), lambda: sk.nn.rotated(model, early)):
        with pytest.raises(OptionError, match="no longer"):
            use()
    assert torch.dist(logits(model), before) <= 1e-5 * before.norm()


def test_rotations_are_learned_through_rounded_layers_and_stay_frames():
    model = decoder("Llama")
    model.get_input_embeddings().weight.data[:, 3] *= 20  # an outlier channel
    before, tokens = logits(model), torch.arange(24).view(2, 12)
    rotated = sk.nn.rotated(model, start="identity", weight_bits=8)
    frozen = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = sk.optim.SGDG(sk.optim.parameter_groups(rotated, lr=10.0))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)  # rounding makes the loss rough
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    losses = descend(optimizer, lambda: (rotated(tokens).logits - before).square().mean() / before.square().mean(), 80)
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]
    assert all(drift.bits_lost < 1 for drift in sk.drift(rotated).values())
    assert all(torch.equal(value, frozen[key]) for key, value in model.state_dict().items())
    assert "forward" not in vars(model.get_output_embeddings())


def test_bits_and_starts_that_are_none_are_refused_before_norms_are_absorbed():
    model = decoder("Llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sites = sk.nn.rotation_sites(model)
    cases: Any = (
        ({"weight_bits": 1}, OptionError),
        ({"activation_bits": 2.5}, OptionError),
        ({"start": "cayley"}, OptionError),
        ({"start": torch.eye(4)}, ShapeError),
        ({"bits": 4}, TypeError),
    )
    for options, error in cases:
        with pytest.raises(error):
            sk.nn.rotated(model, sites, **options)
    with pytest.raises(OptionError, match="the sites of its model"):
        sk.nn.rotated(decoder("Llama"), sites)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_example_learns_folds_and_saves(family, monkeypatch, capsys, tmp_path):
    path = Path(__file__).parents[2] / "examples" / "rotate_decoder.py"
    words = f"--family {family} --steps 8 --rotation-steps 3 --out {tmp_path / 'rotated'}"
    monkeypatch.setattr(sys, "argv", ["rotate_decoder.py", *words.split()])
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    assert len(re.findall(r"perplexity +[\d.]+$", shown, re.MULTILINE)) == 5
    worst, away = map(float, re.findall(r"([\d.e-]+) (?:limits|away)", shown))
    assert worst <= 2
    assert away < 1e-5
    assert (tmp_path / "rotated" / ("model.pt" if family == "gpt2" else "model.safetensors")).exists()


def test_the_page_runs_as_it_stands(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text()
    codes = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    codes = [code for code in codes if "compressed_tensors" not in code]  # which tests/interop/test_transforms.py runs
    assert len(codes) == 7
    names: dict[str, Any] = {}
    for code in codes:
        exec(compile(code, "language-models.md", "exec"), names)
    assert names["model"] is names["sites"].model


def test_a_family_of_ones_own_is_described_as_the_page_says(monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "extending-nets.md").read_text()
    (code,) = re.findall(r"```py\n(import transformers\n.*?)```", page, re.DOTALL)
    monkeypatch.setitem(decoders, "apertus", decoders["llama"])  # goes again after the test
    names: dict[str, Any] = {}
    exec(code, names)
    assert decoders["apertus"] is names["APERTUS"]
    check_decoder("apertus", names["model"])


def test_layers_that_run_in_a_reentrant_checkpoint_or_have_another_forward_are_refused() -> None:
    hooks: Any = pytest.importorskip("accelerate.hooks")
    model = decoder("Llama")
    rotated = sk.nn.rotated(model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    tokens = torch.arange(6)[None]
    with pytest.raises(OptionError, match="use_reentrant=False"):
        rotated(tokens)
    model.gradient_checkpointing_disable()
    rotated(tokens).logits.sum().backward()
    layer = model.model.layers[0].mlp.up_proj
    hooks.add_hook_to_module(layer, hooks.ModelHook())
    with pytest.raises(OptionError, match="remove_hook"):
        rotated(tokens)
    assert "forward" in vars(layer)
    hooks.remove_hook_from_submodules(model)
    rotated(tokens)


def test_a_rotated_decoder_is_checkpointed_trained_and_generates_as_its_model(tmp_path):
    model, tokens = decoder("Llama"), torch.arange(24).view(2, 12)
    rotated: Any = sk.nn.rotated(model, generator=seeds.generator()).train()
    trained = [p for p in rotated.parameters() if p.requires_grad]
    expected = torch.autograd.grad(rotated(tokens, labels=tokens).loss, trained)
    rotated.gradient_checkpointing_enable()
    found = torch.autograd.grad(rotated(tokens, labels=tokens).loss, trained)
    assert all(map(torch.equal, found, expected))
    assert all("forward" not in vars(module) for module in model.modules())
    data = [{"input_ids": tokens[0], "labels": tokens[0], "text": "dropped"}] * 4
    optimizer = sk.optim.MixedOptimizer([sk.optim.SGDG(sk.optim.parameter_groups(rotated, lr=1.0))])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=3)
    options = {"max_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True, "gradient_checkpointing": True}
    arguments = transformers.TrainingArguments(str(tmp_path), save_strategy="no", **options)
    trainer = transformers.Trainer(
        rotated, arguments, train_dataset=data, eval_dataset=data, optimizers=(optimizer, schedule)
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    rotated.eval()
    longer = rotated.generate(tokens[:1, :4], max_new_tokens=1, do_sample=False)
    assert longer[0, -1] == rotated(tokens[:1, :4]).logits[0, -1].argmax()
    assert not hasattr(rotated, "save_pretrained")


def test_widths_without_a_hadamard_matrix_take_blocks_and_the_configuration_names_them():
    model: Any = tiny_decoder("LlamaModel", intermediate_size=56)
    fresh, before = type(model)(model.config).eval(), logits(model)
    sk.nn.rotate_(sites=sk.nn.rotation_sites(model), online={"block": 8})
    assert torch.dist(logits(model), before) <= 1e-5 * before.norm()
    sk.nn.rotate_(sites=sk.nn.rotation_sites(fresh), online=model.config.stiefelkit_online)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh), logits(model))


def test_what_spinquant_saves_is_folded(tmp_path):
    model, d = decoder("Llama"), 8
    names = [f"model.layers.{i}.self_attn.R2" for i in range(2)]
    torch.save({"R1": rotation().float(), **{name: rotation(d).float() for name in names}}, tmp_path / "R.bin")
    r, before = torch.load(tmp_path / "R.bin", weights_only=True), logits(model)
    w, v = model.model.embed_tokens.weight.detach().clone(), model.model.layers[1].self_attn.v_proj.weight.detach()
    expected = (w @ r["R1"], (v @ torch.diag(model.model.layers[1].input_layernorm.weight.detach()) @ r["R1"]).clone())
    sk.nn.rotate_(r["R1"].mT, sites=sk.nn.rotation_sites(model), heads=[r[name].mT for name in names])
    torch.testing.assert_close(model.model.embed_tokens.weight, expected[0], rtol=0, atol=1e-5)
    turned = r[names[1]].mT @ expected[1].view(-1, d, 32)
    torch.testing.assert_close(model.model.layers[1].self_attn.v_proj.weight, turned.flatten(0, 1), rtol=0, atol=1e-5)
    assert torch.dist(logits(model), before) <= 1e-5 * before.norm()
