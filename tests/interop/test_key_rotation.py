"""Rotated queries and keys: attention, its cache and what is generated, and what is left behind afterwards."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from decoder_table import made

import stiefelkit as sk
from stiefelkit.errors import NotAFrameError, OptionError, ShapeError
from stiefelkit.testing import seeds

transformers: Any = pytest.importorskip("transformers")

TOKENS = torch.arange(12).view(2, 6)
FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "GPT2", "GPTNeoX"]


def decoder(name: str, attention: str = "sdpa") -> Any:
    model = made(name)[0]
    model.set_attn_implementation(attention)
    return model


@torch.no_grad()
def seen(model: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits without a cache, keys in the cache, and tokens that are generated with it."""
    cache = model(TOKENS, use_cache=True).past_key_values
    tokens = model.generate(TOKENS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return model(TOKENS, use_cache=False).logits, cache.layers[-1].keys, tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_holds_rotated_keys_and_all_else_is_as_it_was(name, attention):
    model, other = decoder(name, attention), decoder(name, attention)
    state, (logits, keys, tokens) = copy.deepcopy(model.state_dict()), seen(model)
    sites = sk.nn.rotation_sites(model)
    n = sites.heads[0].size
    for r in (None, [sk.init.haar((n, n), generator=seeds.generator(i)) for i in range(len(sites.heads))]):
        sk.nn.rotate_keys_(sites, r)
        last = sk.init.hadamard(n, random=False) if r is None else r[-1]
        for one in (model, copy.deepcopy(model)):
            now = seen(one)
            assert torch.dist(now[0], logits) <= 1e-6 * logits.norm()
            assert torch.dist(now[1], keys @ last.mT) <= 1e-12 * keys.norm()
            assert torch.equal(now[2], tokens)
        assert torch.dist(keys @ last.mT, keys) > 0.1 * keys.norm()
    assert model.state_dict().keys() == state.keys()
    assert torch.equal(seen(other)[1], keys)  # of another model in this process
    sk.nn.restore_keys_(sites)
    assert torch.equal(seen(model)[1], keys)
    assert model.config._attn_implementation == attention


def test_a_pickle_computes_the_same_in_another_process_and_a_file_is_the_plain_model(tmp_path):
    model = decoder("Llama")
    sk.nn.rotate_keys_(sk.nn.rotation_sites(model))
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, TOKENS, *seen(model)[:2])))
    code = """
import pickle, sys, torch
model, tokens, logits, keys = pickle.load(open(sys.argv[1], "rb"))
cache = model(tokens).past_key_values
print(torch.allclose(model(tokens).logits, logits), torch.allclose(cache.layers[-1].keys, keys))
"""
    words = [sys.executable, "-c", code, str(tmp_path / "model.pickle")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.split() == ["True", "True"]
    model.save_pretrained(tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.float64)
    sk.nn.rotate_keys_(sk.nn.rotation_sites(loaded))
    assert torch.equal(seen(loaded)[1], seen(model)[1])


@pytest.mark.parametrize("name", ["Falcon", "GPTNeo"])
def test_an_attention_that_is_looked_up_by_no_name_is_refused_and_left_as_it_was(name):
    model = decoder(name)
    before, modules = model(TOKENS).logits, [*model.modules()]
    with pytest.raises(OptionError, match="AttentionInterface"):
        sk.nn.rotate_keys_(sk.nn.rotation_sites(model))
    assert torch.equal(model(TOKENS).logits, before)
    assert [*model.modules()] == modules


def test_rotations_that_do_not_fit_are_refused():
    sites = sk.nn.rotation_sites(decoder("Llama"))
    n = sites.heads[0].size
    for error, r in ((ShapeError, torch.eye(4)), (NotAFrameError, 2 * torch.eye(n)), (OptionError, [torch.eye(n)])):
        with pytest.raises(error, match=r"^rotate_keys_ needs"):
            sk.nn.rotate_keys_(sites, r)
    assert not any(isinstance(module, sk.nn.KeyRotation) for module in sites.model.modules())
