"""A rotation proves itself: what writes and reads the stream is seen, and no file is written that loads wrong."""

import dataclasses
from typing import Any

import pytest
import torch
from decoder_laws import SIZES, shaken
from test_decoders import decoder, logits, rotation
from torch import nn

import stiefelkit as sk
from stiefelkit.errors import CheckpointError, DtypeError, NonFiniteError, NotAFrameError, OptionError, UnfilledError

transformers: Any = pytest.importorskip("transformers")
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 8}
IMAGES = {
    "Llava": ("Llama", "CLIPVision", {"image_token_id": 40, "vision_feature_layer": -1}, 4),
    "Llava over Qwen2": ("Qwen2", "CLIPVision", {"image_token_id": 40, "vision_feature_layer": -1}, 4),
    "Llava over Mistral": ("Mistral", "CLIPVision", {"image_token_id": 40, "vision_feature_layer": -1}, 4),
    "PaliGemma": ("Gemma", "SiglipVision", {"image_token_id": 40, "projection_dim": 32}, 4),
    "InternVL": ("Qwen2", "InternVLVision", {"image_token_id": 40, "downsample_ratio": 0.5}, 1),
    "Idefics3": ("Llama", "Idefics3Vision", {"image_token_id": 40, "scale_factor": 1}, 4),
}


def with_images(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    text, vision, options, count = IMAGES[name]
    sizes = VISION | ({"image_size": [16, 16], "patch_size": [8, 8]} if name == "InternVL" else {})
    configs = {
        "text_config": getattr(transformers, f"{text}Config")(**SIZES),
        "vision_config": getattr(transformers, f"{vision}Config")(**sizes),
    }
    kind = name.split()[0]
    config = getattr(transformers, f"{kind}Config")(**configs, **options)
    torch.manual_seed(1)
    model = shaken(getattr(transformers, f"{kind}ForConditionalGeneration")(config))
    pixels = torch.randn((1, 1, 3, 16, 16) if name == "Idefics3" else (1, 3, 16, 16))
    return model, {"input_ids": torch.tensor([[1, 2, *[40] * count, 3, 4, 5]]), "pixel_values": pixels}


@pytest.mark.parametrize("name", IMAGES)
def test_what_projects_images_is_seen_as_a_writer(name):
    model, inputs = with_images(name)
    before = model(**inputs).logits
    sites = sk.nn.rotation_sites(model)
    rotated = sk.nn.rotated(model, sites, weight_bits=2, activation_bits=None, start="haar")
    projector: Any = sites.beside[0]
    assert len(sites.beside) == 1
    with rotated._rotated():  # what projects images is not rounded
        x = torch.randn(3, projector.in_features)
        exact = type(projector).forward(projector, x) @ rotated.rotation.weight.mT
        torch.testing.assert_close(projector(x), exact)
    sk.nn.rotate_(rotation(), sites=sites, heads=rotation(8))
    assert torch.dist(model(**inputs).logits, before) <= 1e-5 * before.norm()


def test_a_writer_a_reader_and_a_norm_that_were_left_out_are_named_and_nothing_is_written():
    model, inputs = with_images("Llava")
    sites = sk.nn.rotation_sites(model, inputs=inputs)
    norm, *norms = sites.norms
    read = {one: [*layers] for one, layers in sites.norms.items()}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wrong: Any = {
        "linear_2, Linear, writes": {"writers": [w for w in sites.writers if "linear_2" not in names(model, w)]},
        r"0.self_attn.o_proj, Linear, writes": {
            "writers": [w for w in sites.writers if "0.self_attn.o_proj" not in names(model, w)]
        },
        r"up_proj, Linear, reads": {"norms": read | {norms[0]: read[norms[0]][:1]}},
        r"input_layernorm.*norms": {"norms": {one: read[one] for one in norms}},
    }
    for match, changes in wrong.items():
        for call in (lambda s: sk.nn.rotate_(rotation(), sites=s), sk.nn.absorb_norms_, sk.nn.Rotated):
            with pytest.raises(OptionError, match=match):
                call(dataclasses.replace(sites, **changes))
    assert norm is not None
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def names(model: nn.Module, layer: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is layer)


@pytest.mark.parametrize("kind", ["Olmo2", "Exaone4", "Gemma2"])
def test_norms_of_what_is_added_are_refused_with_the_reason_however_they_are_described(kind):
    model = shaken(getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES)))
    base = model.model
    norms: Any = {base.norm: [model.lm_head]}
    for block in base.layers:
        attention, mlp = block.self_attn, block.mlp
        of_mlp = getattr(block, "pre_feedforward_layernorm", block.post_feedforward_layernorm)
        norms[getattr(block, "input_layernorm", block.post_attention_layernorm)] = [
            attention.q_proj, attention.k_proj, attention.v_proj,
        ]  # fmt: skip
        norms[of_mlp] = [mlp.gate_proj, mlp.up_proj]
    writers = [base.embed_tokens, *(w for b in base.layers for w in (b.self_attn.o_proj, b.mlp.down_proj))]
    for call in (
        sk.nn.rotation_sites,
        lambda m: sk.nn.rotate_(rotation(), sites=sk.nn.RotationSites(m, norms, writers)),
    ):
        with pytest.raises(OptionError, match=r"norm|passes the scale"):
            call(model)


