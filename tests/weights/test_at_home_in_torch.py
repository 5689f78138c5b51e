"""What torch's own parametrizations can do, orthogonal weights can: docs/at-home-in-torch.md, row by row."""

import copy
import pickle
from typing import Any

import pytest
import torch
from every_map import close, make, over_all_maps, squares
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import stiefelkit as sk
from stiefelkit import errors


@over_all_maps
def test_attached_the_layer_is_its_class_with_one_weight_computed(name, dtype):
    layer, plain = make(name, dtype), nn.Linear(4, 4, dtype=dtype)
    assert isinstance(layer, nn.Linear)
    assert parametrize.is_parametrized(layer)
    assert parametrize.is_parametrized(layer, "weight")
    assert not parametrize.is_parametrized(layer, "bias")
    assert parametrize.type_before_parametrizations(layer) is nn.Linear
    inside = "parametrizations.weight.original"
    assert {key.rstrip("0123456789") for key, _ in layer.named_parameters()} == {"bias", inside}
    assert layer.weight.shape == plain.weight.shape
    assert layer.weight.dtype == plain.weight.dtype
    assert not layer.weight.is_leaf
    squares(layer(torch.ones(2, 4, dtype=dtype))).backward()
    assert all(p.grad is not None for p in layer.parameters())
    for mode in (False, True):
        assert all(module.training == mode for module in layer.train(mode).modules())


@pytest.mark.slow
@over_all_maps
def test_detached_by_torch_it_is_a_plain_parameter_and_the_copy_keeps_its_map(name, dtype):
    layer = make(name, dtype)
    twin, w = copy.deepcopy(layer), layer.weight.detach().clone()
    with pytest.raises(ValueError, match="sequence of tensors"):
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert torch.equal(layer.weight, w)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.Linear
    assert isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer.weight, w)
    assert parametrize.is_parametrized(twin, "weight")
    assert torch.equal(twin.weight, w)
    sk.orthogonal(layer, "weight")
    assert list(sk.drift(layer)) == ["weight"]


class Scale(nn.Module):
    def forward(self, w):
        return 2 * w

    def right_inverse(self, w):
        return w / 2


@over_all_maps
def test_parametrizations_stack_on_top(name, dtype):
    layer = make(name, dtype)
    w = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", Scale())
    assert close(layer.weight, 2 * w)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.weight, layer.weight)
    if layer.parametrizations.weight.param.traits.invertible:
        layer.weight = 2 * w
        assert close(layer.weight, 2 * w)
    parametrizations.spectral_norm(layer.eval())
    assert close(layer.weight, w, 0.2 if name == "margin" else 1e-5)
    squares(layer(torch.ones(2, 4, dtype=dtype))).backward()


@over_all_maps
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_map_on_top_of_a_norm_is_refused_and_leaves_the_weight_alone(norm, name, dtype):
    layer = norm(nn.Linear(4, 4, dtype=dtype))
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(errors.StiefelkitError):
        sk.orthogonal(layer, "weight", name)
    cls = sk.available()[name]
    with pytest.raises(errors.OptionError, match="first parametrization"):
        parametrize.register_parametrization(layer, "weight", cls((4, 4), dtype=dtype), unsafe=True)
    assert len(layer.parametrizations.weight) == 1
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


@over_all_maps
def test_copies_deep_and_pickled_train_alone_and_shallow_ones_together(name, dtype):
    layer = make(name, dtype)
    w = layer.weight.detach().clone()
    replicas = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for replica in (*replicas, copy.copy(layer)):
        assert torch.equal(replica.weight, w)
        assert type(replica) is not type(layer)
        assert parametrize.type_before_parametrizations(replica) is nn.Linear
    for replica in replicas:
        with torch.no_grad():
            for c in sk.coordinates(replica, "weight").values():
                c.neg_()
    assert torch.equal(layer.weight, w)
    shallow = copy.copy(layer)
    with torch.no_grad():
        for c in sk.coordinates(shallow, "weight").values():
            c.neg_()
    assert torch.equal(shallow.weight, layer.weight)


@over_all_maps
def test_cached_the_weight_is_computed_once_and_its_gradient_gathered(name, dtype, monkeypatch):
    layer = make(name, dtype)
    map = layer.parametrizations.weight.param
    calls = []
    forward = map.forward
    monkeypatch.setattr(map, "forward", lambda *coordinates: calls.append(1) or forward(*coordinates))
    x = torch.ones(2, 4, dtype=dtype)
    with parametrize.cached():
        assert layer.weight is layer.weight
        squares(layer(layer(x))).backward()
    assert len(calls) == 1
    assert layer.weight is not layer.weight
    once = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    squares(layer(layer(x))).backward()
    for p, expected in zip(layer.parameters(), once, strict=True):
        assert close(p.grad, expected)


@over_all_maps
def test_registered_by_torchs_own_function_it_is_what_orthogonal_gives(name, dtype):
    layer: Any = nn.Linear(4, 4, dtype=dtype)
    map = sk.available()[name]((4, 4), dtype=dtype)
    w = make(name, dtype).weight.detach()
    before = layer.weight.detach().clone()
    with pytest.raises((errors.NotAFrameError, errors.ImageError)):
        parametrize.register_parametrization(layer, "weight", map)
    assert torch.equal(layer.weight, before)
    assert not parametrize.is_parametrized(layer)
    if not map.traits.invertible:
        return
    with torch.no_grad():
        layer.weight.copy_(w)
    parametrize.register_parametrization(layer.eval(), "weight", map)
    assert close(layer.weight, w)
    assert isinstance(layer.parametrizations.weight, sk.CoordinateList)
    assert not layer.parametrizations.weight.training
    assert list(sk.coordinates(layer, "weight")) == list(map.coordinates)
    assert list(sk.drift(layer)) == ["weight"]
    assert layer.parametrizations.weight.weight == "Linear.weight"
    other = make(name, dtype)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, layer.weight)
    twin = pickle.loads(pickle.dumps(layer))
    assert type(twin).__bases__ == (nn.Linear,)
    assert torch.equal(twin.weight, layer.weight)
    assert list(sk.drift(twin)) == ["weight"]
    copied = parametrize.remove_parametrizations(copy.deepcopy(layer), "weight")
    assert type(copied) is nn.Linear
    assert torch.equal(copied.weight, layer.weight)
    sharing: Any = nn.Linear(4, 4, dtype=dtype)
    parametrize.register_parametrization(sharing, "weight", map)
    assert sharing.parametrizations.weight is layer.parametrizations.weight


