"""Tools that walk through a model, put its children back, wrap or swap them leave orthogonal weights working."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.ao.nn.qat
from every_map import close, make, over_all_maps, squares
from torch import nn
from torch.ao import quantization
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.utils import parametrize

import stiefelkit as sk
from stiefelkit import errors

INSIDE = "parametrizations.weight."


class Net(nn.Module):
    """A model with two orthogonal layers and a norm between them."""

    def __init__(self, name="cayley"):
        super().__init__()
        self.first, self.norm, self.last = make(name, torch.float32), nn.BatchNorm1d(4), make("stiefel", torch.float32)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def put_back(module):
    for name, child in module.named_children():
        put_back(child)
        setattr(module, name, getattr(module, name))
        module.add_module(name, child)
        module.register_module(name, child)


@over_all_maps
def test_a_child_that_is_put_back_where_it_was_stays_what_it_was(name, dtype):
    net: Any = nn.Sequential(make(name, dtype), nn.Sequential(make(name, dtype)))
    before = {prefix: id(module) for prefix, module in net.named_modules()}
    weights, keys = [net[0].weight, net[1][0].weight], list(net.state_dict())
    put_back(net)
    assert {prefix: id(module) for prefix, module in net.named_modules()} == before
    assert list(net.state_dict()) == keys
    assert all(map(torch.equal, [net[0].weight, net[1][0].weight], weights))
    assert list(sk.drift(net)) == ["0.weight", "1.0.weight"]


def test_batch_norms_become_synchronised_ones():
    net = Net()
    keys, x = list(net.state_dict()), torch.randn(6, 4)
    expected = copy.deepcopy(net).eval()(x)
    converted: Any = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(converted.norm, nn.SyncBatchNorm)
    assert list(converted.state_dict()) == keys
    assert torch.equal(converted.eval()(x), expected)


CHECKS = {"all": lambda _: True, "layers": lambda module: isinstance(module, nn.Linear)}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [name for name in sk.available() if name != "fourier"])
def test_activations_are_checkpointed_around_weights_and_not_inside(name, check):
    net, x = Net(name), torch.randn(6, 4)
    plain, keys = copy.deepcopy(net), list(net.state_dict())
    apply_activation_checkpointing(net, check_fn=CHECKS[check])
    assert type(net.first).__name__ == "CheckpointWrapper"
    assert list(net.state_dict()) == keys
    assert list(sk.drift(net)) == ["first.weight", "last.weight"]
    assert list(sk.coordinates(net, "first.weight")) == list(sk.coordinates(plain, "first.weight"))
    for each in (net, plain):
        squares(each(x)).backward()
    ours, theirs = dict(net.named_parameters()), dict(plain.named_parameters())
    for key, p in theirs.items():
        found = next(value for other, value in ours.items() if other.replace("_checkpoint_wrapped_module.", "") == key)
        assert close(found.grad, p.grad)
    net.load_state_dict(plain.state_dict())
    bad = {key: value.clone() for key, value in plain.state_dict().items()}
    bad[f"last.{INSIDE}original0"] *= 2
    bad["norm.weight"] += 1
    before = {key: value.clone() for key, value in net.state_dict().items()}
    for whole in (net, checkpoint_wrapper(net)):
        with pytest.raises(errors.CheckpointError, match=r"last\.weight"):
            sk.check_state_dict(whole, bad)
        with pytest.raises(errors.CheckpointError, match=r"last\.weight"):
            whole.load_state_dict(bad)
        assert all(torch.equal(value, before[key]) for key, value in whole.state_dict().items())
    assert isinstance(sk.bake(net, "first.weight").first.weight, nn.Parameter)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in sk.available() if name != "fourier"])
def test_a_model_is_prepared_for_quantization_and_trains(name):
    net: Any = Net(name).train()
    x, w = torch.randn(6, 4), net.first.weight.detach().clone()
    coordinates = sk.coordinates(net, "first.weight")
    net.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(net, inplace=True)
    assert parametrize.type_before_parametrizations(net.first) is torch.ao.nn.qat.Linear
    assert torch.equal(net.first.weight, w)
    assert {key: id(c) for key, c in sk.coordinates(net, "first.weight").items()} == {
        key: id(c) for key, c in coordinates.items()
    }
    optimizer = sk.optim.CayleySGD(sk.optim.parameter_groups(net, lr=0.1))
    (net(x) * torch.randn(6, 4)).sum().backward()
    assert all(c.grad is not None for c in coordinates.values())
    optimizer.step()
    assert not torch.equal(net.first.weight, w)
    assert all(drift.bits_lost < 1 or name == "margin" for drift in sk.drift(net).values())
    assert len(net.first.parametrizations.weight) == 1


def test_what_stands_on_top_is_shared_once():
    class Double(nn.Module):
        def forward(self, w):
            return 2 * w

        def right_inverse(self, w):
            return w / 2

    layer, other = make("cayley", torch.float32), nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Double())
    parametrize.transfer_parametrizations_and_params(layer, other, "weight")
    assert other.parametrizations.weight is layer.parametrizations.weight  # type: ignore[union-attr, index]
    assert len(layer.parametrizations.weight) == 2
    assert [type(each).__name__ for each in layer.parametrizations.weight] == ["Cayley", "Double"]


def test_a_name_of_torchs_that_was_bound_before_the_first_weight_shares_as_well():
    from torch.ao.nn.qat.modules import linear

    layer, other = make("householder", torch.float32), nn.Linear(4, 4)
    linear.transfer_parametrizations_and_params(layer, other)  # pyright: ignore[reportPrivateImportUsage]
    assert torch.equal(other.weight, layer.weight)


@pytest.mark.parametrize("name", [name for name in sk.available() if name != "fourier"])
def test_a_traced_model_has_its_weights(name):
    net: Any = nn.Sequential(Net(name), nn.Sequential(make(name, torch.float32)))
    traced = torch.fx.symbolic_trace(net)
    names = ["0.first.weight", "0.last.weight", "1.0.weight"]
    assert list(sk.drift(traced)) == list(sk.drift(net)) == names

    def described(groups):
        return [(group.get("name"), group.get("weight_decay"), len(group["params"])) for group in groups]

    options: Any = {"lr": 0.1, "weight_decay": 0.01}
    assert described(sk.optim.parameter_groups(traced, **options)) == described(
        sk.optim.parameter_groups(net, **options)
    )
    assert sk.coordinates(traced, "1.0.weight") == sk.coordinates(net, "1.0.weight")
    sk.reset_(traced, "0.first.weight")
    x = torch.randn(6, 4)
    assert torch.equal(traced.eval()(x), net.eval()(x))
    state = copy.deepcopy(net.state_dict())
    sk.check_state_dict(traced, state)
    traced.load_state_dict(state)
    state[f"1.0.{INSIDE}original0"][0] = torch.nan
    with pytest.raises(errors.NonFiniteError, match=r"1\.0\.weight"):
        sk.check_state_dict(traced, state)
    with pytest.raises(errors.OptionError, match="traced"):
        sk.bake(traced)
    with pytest.raises(errors.OptionError, match="traced"):
        sk.bake(traced, "1.0.weight")
    assert list(sk.drift(copy.deepcopy(traced))) == names


def test_a_baked_model_pickles_as_if_nothing_had_been():
    net = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(4, 4), Net())})
    sk.orthogonal(net, "inner.0.weight")
    assert b"stiefelkit.host" in pickled(net)
    assert b"stiefelkit" not in pickled(sk.bake(net)).replace(b"test_tools_that_walk", b"")
    for part in (0, 1):
        sk.orthogonal(net, f"inner.{'1.first' if part else 0}.weight")
    sk.bake(net, "inner.0.weight")
    bad = {**net.state_dict(), f"inner.1.first.{INSIDE}original0": torch.full((6,), torch.nan)}
    bad["inner.0.weight"] = torch.zeros(4, 4)
    with pytest.raises(errors.NonFiniteError):
        net.load_state_dict(bad)
    assert net["inner"][0].weight.any()  # type: ignore[index]


def pickled(net) -> bytes:
    buffer = io.BytesIO()
    torch.save(net, buffer)
    return buffer.getvalue()
