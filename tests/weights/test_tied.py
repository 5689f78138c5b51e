"""Two modules that read one orthogonal weight."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors


class Language(nn.Module):
    """An embedding whose weight is that of the last layer too."""

    def __init__(self, name="cayley", tied=True):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        sk.orthogonal(self.encoder, "weight", name)
        if tied:
            sk.tie(self.encoder, "weight", self.decoder, "weight")

    def forward(self, x):
        return self.decoder(self.encoder(x).tanh())


def loss(net: Any) -> torch.Tensor:
    return net(torch.arange(7)).log_softmax(-1).diagonal().sum()


@pytest.mark.parametrize("name", ["cayley", "householder", "stiefel", "rebased"])
def test_gradients_of_both_add_up(name):
    tied = Language(name)
    loss(tied).backward()
    w = tied.encoder.weight.detach().clone().requires_grad_()
    out = nn.functional.linear(nn.functional.embedding(torch.arange(7), w).tanh(), w)
    out.log_softmax(-1).diagonal().sum().backward()
    coordinates = list(sk.coordinates(tied.encoder, "weight").values())
    expected = torch.autograd.grad(tied.encoder.weight, coordinates, w.grad)
    for c, e in zip(coordinates, expected, strict=True):
        assert c.grad is not None
        assert torch.allclose(c.grad, e, rtol=1e-4, atol=1e-6)


def test_copies_checkpoints_and_casts_stay_tied():
    net = Language()
    for other in (copy.deepcopy(net), Language().double().float()):
        other.load_state_dict(net.state_dict())
        sk.reset_(other.encoder, "weight", init="identity")
        assert torch.equal(other.decoder.weight, torch.eye(7, 3))
    assert not torch.equal(net.decoder.weight, torch.eye(7, 3))


def test_one_parameter_in_two_places_takes_a_tensor_as_its_first_value():
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    start = sk.init.haar((4, 4)).float()
    sk.orthogonal(net, where="*", init=start)
    assert torch.dist(net[0].weight, start) < 1e-6
    assert torch.equal(net[0].weight, net[1].weight)
    apart = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(errors.OptionError, match="weights"):
        sk.orthogonal(apart, where="*", init=start)


def test_baking_a_model_leaves_one_parameter_and_baking_one_module_two():
    net = sk.bake(Language())
    assert net.encoder.weight is net.decoder.weight
    net = Language()
    sk.bake(net.encoder, "weight")
    assert isinstance(net.encoder.weight, nn.Parameter)
    assert torch.equal(net.encoder.weight, net.decoder.weight)
    assert list(sk.drift(net)) == ["decoder.weight"]


def test_what_is_orthogonal_already_is_tied_anew():
    net = Language(tied=False)
    sk.orthogonal(net.decoder, "weight", "householder")
    sk.tie(net.encoder, "weight", net.decoder, "weight")
    sk.tie(net.encoder, "weight", net.decoder, "weight")
    assert len(list(net.parameters())) == 1
    assert torch.equal(net.encoder.weight, net.decoder.weight)


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (nn.Linear(7, 3), errors.ShapeError, "one shape"),
        (nn.Linear(3, 7, dtype=torch.float64), errors.DtypeError, "one dtype"),
        (nn.Linear(3, 7, device="meta"), errors.DtypeError, "one dtype and device"),
        (nn.ReLU(), errors.UnknownNameError, "weight"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(other, error, text):
    encoder = sk.orthogonal(nn.Embedding(7, 3), "weight")
    before = dict(other.named_parameters())
    with pytest.raises(error, match=text):
        sk.tie(encoder, "weight", other, "weight")
    assert dict(other.named_parameters()) == before


@pytest.mark.parametrize("first", ["encoder", "decoder"])
def test_one_that_is_baked_alone_comes_apart_with_a_warning(first):
    net = Language()
    (other,) = {"encoder", "decoder"} - {first}
    with pytest.warns(UserWarning, match=f"{first}.weight and {other}.weight were one weight") as caught:
        sk.bake(net, f"{first}.weight")
    assert len(caught) == 1
    assert list(sk.drift(net)) == [f"{other}.weight"]


def stacked(nets: Any) -> Any:
    return {
        key: torch.stack([dict(net.named_parameters())[key] for net in nets]) for key, _ in nets[0].named_parameters()
    }


@pytest.mark.parametrize("name", ["cayley", "stiefel", "rebased"])
def test_functional_call_and_vmap_give_the_coordinates_back(name):
    net, other = Language(name), Language(name)
    before, x = dict(net.named_parameters()), torch.arange(7)
    values = {key: p.detach().clone() for key, p in other.named_parameters()}
    buffers = dict(other.named_buffers())
    assert torch.equal(torch.func.functional_call(net, (values, buffers), x), other(x))
    torch.vmap(lambda p: torch.func.functional_call(net, p, x))(stacked([net, other]))
    torch.func.grad(lambda p: torch.func.functional_call(net, p, x).sum())(values)
    after = dict(net.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[key] is p for key, p in before.items())
    loss(net).backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_model_on_the_meta_device_is_tied_and_loaded():
    net = Language()
    with torch.device("meta"):
        other = Language(tied=False)
        sk.orthogonal(other.decoder, "weight")
        sk.tie(other.encoder, "weight", other.decoder, "weight")
    other.load_state_dict(net.state_dict(), assign=True)
    assert torch.equal(other.decoder.weight, net.encoder.weight)
    assert len(list(other.parameters())) == 1
