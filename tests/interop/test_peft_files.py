"""PEFT's files: what PEFT saved is loaded with the same function, what we save PEFT loads, and the rest is refused."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.errors import CheckpointError, OptionError, StiefelkitError
from stiefelkit.testing import seeds

peft = pytest.importorskip("peft", reason="needs the extra [interop]")
transformers = pytest.importorskip("transformers", reason="needs the extra [interop]")

CLOSE = 1e-5
"""Of logits, relative: some hundred roundings of float32, as PEFT forms its rotations in it."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The symmetric initialization can NOT be performed when r is odd"),
    pytest.mark.filterwarnings("ignore:(Failed to load the CUDA extension|Setting boft_n_butterfly_factor to 1)"),
]
TARGETS = ["q_proj", "down_proj"]
TOKENS = torch.randint(0, 50, (2, 7), generator=seeds.generator())
IMAGES = torch.randn(2, 4, 6, 6, generator=seeds.generator(1))
EXACT = {"use_cayley_neumann": False}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 50, "num_attention_heads": 4}


def decoder(tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seeds.seed())
    options = {"num_hidden_layers": 2, "num_key_value_heads": 2, "initializer_range": 0.3, "tie_word_embeddings": tied}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options)).to(dtype).eval()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(seeds.seed())
        self.first, self.point, self.head = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 8, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.point(self.first(x).relu()).mean((2, 3)))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IMAGES) if "Images" in repr(model) else model(input_ids=TOKENS).logits


def assert_close(a: Tensor, b: Tensor, bound: float = CLOSE) -> None:
    assert torch.dist(a.double(), b.double()) <= bound * b.double().norm()


def trained(model: Any, config: Any, scale: float = 0.1) -> Any:
    """Puts PEFT's adapters onto a model, and moves them."""
    return moved(peft.get_peft_model(model, config).eval(), scale)