def test_soft_prompts_are_writers_and_a_prefix_is_refused_with_rotated_heads():
    peft: Any = pytest.importorskip("peft")
    for is_inferred in (False, True):
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, inference_mode=is_inferred)
        model = peft.get_peft_model(decoder("Llama"), config).eval()
        before = logits(model)
        sk.nn.rotate_(rotation(), sites=sk.nn.rotation_sites(model))
        assert torch.dist(logits(model), before) <= 1e-5 * before.norm()
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = shaken(peft.get_peft_model(decoder("Llama"), config))
    before = logits(model)
    sk.nn.rotate_(rotation(), sites=sk.nn.rotation_sites(model))
    assert torch.dist(logits(model), before) <= 1e-5 * before.norm()
    with pytest.raises(OptionError, match=r"o_proj.*prefix"):
        sk.nn.rotate_(sites=sk.nn.rotation_sites(model), heads=rotation(8))


@pytest.mark.parametrize("family", ["GPT2", "GPTNeoX"])
def test_layer_norms_are_saved_whole(family, tmp_path):
    model = decoder(family)  # rotations that leave means are saved in tests/decoder_table.py
    sk.nn.rotate_(rotation(), sites=sk.nn.rotation_sites(model))
    with pytest.raises(CheckpointError, match=r"torch\.save.*mean_preserving"):
        model.save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(logits(torch.load(tmp_path / "model.pt", weights_only=False)), logits(model))


def test_values_beyond_a_dtype_are_refused_before_any_is_written():
    norm, layers = nn.RMSNorm(8).half(), [nn.Linear(8, 3).half() for _ in range(2)]
    nn.init.constant_(norm.weight, 6e4)
    nn.init.constant_(layers[1].weight, 4.0)
    before = layers[0].weight.clone()
    with pytest.raises(NonFiniteError, match="float16"):
        sk.nn.absorb_norm_(norm, layers)
    assert torch.equal(layers[0].weight, before)


def test_matrices_are_taken_where_they_are_exact_and_weights_elsewhere_are_refused():
    accelerate: Any = pytest.importorskip("accelerate")
    order = torch.eye(32)[torch.randperm(32)]
    matrices: Any = (rotation().numpy(), order.long(), order.bfloat16())
    for r in matrices:
        model, before = decoder("Llama"), logits(decoder("Llama"))
        sk.nn.rotate_(r, sites=sk.nn.rotation_sites(model))
        assert torch.dist(logits(model), before) <= 1e-5 * before.norm()
    model = decoder("Llama")
    sites = sk.nn.rotation_sites(model)
    with pytest.warns(UserWarning, match="nearest"):
        sk.nn.rotate_(rotation().bfloat16(), sites=sites)
    assert torch.dist(logits(model), before) <= 1e-5 * before.norm()
    for error, r in ((NotAFrameError, 1.1 * rotation()), (DtypeError, rotation() + 0j), (OptionError, None)):
        with pytest.raises(error, match=r"^rotate_ needs"):
            sk.nn.rotate_(r, sites=sites)
    with torch.device("meta"):
        meta = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    accelerate.cpu_offload(model, execution_device="cpu")
    for one in (meta, model):
        for call in (lambda s: sk.nn.rotate_(rotation(), sites=s), sk.nn.Rotated):
            with pytest.raises((UnfilledError, OptionError)):
                call(sk.nn.rotation_sites(one))


def test_the_check_leaves_mode_randomness_and_buffers_as_they_were():
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64)  # with dropout
    model = shaken(transformers.GPT2LMHeadModel(config)).train()
    model.transformer.h[0].eval()
    model.gradient_checkpointing_enable()
    modes = {name: module.training for name, module in model.named_modules()}
    kept = torch.get_rng_state(), {name: b.clone() for name, b in model.named_buffers()}
    sk.nn.rotate_(sk.nn.mean_preserving(rotation()), sites=sk.nn.rotation_sites(model))
    assert torch.equal(torch.get_rng_state(), kept[0])
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(b, kept[1][name]) for name, b in model.named_buffers())
    model(torch.arange(6)[None]).logits.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_compared_in_float64(dtype):
    model = decoder("Qwen3", dtype=dtype)
    sites = sk.nn.rotation_sites(model)
    sk.nn.rotate_(rotation(), sites=sites, heads=rotation(8), online=True)
    read = {norm: [*layers] for norm, layers in sites.norms.items()}
    first = next(iter(read))
    with pytest.raises(OptionError, match="q_proj, Linear, reads the stream"):
        sk.nn.rotate_(rotation(), sites=dataclasses.replace(sites, norms=read | {first: read[first][1:]}))
