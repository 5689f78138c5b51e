"""Weights of transformers that hold several matrices: a frame of each, and a word where one is made of all."""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers_at_hand import descend

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.metrics import orthogonality_error
from stiefelkit.testing import seeds

transformers = pytest.importorskip("transformers", reason="needs the extra [interop]")

PAGE = Path(__file__).parents[2] / "docs" / "gallery" / "networks.md"
SMALL = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, "n_positions": 16}


def gpt() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL)).eval()


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 32), (32, 8), (8, 8)])
def test_by_the_gain_rms_conv1d_keeps_the_root_mean_square_of_inputs_that_it_does_not_drop(inputs, outputs):
    layer = transformers.pytorch_utils.Conv1D(outputs, inputs).double()
    sk.orthogonal(layer, "weight", gain="rms", blocks=1)
    x = torch.randn(5, outputs, dtype=torch.float64, generator=seeds.generator()) @ layer.weight.detach().mT
    y = layer(x) - layer.bias
    torch.testing.assert_close(y.square().mean(-1), x.square().mean(-1))


def test_by_the_gain_rms_experts_whose_weights_are_inputs_by_outputs_do_so_too():
    config = transformers.GptOssConfig(hidden_size=8, intermediate_size=16, num_local_experts=3)
    experts: Any = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(config).double()
    torch.nn.init.normal_(experts.gate_up_proj, generator=seeds.generator())
    sk.orthogonal(experts, "gate_up_proj", gain="rms")
    w = experts.gate_up_proj.detach()
    torch.testing.assert_close(w @ w.mT, torch.eye(8, dtype=torch.float64).expand(3, 8, 8) * 32 / 8)


def worst(parts: Any) -> float:
    tall = [w.detach() if w.shape[0] >= w.shape[1] else w.detach().mT for w in parts]
    return max(orthogonality_error(w).item() for w in tall)


def trained(net: Any, optimizer: Any) -> list[float]:
    tokens = torch.arange(12).reshape(1, -1)
    return descend(optimizer, lambda: net(tokens, labels=tokens).loss, 5)


def test_what_the_page_shows_of_gpt2_runs_and_gives_frames_of_q_k_and_v():
    (code,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    held: dict[str, Any] = {"sk": sk, "torch": torch}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        exec(code, held)
    losses = trained(held["gpt"], held["optimizer"])
    assert losses[-1] < losses[0]
    for block in held["gpt"].transformer.h:
        assert worst(block.attn.c_attn.weight.chunk(3, 1)) < 1e-6
        assert worst([block.attn.c_proj.weight]) < 1e-6
    assert max(drift.bits_lost for drift in sk.drift(held["gpt"]).values()) < 2


@pytest.mark.parametrize("name", ["cayley", "stiefel"])
def test_each_head_of_gpt2_is_a_frame_and_what_it_writes_is(name):
    net = gpt()
    sk.orthogonal(net, "*.c_attn.weight", name, blocks=12, dim=1)
    sk.orthogonal(net, "*.attn.c_proj.weight", name, blocks=4)
    groups = sk.optim.parameter_groups(net, lr=1e-2)
    trained(net, sk.optim.CayleyAdam(groups) if name == "stiefel" else torch.optim.AdamW(groups))
    for block in net.transformer.h:
        assert worst(block.attn.c_attn.weight.chunk(12, 1)) < 2e-6
        assert worst(block.attn.c_proj.weight.chunk(4, 0)) < 2e-6
    tokens = torch.arange(8).reshape(1, -1)
    expected = net(tokens).logits
    twin = copy.deepcopy(net)
    twin.load_state_dict(net.state_dict())
    with sk.grouped(twin):
        assert torch.allclose(twin(tokens).logits, expected, atol=1e-5)
    assert torch.allclose(sk.bake(net)(tokens).logits, expected, atol=1e-5)


def test_one_frame_of_q_k_and_v_is_warned_about_and_that_of_an_mlp_is_not():
    with pytest.warns(UserWarning, match=r"c_attn.weight and|c_attn.weight: 3 square") as caught:
        sk.orthogonal(gpt(), where="transformer.h.*.weight")
    (said,) = [str(warning.message) for warning in caught]
    assert "blocks=3, dim=1 makes a frame of each" in said
    assert "c_fc" not in said
    with pytest.warns(UserWarning, match="blocks=3, dim=1"):
        sk.orthogonal(gpt().transformer.h[0].attn.c_attn, "weight")


def test_layers_called_by_what_they_hold_are_warned_about():
    neox = transformers.GPTNeoXConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64, vocab_size=32
    )
    net: Any = transformers.GPTNeoXModel(neox)
    with pytest.warns(UserWarning, match=r"query_key_value.*blocks=3 \* heads of each head's"):
        sk.orthogonal(copy.deepcopy(net), "*.query_key_value.weight")
    sk.orthogonal(net, "*.query_key_value.weight", blocks=12)  # q, k and v alternate from head to head
    fused = net.layers[0].attention.query_key_value.weight
    assert worst(fused.reshape(4, 3, 8, 32)[:, 1].unbind()) < 1e-6
    phi = transformers.Phi3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=1, intermediate_size=48
    )
    phi.vocab_size, phi.pad_token_id = 32, None
    net = transformers.Phi3Model(phi)
    with pytest.warns(UserWarning, match=r"qkv_proj.weight.*blocks=\(size, size, \.\.\.\)"):
        sk.orthogonal(copy.deepcopy(net), "*.qkv_proj.weight")
    with pytest.warns(UserWarning, match="gate and up"):
        sk.orthogonal(copy.deepcopy(net), "*.gate_up_proj.weight")
    sk.orthogonal(net, "*.qkv_proj.weight", blocks=(32, 8, 8))
    sk.orthogonal(net, "*.gate_up_proj.weight", blocks=2)
    assert worst(net.layers[0].self_attn.qkv_proj.weight.split((32, 8, 8))) < 1e-6
    assert worst(net.layers[0].mlp.gate_up_proj.weight.chunk(2)) < 1e-6


def test_an_embedding_with_a_row_for_padding_is_refused_before_anything_is_written():
    config = transformers.BertConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, vocab_size=32
    )
    net: Any = transformers.BertModel(config)
    with pytest.raises(errors.OptionError, match=r"word_embeddings.weight with padding_idx=0"):
        sk.orthogonal(net, "*.weight")
    assert not sk.drift(net)


@pytest.mark.parametrize("options", [{"where": "lm_head"}, {"where": "*.c_attn", "modules_to_save": "lm_head"}])
def test_tying_again_leaves_an_adapted_model_as_it_is(options: Any):
    net, tokens = gpt().requires_grad_(False), torch.arange(12).reshape(1, -1)
    sk.nn.adapt(net, block_size=8, **options)
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.ones_like(p).cumsum(-1).sin())
    before = net(tokens).logits
    net.tie_weights()
    assert torch.equal(net(tokens).logits, before)
