"""Layers of PEFT inside and around our adapters: each works, or is refused in a sentence."""

import copy
from typing import Any

import pytest
import torch
from decoder_table import made
from moved_adapters import moved, turned
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
        with pytest.raises(OptionError, match="merge"):
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
    with pytest.raises(OptionError, match="adapt first"):
        sk.nn.adapt(model, "*base_layer.weight", block_size=4)
    torch.testing.assert_close(model.merge_and_unload()(X), before, rtol=0, atol=2e-6)


def test_a_layer_of_peft_is_adapted_as_a_whole_and_stays_adapted_when_lora_is_merged():
    model: Any = peft.get_peft_model(Net(), lora(["a"])).eval()
    before = model(X)
    sk.nn.adapt(model, "*.a", block_size=4)
    torch.testing.assert_close(model(X), before, rtol=0, atol=2e-6)
    turned(model)
    apart = model(X)
    assert torch.dist(apart, before) > 0.05 * before.norm()
    with pytest.raises(OptionError, match="merge"):
        sk.nn.fold(model)
    plain = model.merge_and_unload()
    torch.testing.assert_close(plain(X), apart, rtol=0, atol=4e-6)
    torch.testing.assert_close(sk.nn.fold(plain)(X), apart, rtol=0, atol=4e-6)
    assert type(plain.a) is nn.Linear


def test_an_adapter_or_a_hadamard_layer_is_no_layer_that_peft_takes_but_the_plain_one_inside_is():
    net: Any = Net()
    net.a = sk.nn.HadamardLinear.around(net.a)
    for refused in (sk.nn.adapt(Net(), "a.weight", block_size=4), net):
        with pytest.raises(ValueError, match="is not supported"):
            peft.get_peft_model(refused, lora(["a"]))
    oft = peft.OFTConfig(target_modules=["a.linear"], oft_block_size=4, use_cayley_neumann=False)
    for config in (lora(["a.linear"]), oft):
        model: Any = peft.get_peft_model(copy.deepcopy(net), config).eval()
        for name, p in model.named_parameters():
            p.data.add_(0.1 * torch.randn_like(p) if "oft_R" in name else 0)
        apart = model(X)
        torch.testing.assert_close(model.merge_and_unload()(X), apart, rtol=0, atol=4e-6)


def test_layers_of_peft_that_read_indices_or_images_are_known_by_the_layer_inside():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.conv = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.table(x).mT)

    model: Any = peft.get_peft_model(Mixed(), lora(["table", "conv"])).eval()
    x = torch.arange(9)
    before = model(x)
    sk.nn.adapt(model, "*.table", side="out", block_size=4)
    sk.nn.adapt(model, "*.conv", block_size=4)
    torch.testing.assert_close(model(x), before, rtol=0, atol=4e-6)
    apart = turned(model)(x)
    assert torch.dist(apart, before) > 0.05 * before.norm()
    torch.testing.assert_close(sk.nn.fold(model.merge_and_unload())(x), apart, rtol=0, atol=2e-5)


def frozen(kind: str) -> Any:
    pytest.importorskip("transformers", reason="needs the extra [interop]")
    return made(kind.split()[-1], torch.float32, tie_word_embeddings=kind != "Llama")[0].requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "where", "options"),
    [
        ("GPT2", ["*.c_attn", "*.c_proj", "*.c_fc"], {}),  # Conv1D
        ("GPT2", "*.c_attn", {"side": "out"}),
        ("GPT2", "*.wte", {"side": "out"}),  # tied with the head
        ("GPT2", "*.c_fc", {"parametrization": "principal", "rank": 4}),
        ("Llama", "*.mlp.*_proj", {"parametrization": "low_rank", "rank": 4, "inner": "cayley"}),
        ("Llama", "*.embed_tokens", {"side": "out", "shared": True}),
        ("tied Llama", ["*_proj", "lm_head"], {}),
    ],
)
def test_layers_of_transformers_are_adapted_generate_and_are_folded(kind: str, where: Any, options: dict[str, Any]):
    model, tokens = frozen(kind), torch.arange(1, 9)[None]
    base = {key: value.clone() for key, value in model.state_dict().items()}
    before = model(tokens).logits
    sk.nn.adapt(model, where, **options)
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=1e-5)
    moved(model, "default")
    logits = model(tokens).logits
    assert torch.dist(logits, before) > 0.01 * before.norm()
    assert {key: value.shape for key, value in sk.nn.base_state(model).items()} == {
        key: value.shape for key, value in base.items()
    }
    with sk.nn.without_adapters(model):
        assert torch.equal(model(tokens).logits, before)
    model.train()(tokens, labels=tokens).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    words = model.eval().generate(tokens, max_new_tokens=4, do_sample=False)
    sk.nn.fold(model)
    torch.testing.assert_close(model(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), words)
    assert model.state_dict().keys() == base.keys()


def test_one_decoder_serves_several_tasks_by_name():
    model, tokens = frozen("Llama"), torch.arange(1, 9)[None]
    before = model(tokens).logits
    sk.nn.adapt(model, "*.q_proj", name="summaries", modules_to_save="lm_head")
    sk.nn.adapt(model, ["*.q_proj", "*.v_proj"], "principal", rank=4, name="poems")
    found = {}
    for name in ("summaries", "poems"):
        moved(model, name)
        sk.nn.use_adapters(model, name)
        found[name] = model(tokens).logits
    assert torch.dist(found["summaries"], found["poems"]) > 0.01 * before.norm()
    state = sk.nn.adapter_state(model, "poems")
    assert all(key.startswith("model.layers.") for key in state)
    other = sk.nn.adapt(frozen("Llama"), ["*.q_proj", "*.v_proj"], "principal", rank=4)
    sk.nn.load_adapter_state(other, state)
    torch.testing.assert_close(other(tokens).logits, found["poems"], rtol=0, atol=1e-6)
    sk.nn.delete_adapter(model, "poems")
    sk.nn.use_adapters(model, "summaries")
    torch.testing.assert_close(model(tokens).logits, found["summaries"], rtol=0, atol=0)
    sk.nn.delete_adapter(model, "summaries")
    assert torch.equal(model(tokens).logits, before)
