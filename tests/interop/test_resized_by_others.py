"""Libraries that resize a layer or merge into it by writing to `weight.data`: refused, or told."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit.errors import OptionError

transformers = pytest.importorskip("transformers", reason="needs the extra [interop]")
peft = pytest.importorskip("peft", reason="needs the extra [interop]")

TOKENS = torch.arange(12).reshape(1, -1)
ADAPTED: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(target_modules=["q", "v"], init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(target_modules=["q", "v"], init_lora_weights=False, use_dora=True),
    "oft": lambda: peft.OFTConfig(target_modules=["q", "v"], oft_block_size=4),
}


def llama(tie: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    config = transformers.LlamaConfig(vocab_size=32, pad_token_id=None, tie_word_embeddings=tie, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("size", [40, 24])
@pytest.mark.parametrize("tie", [False, True])
def test_tokens_are_not_added_to_an_orthogonal_embedding_until_it_is_baked(tie, size):
    net = llama(tie)
    sk.orthogonal(net.model.embed_tokens, "weight")
    before, state = net(TOKENS).logits, copy.deepcopy(net.state_dict())
    with pytest.raises(OptionError, match=rf"needs num_embeddings=32 while its weight is orthogonal, got {size}"):
        net.resize_token_embeddings(size)
    assert net.config.vocab_size == 32
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert torch.equal(net(TOKENS).logits, before)
    sk.bake(net).resize_token_embeddings(size)
    assert net.model.embed_tokens.weight.shape == (size, 16)
    sk.orthogonal(net.model.embed_tokens, "weight")
    assert sk.drift(net)["model.embed_tokens.weight"].bits_lost < 2


def test_a_last_layer_that_is_resized_is_told_to_be_plain_and_one_that_is_not_stays():
    net = llama()
    sk.orthogonal(net, "lm_head.weight")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.resize_token_embeddings(32)
    assert "lm_head.weight" in sk.drift(net)
    with pytest.warns(UserWarning, match="lm_head was orthogonal and is a plain copy of another size now"):
        net.resize_token_embeddings(40)
    assert not sk.drift(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sk.orthogonal(net, "lm_head.weight")
        net.lm_head = nn.Linear(16, 24)  # by somebody who says so
    assert not sk.drift(net)


def test_an_orthogonal_weight_is_not_tied_over():
    net = llama(tie=True)
    sk.orthogonal(net.lm_head, "weight")
    before = net.lm_head.weight.detach().clone()
    with pytest.raises(sk.errors.NotAFrameError):
        net.tie_weights()
    assert torch.equal(net.lm_head.weight, before)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v, self.q = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(torch.tanh(self.v(x)))


def adapted(kind: str) -> Any:
    torch.manual_seed(0)
    net = Two()
    sk.orthogonal(net.q, "weight")
    model = peft.get_peft_model(net, ADAPTED[kind]()).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("kind", ADAPTED)
def test_peft_does_not_merge_into_an_orthogonal_weight_and_does_into_a_baked_one(kind):
    x, model = torch.randn(3, 8), adapted(kind)
    expected = model(x)
    model.merge_adapter()
    with pytest.raises(
        OptionError, match=r"needs a plain weight to be merged into, got Linear.weight.*unmerge_adapter"
    ):
        model(x)
    model.unmerge_adapter()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(OptionError, match="needs a plain weight to be merged into"):
        model.merge_and_unload()
    model.unmerge_adapter()
    merged = sk.bake(model).merge_and_unload()
    torch.testing.assert_close(merged(x), expected, rtol=1e-4, atol=1e-5)
    assert not sk.drift(merged)


def test_peft_unloads_what_it_has_not_merged():
    x, model = torch.randn(3, 8), adapted("lora")
    with model.disable_adapter():
        expected = model(x)
    plain = model.unload()
    torch.testing.assert_close(plain(x), expected)
    assert sk.drift(plain)["q.weight"].bits_lost < 2