@torch.no_grad()
def moved(model: Any, scale: float = 0.1) -> Any:
    generator = seeds.generator(2)
    for p in model.parameters():
        if p.requires_grad:
            p.add_(scale * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def saved(model: Any, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


@pytest.fixture
def butterflies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has PEFT compute several factors, for which it wants a CUDA extension."""

    class Extension:
        @staticmethod
        def forward(blocks: Tensor) -> list[Tensor]:
            return [torch.stack([torch.block_diag(*of_one) for of_one in blocks])]

    import peft.tuners.boft.layer as layer

    monkeypatch.setattr(layer, "get_fbd_cuda", lambda: Extension)


def oft(**options: Any) -> Any:
    return peft.OFTConfig(**{"oft_block_size": 8, "target_modules": TARGETS, **EXACT} | options)


CONFIGS: dict[str, Any] = {
    "oft": lambda: oft(),
    "oft_by_count": lambda: oft(r=4, oft_block_size=0),
    "oft_shared": lambda: oft(block_share=True),
    "coft": lambda: oft(coft=True, eps=0.3),
    "coft_shared": lambda: oft(coft=True, eps=0.3, block_share=True),
    "oft_embedding": lambda: oft(target_modules=["embed_tokens", "v_proj"]),
    "oft_adjusted": lambda: oft(oft_block_size=5, layers_to_transform=[1]),
    "oft_excluded": lambda: oft(exclude_modules=["layers.0.mlp.down_proj"]),
    "oft_dropout": lambda: oft(module_dropout=0.25),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=TARGETS),
    "boft_by_count": lambda: peft.BOFTConfig(boft_block_size=0, boft_block_num=4, target_modules=TARGETS),
    "boft_butterfly": lambda: peft.BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=3, target_modules=TARGETS),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=TARGETS),
    "hra_odd": lambda: peft.HRAConfig(r=3, target_modules=TARGETS),
    "hra_gram_schmidt": lambda: peft.HRAConfig(r=3, apply_GS=True, target_modules=TARGETS),
    "hra_saved": lambda: peft.HRAConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "oft_saved": lambda: oft(modules_to_save=["norm"]),
}


@pytest.fixture(params=list(CONFIGS))
def pair(request: pytest.FixtureRequest, tmp_path: Path, butterflies: None) -> tuple[Any, Path]:
    """A model with PEFT's adapters, and the folder where they are saved."""
    model = trained(decoder(), CONFIGS[request.param]())
    model(input_ids=TOKENS)  # COFT writes its projection into the parameters in a pass
    return model, saved(model, tmp_path / "peft")


def test_what_peft_saved_is_computed_folded_and_saved_for_peft_with_the_bits_that_both_hold(
    pair: tuple[Any, Path], tmp_path: Path
):
    theirs, folder = pair
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = sk.nn.load_peft(decoder(), folder)
    assert torch.dist(logits(theirs), logits(decoder())) > 0.01 * logits(theirs).norm()
    assert_close(logits(ours), logits(theirs))
    assert all(adapter.peft_distance == 0 for adapter in sk.nn.adapters(ours).values())
    assert all(d.bits_lost < 1 for d in sk.drift(ours).values())

    sk.nn.save_peft(ours, tmp_path / "ours", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*(missing|unexpected)")  # keys
        back = peft.PeftModel.from_pretrained(decoder(), str(tmp_path / "ours")).eval()
    assert_close(logits(back), logits(theirs))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours", "peft"]
    assert back.active_peft_config.task_type == "CAUSAL_LM"

    again = sk.nn.load_peft(decoder(), tmp_path / "ours", name="again")
    state, other = sk.nn.adapter_state(ours), sk.nn.adapter_state(again, "again")
    assert state.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in state.items())
    first, second = (load_file(place / "adapter_model.safetensors") for place in (folder, tmp_path / "ours"))
    assert {key for key in first if "base_layer" not in key} == second.keys()
    if not any("hra_u" in key or "boft_R" in key for key in second):  # other reflectors; BOFT keeps more than a skew A
        assert all(torch.equal(value, first[key]) for key, value in second.items())

    folded, merged = sk.nn.fold(ours).state_dict(), theirs.merge_and_unload().state_dict()
    assert folded.keys() == merged.keys()
    for key, value in merged.items():
        assert_close(folded[key], value)


@pytest.mark.parametrize("terms", [2, 3, 4, 5, 8])
def test_a_neumann_series_is_loaded_as_the_nearest_rotation_with_its_distance(terms: int, tmp_path: Path):
    theirs = trained(decoder(), oft(use_cayley_neumann=True, num_cayley_neumann_terms=terms))
    with pytest.warns(UserWarning, match=rf"nearest rotations of 4 layers.*Neumann series of {terms} terms: up to"):
        ours = sk.nn.load_peft(decoder(), saved(theirs, tmp_path / "peft"))
    layers = dict(theirs.base_model.model.named_modules())
    for name, adapter in sk.nn.adapters(ours).items():
        r = layers[name].oft_R["default"].get_weight().mT.double()
        u, _, vh = torch.linalg.svd(r)
        assert torch.dist(adapter.rotation.matrix.double(), u @ vh) <= 1e-5
        distance = torch.dist(r, u @ vh).item()
        assert abs(adapter.peft_distance - distance) <= 1e-5
        assert distance > 1e-6
    apart = torch.dist(logits(ours), logits(theirs)) / logits(theirs).norm()
    assert apart <= 4 * max(adapter.peft_distance for adapter in sk.nn.adapters(ours).values())
    sk.nn.save_peft(ours, tmp_path / "ours")
    back = peft.PeftModel.from_pretrained(decoder(), str(tmp_path / "ours")).eval()
    assert_close(logits(back), logits(ours))
    assert all(adapter.peft_distance > 0 for adapter in sk.nn.adapters(copy.deepcopy(ours)).values())


def test_five_terms_of_a_small_a_are_near_the_cayley_transform_of_the_other_sign(tmp_path: Path):
    theirs = trained(decoder(), oft(use_cayley_neumann=True), 0.01)
    with pytest.warns(UserWarning, match="Neumann"):
        ours = sk.nn.load_peft(decoder(), saved(theirs, tmp_path / "peft"))
    assert_close(logits(ours), logits(theirs), 1e-4)


CONVOLUTIONS: dict[str, Any] = {
    "hra": lambda: peft.HRAConfig(r=2, target_modules=["first", "point", "head"]),
    "boft": lambda: peft.BOFTConfig(boft_block_size=2, target_modules=["first", "point", "head"]),
    "oft": lambda: oft(oft_block_size=2, target_modules=["point", "head"]),
}


@pytest.mark.parametrize("kind", list(CONVOLUTIONS))
def test_convolutions_are_loaded_saved_and_folded(kind: str, tmp_path: Path):
    theirs = trained(Images(), CONVOLUTIONS[kind]())
    ours = sk.nn.load_peft(Images(), saved(theirs, tmp_path / "peft"))
    assert_close(logits(ours), logits(theirs))
    sk.nn.save_peft(ours, tmp_path / "ours")
    back = peft.PeftModel.from_pretrained(Images(), str(tmp_path / "ours")).eval()
    assert_close(logits(back), logits(theirs))
    assert_close(logits(sk.nn.fold(ours)), logits(theirs.merge_and_unload()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_of_the_model(dtype: torch.dtype, tmp_path: Path):
    theirs = trained(decoder(dtype=dtype), CONFIGS["oft"]())
    ours = sk.nn.load_peft(decoder(dtype=dtype), saved(theirs, tmp_path / "peft"))
    assert_close(logits(ours), logits(theirs), 1e-12 if dtype == torch.float64 else 2e-2)
    sk.nn.save_peft(ours, tmp_path / "ours")
    back = peft.PeftModel.from_pretrained(decoder(dtype=dtype), str(tmp_path / "ours")).eval()
    assert_close(logits(back), logits(ours), 1e-12 if dtype == torch.float64 else 2e-2)


OPTIONS: dict[str, Any] = {
    "oft": {"block_size": 8},
    "shared": {"block_size": 8, "shared": True},
    "bound": {"block_size": 8, "bound": 1 / 3},
    "shared_bound": {"block_size": 8, "bound": 1 / 3, "shared": True},
    "dense": {"parametrization": "cayley"},
    "exponential": {"block_size": 8, "inner": "matrix_exp"},
    "blocks": {"blocks": 4},
    "hra": {"parametrization": "householder", "reflections": 4},
    "hra_odd": {"parametrization": "householder", "reflections": 3},
    "boft": {"parametrization": "butterfly", "block_size": 4, "factors": 2},
    "unscaled": {"parametrization": "butterfly", "block_size": 4, "scaled": False},
}


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_adapters_that_are_ours_are_loaded_by_peft(kind: str, tmp_path: Path, butterflies: None):
    where = ["*.q_proj", "*.down_proj"][: 1 if kind == "shared_bound" else 2]
    ours: Any = moved(sk.nn.adapt(decoder().requires_grad_(False), where, name="tuned", **OPTIONS[kind]))
    if kind != "unscaled":
        assert torch.dist(logits(ours), logits(decoder())) > 0
    sk.nn.save_peft(ours, tmp_path / "ours", "tuned")
    back = peft.PeftModel.from_pretrained(ours_without(ours), str(tmp_path / "ours"), adapter_name="other").eval()
    assert_close(logits(back), logits(ours))
    if kind not in ("exponential", "hra_odd"):
        again = sk.nn.load_peft(ours_without(ours), tmp_path / "ours", "tuned")
        there, here = sk.nn.adapter_state(again, "tuned"), sk.nn.adapter_state(ours, "tuned")
        coordinates = [key for key in here if "original" in key or "bound" in kind]  # the map's description, too
        assert all(torch.equal(there[key].flatten(), here[key].flatten()) for key in coordinates)


def check_lora(ours: Any, base: Any, folder: Path) -> None:
    """Compares what PEFT makes of LoRA, exact and cut off, with the adapters that it comes from."""
    exact, state = logits(ours), copy.deepcopy(ours.state_dict())
    given: Any
    for given in ({"tolerance": 1e-6}, {"tolerance": 0.5}, {"rank": 2}):
        lora: Any = sk.nn.to_lora(ours, **given, inputs=IMAGES if isinstance(ours, Images) else TOKENS)
        place = folder / "_".join(map(str, given.values()))
        lora.save(place)
        back = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(place)).eval()
        error = torch.dist(logits(back).double(), exact.double()) / exact.double().norm()
        assert abs(error - lora.error) <= CLOSE
        for name, layer in lora.layers.items():
            adapter = sk.nn.adapters(ours)[name]
            norm = torch.dist(adapter.changed_wide(), adapter.base.weight.double()).item()
            assert abs(layer.beyond.norm().item() - layer.error * norm) <= 1e-5 * norm  # Eckart and Young
            assert layer.error <= given.get("tolerance", 1) + 1e-6
            assert layer.rank == given.get("rank", layer.rank)
        assert_close(logits(back.merge_and_unload()), logits(back))
        assert error <= CLOSE or given != {"tolerance": 1e-6}
    assert torch.equal(logits(ours), exact)
    assert all(torch.equal(value, state[key]) for key, value in ours.state_dict().items())


def test_what_peft_saved_is_lora_for_peft_alone(pair: tuple[Any, Path], tmp_path: Path):
    check_lora(sk.nn.load_peft(decoder(), pair[1]), decoder(), tmp_path / "lora")


def gpt2() -> Any:
    torch.manual_seed(seeds.seed())
    config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config).eval()


OTHERS: dict[str, Any] = {
    "principal": (decoder, "*.q_proj", {"parametrization": "principal", "rank": 4}),
    "low_rank": (decoder, "*.q_proj", {"parametrization": "low_rank", "rank": 4}),
    "outputs": (decoder, ["*.q_proj", "*.embed_tokens"], {"side": "out", "block_size": 8}),
    "bfloat16": (lambda: decoder(dtype=torch.bfloat16).float(), "*.down_proj", {"block_size": 8}),
    "conv1d": (gpt2, ["*.c_attn", "*.mlp.c_proj"], {"block_size": 8, "modules_to_save": "*.ln_f"}),
    "convolution": (Images, ["first", "head"], {"parametrization": "householder", "reflections": 2}),
    "patches": (Images, "first", {"side": "patches", "block_size": 6}),
}


@pytest.mark.parametrize("kind", list(OTHERS))
def test_adapters_that_peft_has_no_place_for_are_lora_for_peft_alone(kind: str, tmp_path: Path):
    make, where, options = OTHERS[kind]
    ours = sk.nn.adapt(make().requires_grad_(False), where, **options)
    sk.nn.adapt(ours, where, "householder", name="second", reflections=2, side=options.get("side", "in"))
    check_lora(moved(ours), make(), tmp_path)


def test_lora_of_what_it_cannot_be_is_refused(tmp_path: Path):
    model = sk.nn.adapt(decoder(), "*.q_proj", block_size=8)
    given: Any
    for given in ({}, {"rank": 2, "tolerance": 0.1}, {"rank": 0}, {"tolerance": -1.0}):
        with pytest.raises(OptionError, match=r"rank|tolerance"):
            sk.nn.to_lora(model, **given)
    sk.nn.use_adapters(model, ())
    with pytest.raises(OptionError, match="off"):
        sk.nn.to_lora(model, rank=2)
    transposed = sk.nn.adapt(nn.Sequential(nn.ConvTranspose2d(4, 4, 1)), "*", block_size=2)
    with pytest.raises(OptionError, match="ConvTranspose2d at 0"):
        sk.nn.to_lora(transposed, rank=2)


def ours_without(model: Any) -> Any:
    """A decoder with the parameters that are not of adapters."""
    plain = decoder()
    plain.load_state_dict(sk.nn.base_state(model))
    return plain


def edited(folder: Path, **entries: Any) -> Path:
    """Changes the configuration of a folder."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder


def without(folder: Path, *keys: str, **others: Any) -> Path:
    """Changes tensors of a folder: drops those with ends in `keys`, and adds others."""
    file = folder / "adapter_model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if not key.endswith(keys)}
    save_file({**kept, **others}, file, metadata={"format": "pt"})
    return folder


MODEL = "base_model.model.model"
LAYER = f"{MODEL}.layers.0.self_attn.q_proj"
BAD: dict[str, tuple[str, Any, str]] = {
    "no folder": ("oft", lambda f: f / "nothing", r"huggingface_hub\."),
    "a file": ("oft", lambda f: f / "adapter_config.json", "to be a folder"),
    "no configuration": ("oft", lambda f: (f / "adapter_config.json").unlink() or f, r"needs adapter_config\.json"),
    "no tensors": ("oft", lambda f: (f / "adapter_model.safetensors").unlink() or f, r"\.bin"),
    "the folder above": ("oft", lambda f: f.parent, "folders peft"),
    "damaged tensors": ("oft", lambda f: (f / "adapter_model.safetensors").write_bytes(b"12") and f, "whole file"),
    "damaged json": ("oft", lambda f: (f / "adapter_config.json").write_text("{") and f, "whole file"),
    "a list": ("oft", lambda f: (f / "adapter_config.json").write_text("[]") and f, "no object"),
    "another method": ("oft", lambda f: edited(f, peft_type="LORA"), "LORA"),
    "the method of others": ("oft", lambda f: edited(f, peft_type="HRA"), "tensors of HRA"),
    "biases": ("oft", lambda f: edited(f, bias="all"), "bias"),
    "a setting": ("oft", lambda f: edited(f, coft="yes"), "coft"),
    "a shape": ("oft", lambda f: without(f, **{f"{LAYER}.oft_R.weight": torch.zeros(4, 27)}), r"oft_R of shape"),
    "no bound": ("oft", lambda f: edited(f, coft=True, eps=0.0), "bound > 0"),
    "sharing": ("oft", lambda f: edited(f, block_share=True), "oft_R of shape"),
    "reflectors": ("hra", lambda f: without(f, **{f"{LAYER}.hra_u": torch.ones(31, 4)}), "hra_u of shape"),
    "a scale": ("boft", lambda f: without(f, **{f"{LAYER}.boft_s": torch.ones(31, 1)}), "boft_s of shape"),
    "nan": ("hra", lambda f: without(f, **{f"{LAYER}.hra_u": torch.full((32, 4), torch.nan)}), "finite"),
    "zeros": ("hra", lambda f: without(f, **{f"{LAYER}.hra_u": torch.zeros(32, 4)}), "not zero"),
    "dependent": ("hra_gram_schmidt", lambda f: without(f, **{f"{LAYER}.hra_u": torch.ones(32, 3)}), "independent"),
    "no scale": ("boft", lambda f: without(f, "boft_s"), "boft_s"),
    "factors": ("boft", lambda f: without(f, **{f"{LAYER}.boft_R": torch.zeros(5, 8, 4, 4)}), "factors"),
    "another block size": ("boft", lambda f: edited(f, boft_block_size=8), "boft_block_size=8"),
    "another rank": ("hra", lambda f: edited(f, r=3), "r=3"),
    "more factors": ("boft_butterfly", lambda f: edited(f, boft_n_butterfly_factor=4), "boft_n_butterfly_factor"),
    "an old release": (
        "oft",
        lambda f: without(f, "weight", **{f"{LAYER}.oft_r": torch.zeros(4, 8, 8)}),
        r"before 0\.16",
    ),
    "a layer less": ("oft", lambda f: without(f, "1.self_attn.q_proj.oft_R.weight"), r"layers\.1\.self_attn\.q_proj"),
    "another layer": ("oft", lambda f: without(f, **{f"{MODEL}.up.oft_R.weight": torch.zeros(4, 28)}), r"model\.up"),
    "a layer without rotation": (
        "oft",
        lambda f: edited(without(f, **{f"{MODEL}.embed_tokens.oft_R.weight": torch.zeros(4, 28)}), target_modules="x"),
        "Embedding",
    ),
    "left over": ("oft", lambda f: without(f, **{f"{LAYER}.lora_A.weight": torch.zeros(4, 28)}), "lora_A"),
    "a part": ("hra_saved", lambda f: without(f, **{"base_model.model.lm_head.a": torch.zeros(1)}), "lm_head"),
}


@pytest.mark.parametrize("what", list(BAD))
def test_a_bad_folder_is_refused_and_changes_nothing(what: str, tmp_path: Path, butterflies: None):
    kind, spoil, word = BAD[what]
    folder = spoil(saved(trained(decoder(), CONFIGS[kind]()), tmp_path / "peft"))
    model = decoder()
    state, needs = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]
    with pytest.raises(StiefelkitError, match=word):
        sk.nn.load_peft(model, folder)
    assert not sk.nn.adapters(model)
    assert [p.requires_grad for p in model.parameters()] == needs
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_name_that_a_layer_has_is_refused_and_another_adds_one(tmp_path: Path):
    folder = saved(trained(decoder(), CONFIGS["oft"]()), tmp_path / "peft")
    model = sk.nn.load_peft(decoder(), folder)
    with pytest.raises(OptionError, match="name="):
        sk.nn.load_peft(model, folder)
    sk.nn.load_peft(model, folder, name="second")
    sk.nn.use_adapters(model, "second")
    assert_close(logits(model), logits(sk.nn.load_peft(decoder(), folder)))


def test_modules_to_save_are_trained_copies(tmp_path: Path):
    theirs = trained(decoder(), CONFIGS["hra_saved"]())
    model: Any = sk.nn.load_peft(decoder(), saved(theirs, tmp_path / "peft"))
    assert torch.equal(model.lm_head.copy.weight, theirs.base_model.model.lm_head.modules_to_save["default"].weight)
    with sk.nn.without_adapters(model):
        assert_close(logits(model), logits(decoder()), 0)


def test_a_classifier_of_peft_with_its_head_is_loaded_and_saved(tmp_path: Path):
    def classifier() -> Any:
        torch.manual_seed(seeds.seed())
        config = transformers.LlamaConfig(**SIZES, num_hidden_layers=1, num_labels=3, pad_token_id=0)
        return transformers.LlamaForSequenceClassification(config).eval()

    theirs = trained(classifier(), oft(task_type="SEQ_CLS"))
    ours = sk.nn.load_peft(classifier(), saved(theirs, tmp_path / "peft"))
    assert_close(logits(ours), logits(theirs))
    sk.nn.save_peft(ours, tmp_path / "ours", task_type="SEQ_CLS")
    assert_close(logits(peft.PeftModel.from_pretrained(classifier(), str(tmp_path / "ours")).eval()), logits(theirs))


def test_reflectors_as_peft_starts_them_are_loaded_as_the_identity_and_train(tmp_path: Path):
    theirs = peft.get_peft_model(decoder(), peft.HRAConfig(r=4, target_modules=TARGETS)).eval()
    ours = sk.nn.load_peft(decoder(), saved(theirs, tmp_path / "peft"))
    assert_close(logits(ours), logits(decoder()))
    ours(input_ids=TOKENS).logits.square().mean().backward()
    reflectors = [p for key, p in ours.named_parameters() if "rotation" in key]
    assert len(reflectors) == 4
    assert all(p.grad is not None and p.grad.any() for p in reflectors)


def test_an_adapter_of_another_name_is_in_a_folder_of_its_own(tmp_path: Path):
    theirs = peft.get_peft_model(decoder(), CONFIGS["oft"](), adapter_name="tuned")
    folder = saved(theirs, tmp_path / "peft")
    with pytest.raises(CheckpointError, match="tuned"):
        sk.nn.load_peft(decoder(), folder)
    assert {m.name for m in sk.nn.adapters(sk.nn.load_peft(decoder(), folder / "tuned", name="x")).values()} == {"x"}


@pytest.mark.parametrize("kind", ["oft", "boft", "hra"])
def test_tensors_of_half_precision_are_read(kind: str, tmp_path: Path):
    folder = saved(trained(decoder(), CONFIGS[kind]()), tmp_path / "peft")
    file = folder / "adapter_model.safetensors"
    save_file({key: value.bfloat16() for key, value in load_file(file).items()}, file, metadata={"format": "pt"})
    theirs = peft.PeftModel.from_pretrained(decoder(), str(folder)).eval()
    assert_close(logits(sk.nn.load_peft(decoder(), folder)), logits(theirs))


def test_the_table_names_what_the_installed_peft_has():
    from stiefelkit.nn.peft_formats import FORMATS

    for kind, form in FORMATS.items():
        fields = getattr(peft, f"{kind}Config").__dataclass_fields__
        assert {key: fields[key].default for key in form.settings} == {
            key: default for key, (default, _) in form.settings.items()
        }
        assert set(form.sizes) <= fields.keys()
