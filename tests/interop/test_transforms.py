"""Rotated decoders in files: a plain load, compressed-tensors alone and `load_transforms` compute the same."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_laws import logits, tiny_decoder
from decoder_table import made

import stiefelkit as sk
from stiefelkit.errors import OptionError
from stiefelkit.testing import seeds

transformers: Any = pytest.importorskip("transformers")


def rotated(family: str, dtype: torch.dtype = torch.float64, inner: int = 64, **options: Any) -> tuple[Any, Any]:
    """A decoder with R1, R2 and R4, and its logits before."""
    model, before = made(family, dtype, intermediate_size=inner, n_inner=inner, **options)
    sites = sk.nn.rotation_sites(model)
    r, heads = (sk.init.haar((n, n), generator=seeds.generator()) for n in (sites.size, sites.heads[0].size))
    sk.nn.rotate_(r, sites=sites, heads=heads, online=True)
    return model, before


def assert_close(a: Any, before: torch.Tensor, bound: float) -> None:
    assert torch.dist(logits(a).double(), before.double()) <= bound * before.norm()


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3"])
def test_compressed_tensors_alone_reproduces_the_logits_and_so_does_a_plain_load(family, is_tied, tmp_path):
    transform = pytest.importorskip("compressed_tensors.transform", reason="needs the extra [serve]")
    model, before = rotated(family, tie_word_embeddings=is_tied)
    exact, config = logits(model), copy.deepcopy(vars(model.config))
    sk.nn.save_transforms(model, tmp_path / "out")
    assert vars(model.config).keys() == config.keys()
    assert model.config.stiefelkit_online == config["stiefelkit_online"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    theirs, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True, dtype=torch.float64)
    assert not any(info.values())
    assert_close(theirs, before, 1e-6)
    ours: Any = sk.nn.load_transforms(copy.deepcopy(theirs))
    assert_close(ours, exact, 1e-12)
    assert not hasattr(ours.config, "transform_config")
    transform.apply_transform_config(theirs, transform.TransformConfig(**theirs.config.transform_config))
    assert_close(theirs, before, 1e-6)
    assert_close(theirs, exact, 1e-12)
    seen: Any = []
    theirs.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ours.model.layers[0].mlp.down_proj.linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for model in (theirs, ours):
        logits(model)
    assert torch.dist(*seen) <= 1e-12 * seen[0].norm()  # the layer reads what is to be rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_fewer_digits_are_rounded_once(dtype, tmp_path):
    model, before = rotated("Llama", dtype)
    sk.nn.save_transforms(model, tmp_path / "out")
    plain = type(model).from_pretrained(tmp_path / "out", dtype=dtype)
    for one in (plain, sk.nn.load_transforms(copy.deepcopy(plain))):
        assert_close(one, before, 1e-5 if dtype == torch.float32 else 0.1)


def test_what_no_plain_load_or_no_scheme_computes_is_refused_before_anything_is_written(tmp_path):
    with_keys = rotated("Llama")[0]
    sk.nn.rotate_keys_(sk.nn.rotation_sites(with_keys))
    cases: Any = (
        ("48", rotated("Llama", inner=48)[0]),
        (r"Conv1D|LayerNorm", rotated("GPT2")[0]),
        ("LayerNorm", rotated("GPTNeoX")[0]),
        ("OrthogonalAdapter", sk.nn.adapt(rotated("Llama")[0], "*.q_proj", block_size=8)),
        ("Rotated", sk.nn.rotated(tiny_decoder("LlamaModel"))),
        ("restore_keys_", with_keys),
    )
    for word, model in cases:
        with pytest.raises(OptionError, match=word):
            sk.nn.save_transforms(model, tmp_path / "out")
    assert not [*tmp_path.iterdir()]
    model = rotated("Llama")[0]
    for entry in (None, {"config_groups": {"R1": {"type": "hadamard"}}}):
        model.config.transform_config = entry
        with pytest.raises(OptionError, match="transform"):
            sk.nn.load_transforms(model)


def test_one_listing_of_the_page_learns_folds_saves_and_serves(monkeypatch, tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the extra [serve]")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text()
    (code,) = (c for c in re.findall(r"^```py\n(.*?)^```", page, re.M | re.S) if "compressed_tensors" in c)
    assert len(code.splitlines()) <= 25
    names: dict[str, Any] = {}
    exec(compile(code, "language-models.md", "exec"), names)
    assert torch.dist(names["served"](names["tokens"]).logits, names["before"]) <= 1e-5 * names["before"].norm()