@pytest.mark.parametrize("first", ["torch", "ours"])
def test_a_second_weight_registered_by_torchs_own_function_is_saved_with_the_first(first):
    cell: Any = nn.RNNCell(4, 4)
    nn.init.orthogonal_(cell.weight_ih)
    if first == "torch":
        parametrize.register_parametrization(cell, "weight_hh", Scale())
    else:
        sk.orthogonal(cell, "weight_hh")
    parametrize.register_parametrization(cell, "weight_ih", sk.parametrizations.Cayley((4, 4)))
    assert sk.coordinates(cell, "weight_ih")
    twin = pickle.loads(pickle.dumps(cell))
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), cell(x))
    assert isinstance(sk.bake(twin, "weight_ih").weight_ih, nn.Parameter)
    assert torch.equal(twin(x), cell(x))


@over_all_maps
def test_transferred_a_weight_is_shared(name, dtype):
    layer = make(name, dtype)
    parametrize.register_parametrization(layer, "bias", Scale())
    w = layer.weight.detach().clone()
    others: list[Any] = [nn.Linear(4, 4, dtype=dtype), nn.Module()]
    for other in others:
        parametrize.transfer_parametrizations_and_params(layer, other)
        assert torch.equal(layer.weight, w)
        assert torch.equal(other.weight, w)
        assert torch.equal(other.bias, layer.bias)
        assert other.parametrizations.weight.original0 is layer.parametrizations.weight.original0
    sk.reset_(layer, "weight")
    for other in others:
        assert torch.equal(other.weight, layer.weight)
    sk.bake(layer, "weight")
    assert parametrize.is_parametrized(others[0], "weight")


@pytest.mark.parametrize("swaps", [False, True])
def test_casts_and_loading_work_with_torchs_swapping_of_tensors(swaps):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        for name in ("cayley", "stiefel"):
            layer, other = make(name, torch.float32), make(name, torch.float32)
            w = layer.weight.detach().clone()
            assert close(layer.double().float().weight, w)
            assert layer.bfloat16().weight.dtype == torch.bfloat16
            layer.float()
            other.load_state_dict(layer.state_dict())
            assert torch.equal(other.weight, layer.weight)
            other.to_empty(device="cpu")
            with pytest.raises(errors.UnfilledError):
                other.weight  # noqa: B018
            other.load_state_dict(layer.state_dict())
            assert torch.equal(other.weight, layer.weight)
            parametrize.remove_parametrizations(layer, "weight")
            assert close(layer.weight, other.weight)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


RESET: Any = {
    "Linear": (lambda dtype: nn.Linear(4, 4, dtype=dtype), ["weight"], {}),
    "Embedding": (lambda dtype: nn.Embedding(4, 4, dtype=dtype), ["weight"], {}),
    "RNNCell": (lambda dtype: nn.RNNCell(4, 4, dtype=dtype), ["weight_ih", "weight_hh"], {}),
    "LSTMCell": (lambda dtype: nn.LSTMCell(4, 4, dtype=dtype), ["weight_hh"], {"blocks": 4}),
    "Conv2d": (lambda dtype: nn.Conv2d(2, 8, 2, dtype=dtype), ["weight"], {"view": "out_by_rest"}),
    "attention": (lambda dtype: nn.MultiheadAttention(4, 2, dtype=dtype), ["in_proj_weight"], {"blocks": 3}),
}


@pytest.mark.parametrize("kind", RESET)
@over_all_maps
def test_a_reset_draws_orthogonal_weights_by_their_maps_and_all_others_as_torch_does(kind, name, dtype):
    make_it, names, options = RESET[kind]
    if name == "block_diagonal" and "blocks" in options:
        return  # an option of its own
    begins = name not in ("margin", "fourier", "hadamard")
    layer = sk.orthogonal(make_it(dtype), names, name, init="identity" if begins else None, **options)
    reset = layer.reset_parameters if hasattr(layer, "reset_parameters") else layer._reset_parameters
    own = {key: p for key, p in layer.named_parameters() if "parametrizations" not in key}
    with torch.no_grad():
        for p in own.values():
            p.fill_(torch.nan)
    identity = [getattr(layer, each).detach().clone() for each in names]
    cls = type(layer)
    reset()
    assert type(layer) is cls
    untouched = ["out_proj.weight"] if kind == "attention" else []  # by torch, too
    assert all(torch.isfinite(p).all() != (key in untouched) for key, p in own.items())
    assert {key: p for key, p in layer.named_parameters() if "parametrizations" not in key} == own
    assert not begins or all(torch.equal(getattr(layer, e), w) for e, w in zip(names, identity, strict=True))
    for each in names:
        layer.parametrizations[each].scheme = None
    reset()
    assert not any(close(getattr(layer, each), w, 1e-2) for each, w in zip(names, identity, strict=True))
    assert name == "margin" or all(drift.bits_lost < 1 for drift in sk.drift(layer).values())
