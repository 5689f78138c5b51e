"""Adapters and rotations ask what a layer computes; what cannot be merged or turned exactly is refused first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from moved_adapters import drawn, turned
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.errors import NonFiniteError, OptionError, UnknownNameError
from stiefelkit.nn import OrthogonalAdapter, adapt, fold, rotate_
from stiefelkit.testing import seeds

CLOSE = 2e-6


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Respelled(nn.Linear):
    """Another forward, the same function."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + self.bias


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight


def hooked() -> nn.Module:
    layer = nn.Linear(8, 8)

    def double(module: nn.Module, args: Any, y: Any) -> Any:
        return 2 * y

    layer.register_forward_hook(double)
    return layer


def faking_quantization() -> nn.Module:
    from torch.ao.nn.qat import Linear
    from torch.ao.quantization import get_default_qat_qconfig

    return Linear(8, 8, qconfig=get_default_qat_qconfig("fbgemm"))


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hooks": (hooked, "hooks"),
    "a forward of its own": (lambda: Doubled(8, 8), "does more"),
    "fake quantization": (faking_quantization, "Linear"),
}


@pytest.mark.parametrize("act", ["merge", "fold"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_that_does_more_is_adapted_and_neither_merged_nor_folded(kind: str, act: str):
    make, word = LAYERS[kind]
    layer: Any = make().eval()
    x = drawn(3, 8)
    expected = layer(x)
    model: Any = adapt(nn.Sequential(layer), "*.weight", block_size=4).eval()
    torch.testing.assert_close(model(x), expected, rtol=0, atol=CLOSE)
    turned(model)
    before, state = model(x), {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(OptionError, match=word):
        fold(model) if act == "fold" else model[0].merge()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


@pytest.mark.parametrize("side", ["in", "out"])
def test_a_forward_that_only_spells_the_product_in_another_way_is_folded(side: str):
    model: Any = turned(adapt(nn.Sequential(Respelled(8, 8)), "*.weight", block_size=4, side=side)).eval()
    x = drawn(3, 8)
    before = model(x)
    torch.testing.assert_close(fold(model)(x), before, rtol=0, atol=CLOSE)


def test_an_adapter_of_outputs_turns_all_that_the_layer_gives():
    layer: Any = hooked()
    x = drawn(3, 8)
    torch.testing.assert_close(OrthogonalAdapter(layer, side="out", block_size=4)(x), layer(x), rtol=0, atol=CLOSE)


def test_a_rotation_is_not_adapted_and_goes_on_training():
    model: Any = adapt(nn.Sequential(nn.Linear(8, 8)), "*.weight", block_size=4)
    with pytest.raises(UnknownNameError, match="adapter"):
        adapt(model, "*.rotation.weight", block_size=4)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "0.rotation.parametrizations.weight.original0"
    ]


def test_a_tied_embedding_that_trains_is_not_frozen_by_its_other_name():
    model: Any = Tied()
    with pytest.raises(OptionError, match=r"embedding\.weight"):
        adapt(model, "head.weight", block_size=4)
    assert model.embedding.weight.requires_grad
    assert isinstance(model.head, nn.Linear)
    assert isinstance(adapt(model.requires_grad_(False), "head.weight", block_size=4).head, OrthogonalAdapter)


def test_a_rotation_that_is_not_finite_is_not_folded_into_a_frozen_weight():
    model: Any = adapt(nn.Sequential(nn.Linear(8, 8)), "*.weight", block_size=4)
    weight = model[0].layer.weight.clone()
    with torch.no_grad():
        sk.coordinates(model[0].rotation, "weight")["skew"].fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="finite"):
        fold(model)
    assert torch.equal(model[0].layer.weight, weight)


def test_merging_in_inference_mode_leaves_a_weight_that_inputs_have_gradients_by():
    adapter = OrthogonalAdapter(nn.Linear(8, 8), block_size=4).eval()
    with torch.inference_mode():
        adapter.merge()
    x = drawn(2, 8).requires_grad_()
    adapter(x).sum().backward()
    assert x.grad is not None


def frame(n: int) -> Tensor:
    return sk.init.haar((n, n), torch.float32, seeds.generator(1))


def test_a_layer_that_reads_and_writes_gets_both_products():
    layer, r = nn.Linear(6, 6), frame(6)
    w, b = layer.weight.detach().clone(), layer.bias.detach().clone()
    rotate_(r, readers=[layer], writers=[layer])
    torch.testing.assert_close(layer.weight, r @ w @ r.mT, rtol=0, atol=CLOSE)
    torch.testing.assert_close(layer.bias, r @ b, rtol=0, atol=CLOSE)


def test_one_weight_in_two_roles_is_refused_before_anything_is_written():
    reader, writer = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    writer.weight = reader.weight
    w = reader.weight.detach().clone()
    with pytest.raises(OptionError, match="share"):
        rotate_(frame(6), readers=[reader], writers=[writer])
    assert torch.equal(reader.weight, w)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm: Any = norm
        self.embedding, self.head = nn.Embedding(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x)))


def test_a_norm_with_a_scale_is_folded_where_it_is_named_and_refused_where_it_is_forgotten():
    model: Any = Normed(nn.RMSNorm(6))
    nn.init.uniform_(model.norm.weight, 0.5, 2)
    x = torch.arange(5)
    before = model(x)
    with pytest.raises(OptionError, match="norm"):
        rotate_(frame(6), readers=[model.head], writers=[model.embedding], model=model)
    assert torch.equal(model(x), before)
    rotate_(frame(6), norms={model.norm: [model.head]}, writers=[model.embedding], model=model)
    torch.testing.assert_close(model(x), before, rtol=0, atol=4 * CLOSE)
    assert torch.equal(model.norm.weight, torch.ones(6))
