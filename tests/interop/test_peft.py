"""Layers of PEFT inside and around our adapters: each works, or is refused in a sentence."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.errors import OptionError
from stiefelkit.testing import seeds

peft = pytest.importorskip("peft", reason="needs the extra [interop]")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def turned(model: Any) -> Any:
    with torch.no_grad():
        for adapter in sk.nn.adapters(model).values():
            for c in sk.coordinates(adapter.rotation, "weight").values():
                c.normal_(0, 0.3)
    return model


def lora(targets, **settings):
    return peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False, **settings)


X = torch.randn(4, 8, generator=seeds.generator())


def test_all_linear_takes_no_rotation_of_ours():
    net = turned(sk.nn.adapt(Net(), "a.weight", block_size=4))
    before = net(X)
    model: Any = peft.get_peft_model(net, peft.LoraConfig(target_modules="all-linear"))
    torch.testing.assert_close(model(X), before, rtol=0, atol=1e-6)
    names = [name for name, _ in model.named_parameters()]
    assert any("lora" in name for name in names)
    assert not any("lora" in name and "rotation" in name for name in names)


def test_what_lora_adds_inside_an_adapter_is_merged_and_folded_after_lora_is():
    net = turned(sk.nn.adapt(Net(), ["a.weight", "b.weight"], block_size=4))
    model: Any = peft.get_peft_model(net, lora(["layer"])).eval()
    before = model(X)
    for act in (lambda: next(iter(sk.nn.adapters(model).values())).merge(), lambda: sk.nn.fold(model)):
        with pytest.raises(OptionError, match=r"base_layer\.weight beside them; merge it into the layer first"):
            act()
    torch.testing.assert_close(model(X), before, rtol=0, atol=0)
    plain = model.merge_and_unload()
    torch.testing.assert_close(plain(X), before, rtol=0, atol=4e-6)
    torch.testing.assert_close(sk.nn.fold(plain)(X), before, rtol=0, atol=4e-6)


def test_an_adapter_of_outputs_turns_what_lora_adds():
    net: Any = sk.nn.adapt(Net(), "b.weight", block_size=4, side="out")
    model: Any = peft.get_peft_model(net, lora(["layer"])).eval()
    inner = net.b.layer
    h = net.a(X).relu()
    torch.testing.assert_close(model(X), inner(h), rtol=0, atol=1e-6)


def test_a_layer_that_peft_merges_into_is_not_adapted():
    model: Any = peft.get_peft_model(Net(), lora(["a"])).eval()
    before = model(X)
    with pytest.raises(OptionError, match="adapt first, so that PEFT finds a plain layer in each adapter"):
        sk.nn.adapt(model, "*base_layer.weight", block_size=4)
    torch.testing.assert_close(model.merge_and_unload()(X), before, rtol=0, atol=2e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_is_adapted_generates_and_is_folded(tied):
    transformers = pytest.importorskip("transformers", reason="needs the extra [interop]")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    model: Any = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    tokens = torch.arange(1, 9)[None]
    sk.nn.adapt(turned(sk.nn.adapt(model, "*_proj.weight")), ["lm_head.weight"])
    turned(model)
    before = model(tokens).logits
    words = model.generate(tokens, max_new_tokens=4, do_sample=False)
    sk.nn.fold(model)
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), words)
