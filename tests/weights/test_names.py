"""Weights meant by qualified names, by patterns and by predicates; weights that stand in two places."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors


def model() -> Any:
    """An encoder of three layers, an embedding tied to the read-out, a kernel."""
    net: Any = nn.Module()
    net.encoder = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    net.embedding, net.head = nn.Embedding(9, 6), nn.Linear(6, 9)
    net.head.weight = net.embedding.weight
    net.conv = nn.Conv2d(3, 5, 2)
    return net


def test_every_function_takes_names_as_drift_prints_them():
    net = model()
    name = "encoder.0.weight"
    assert sk.orthogonal(net, name, "rebased", inner="cayley") is net
    assert list(sk.drift(net)) == [name]
    assert list(sk.coordinates(net, name)) == ["skew"]
    w = sk.init.haar((6, 6)).float()
    sk.assign_(net, name, w)
    assert torch.allclose(net.encoder[0].weight, w, atol=1e-6)
    sk.rebase_(net, name)
    sk.reset_(net, name, init="identity")
    assert torch.allclose(net.encoder[0].weight, torch.eye(6))
    assert sk.bake(net, name) is net
    assert type(net.encoder[0]) is nn.Linear


@pytest.mark.parametrize(
    "call",
    [
        lambda net: sk.orthogonal(net, "encodr.0.weight"),
        lambda net: sk.coordinates(net, "weight"),
        lambda net: sk.assign_(net, "encoder.0.weight", torch.eye(6)),
        lambda net: sk.orthogonal(net, where="encodr.*.weight"),
        lambda net: sk.orthogonal(net, where=lambda name, host: False),
    ],
)
def test_a_name_that_is_none_is_answered_with_a_near_one(call):
    net = sk.orthogonal(model(), "encoder.2.weight")
    with pytest.raises(errors.UnknownNameError, match=r"encoder|plain|conv"):
        call(net)
    assert list(sk.drift(net)) == ["encoder.2.weight"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("encoder.*", ["encoder.0.weight", "encoder.2.weight"]),
        ("encoder.?.weight", ["encoder.0.weight", "encoder.2.weight"]),
        (["encoder.2.weight", "encoder.0.weight", "encoder.*"], ["encoder.0.weight", "encoder.2.weight"]),
        (
            lambda name, host: isinstance(host, nn.Linear) and "head" not in name,
            ["encoder.0.weight", "encoder.2.weight"],
        ),
        (nn.Linear, ["encoder.0.weight", "encoder.2.weight", "head.weight"]),
        ([nn.Conv2d, "encoder.0.*"], ["encoder.0.weight", "conv.weight"]),
        ("*", ["encoder.0.weight", "encoder.2.weight", "embedding.weight", "head.weight", "conv.weight"]),
    ],
)
def test_weights_are_chosen_by_pattern_names_or_predicate(where, expected):
    net = sk.orthogonal(model(), where=where, view="out_by_rest")
    assert list(sk.drift(net)) == expected


def test_a_pattern_in_the_place_of_a_name_means_the_same_and_is_refused_where_one_weight_is_meant():
    for pattern in ("encoder.*.weight", ["encoder.0.weight", "encoder.2.*"], lambda name, _: name.startswith("enc")):
        net = sk.orthogonal(model(), pattern, "stiefel")
        assert list(sk.drift(net)) == ["encoder.0.weight", "encoder.2.weight"]
    with pytest.raises(errors.UnknownNameError, match="needs to match a weight"):
        sk.orthogonal(net, "decoder.*", "stiefel")
    for function in (sk.reset_, sk.rebase_, sk.bake, sk.coordinates, lambda net, name: sk.assign_(net, name, None)):  # type: ignore[arg-type]
        with pytest.raises(errors.UnknownNameError):
            function(net, "encoder.*.weight")
    held: Any = sk.orthogonal(nn.ParameterDict({"w[0]": torch.randn(3, 3)}), "w[0]")
    sk.reset_(held, "w[0]")
    assert list(sk.drift(held)) == ["w[0]"]


def test_of_many_names_that_may_be_meant_some_are_shown():
    said = errors.did_you_mean("weight", [f"{i}.weight" for i in range(9)])
    assert said == '; did you mean "0.weight", "1.weight", "2.weight", "3.weight" or one of 5 more?'


def test_all_weights_are_made_orthogonal_or_none():
    net = model()
    before = net.state_dict()
    with pytest.raises(errors.ShapeError, match="Cayley"):
        sk.orthogonal(net, where="*")
    with pytest.raises(errors.ShapeError, match=r"1\.weight"):
        sk.orthogonal(net, where=["encoder.0.weight", "encoder.1.weight"])
    assert sk.drift(net) == {}
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [{}, {"name": "encoder.0.weight", "where": "*"}, {"where": []}, {"where": "encoder.*", "init": torch.eye(6)}],
)
def test_what_is_meant_is_said_once(options):
    with pytest.raises(errors.OptionError):
        sk.orthogonal(model(), **options)


def test_weights_that_are_one_stay_one_when_both_are_chosen():
    net = sk.orthogonal(model(), where=["embedding.weight", "head.weight"], init="haar")
    assert torch.equal(net.embedding.weight, net.head.weight)
    assert sk.coordinates(net, "head.weight")["skew"] is sk.coordinates(net, "embedding.weight")["skew"]
    assert len(sk.optim.parameter_groups(net, lr=1.0)[-1]["params"]) == 1
    net.head(net.embedding(torch.arange(9))).sum().backward()
    twin = copy.deepcopy(net)
    twin.load_state_dict(net.state_dict())
    sk.reset_(twin, "head.weight")
    assert torch.equal(twin.embedding.weight, twin.head.weight)
    assert not torch.equal(twin.head.weight, net.head.weight)
    sk.bake(twin)
    assert twin.head.weight is twin.embedding.weight


def test_a_weight_that_comes_apart_is_said_with_the_remedy():
    net = model()
    with pytest.warns(UserWarning, match="were one parameter") as caught:
        sk.orthogonal(net, "head.weight")
    assert len(caught) == 1
    said = str(caught[0].message)
    assert said.endswith("; make the optimizer after that.")
    assert 'sk.tie(model.head, "weight", model.embedding, "weight")'.replace('"', "'") in said
    (names,) = re.findall(r"where=(\[.*\])", said)
    again = sk.orthogonal(model(), where=[name.strip("'") for name in names.strip("[]").split(", ")])
    assert torch.equal(again.embedding.weight, again.head.weight)


def test_a_kernel_that_two_modules_read_in_two_ways_is_refused():
    net = nn.Sequential(nn.Conv2d(3, 5, 2), nn.ConvTranspose2d(5, 3, 2))
    net[1].weight = net[0].weight
    with pytest.raises(errors.OptionError, match="parameter"):
        sk.orthogonal(net, where="*", view="out_by_rest")
    assert sk.drift(net) == {}


def test_a_module_under_two_names_has_one_weight_under_either():
    layer = nn.Linear(3, 3)
    net = nn.ModuleDict({"a": layer, "b": layer})
    sk.orthogonal(net, "b.weight")
    assert list(sk.drift(net)) == ["a.weight"]
    assert sk.coordinates(net, "b.weight") == sk.coordinates(net, "a.weight")
    other: Any = sk.orthogonal(nn.ModuleDict({"a": nn.Linear(3, 3)}), where="*")
    other["b"] = other["a"]
    assert list(sk.drift(other)) == ["a.weight"]
