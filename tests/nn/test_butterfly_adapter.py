"""Butterfly adapters: the identity at first, a rotation by m factors after training, and one matrix for inference."""

import copy
from typing import Any

import pytest
import torch
from moved_adapters import drawn
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.errors import OptionError
from stiefelkit.testing import seeds

FACTORS = pytest.mark.parametrize("factors", [1, 2, 3])
SIDES = pytest.mark.parametrize("side", ["in", "patches"])


def made(factors: int = 2, side: str = "in", is_moved: bool = True, **options: Any) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(seeds.seed())
    layer = nn.Linear(16, 6) if side == "in" else nn.Conv2d(4, 6, 2)
    x = drawn(5, 16) if side == "in" else drawn(3, 4, 5, 5)
    one = sk.nn.ButterflyAdapter(copy.deepcopy(layer), block_size=4, factors=factors, side=side, **options)
    with torch.no_grad():
        for key, p in enumerate(one.parameters()):
            if p.requires_grad and is_moved:
                p.add_(0.3 * drawn(*p.shape, key=key + 1))
    return layer, one, x


@FACTORS
@SIDES
def test_at_first_the_layer_does_what_it_did(factors: int, side: str):
    layer, one, x = made(factors, side, is_moved=False)
    torch.testing.assert_close(one(x), layer(x), rtol=0, atol=2e-6)


@FACTORS
@SIDES
@pytest.mark.parametrize("scaled", [True, False])
def test_one_matrix_does_what_the_factors_do(factors: int, side: str, scaled: bool):
    layer, one, x = made(factors, side, scaled=scaled)
    assert torch.dist(one(x), layer(x)) > 0.1 * layer(x).norm()
    r = one.rotation.matrix.double()
    assert torch.dist(r.mT @ r, torch.eye(16).double()) <= 2e-6
    w = layer.weight.double().flatten(1) @ r
    w = w * one.scale[:, None] if scaled else w
    torch.testing.assert_close(one.weight.double().flatten(1), w, rtol=0, atol=1e-6)
    torch.testing.assert_close(one.folded()(x), one(x), rtol=0, atol=4e-6)


def test_factors_mix_ever_more_blocks():
    for factors, width in ((1, 4), (2, 8), (3, 16)):
        r = made(factors)[1].rotation.matrix
        assert ((r.abs() > 0).sum(1) == width).all()


@FACTORS
def test_all_that_is_trained_has_gradients_and_frames_stay(factors: int):
    _, one, x = made(factors)
    optimizer = torch.optim.Adam([p for p in one.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        one(x).pow(4).mean().backward()
        assert all(p.grad is not None and p.grad.any() for p in one.parameters() if p.requires_grad)
        optimizer.step()
    assert all(d.bits_lost < 1 for d in sk.drift(one).values())
    assert not one.layer.weight.requires_grad


def test_a_model_is_adapted_saved_apart_and_folded():
    layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    net, other = (sk.nn.adapt(copy.deepcopy(layers), "*", "butterfly", block_size=2, factors=3) for _ in range(2))
    with torch.no_grad():
        for key, p in enumerate(p for p in net.parameters() if p.requires_grad):
            p.add_(0.1 * drawn(*p.shape, key=key))
    x = drawn(3, 16)
    sk.nn.load_adapter_state(other, sk.nn.adapter_state(net))
    torch.testing.assert_close(other(x), net(x), rtol=0, atol=0)
    torch.testing.assert_close(sk.nn.fold(other)(x), net(x), rtol=0, atol=4e-6)


@FACTORS
@SIDES
def test_an_adapter_made_on_meta_or_emptied_computes_what_it_loads(factors: int, side: str):
    layer, one, x = made(factors, side)
    options: Any = {"block_size": 4, "factors": factors, "side": side}
    on_meta = sk.nn.ButterflyAdapter(copy.deepcopy(layer).to("meta"), **options)
    for other in (on_meta, copy.deepcopy(one).to("meta")):
        other.to_empty(device="cpu").load_state_dict(one.state_dict())
        assert torch.equal(other(x), one(x))
        assert torch.equal(other.rotation.matrix, one.rotation.matrix)


def test_an_adapter_of_a_model_that_does_not_train_does_not_train():
    net = sk.nn.adapt(nn.Sequential(nn.Linear(16, 4)).eval(), "*", block_size=4, dropout=0.5)
    assert not any(m.training for m in net.modules())


@pytest.mark.parametrize(
    "options", [{"factors": 4}, {"factors": 2, "block_size": 1}, {"block_size": 3}, {"foo": 1}, {"side": "out"}]
)
def test_what_does_not_fit_is_refused_and_the_layer_stays(options: dict[str, Any]):
    layer = nn.Linear(16, 4)
    with pytest.raises(OptionError):
        sk.nn.ButterflyAdapter(layer, **options)
    assert layer.weight.requires_grad
