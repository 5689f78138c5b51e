import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors


def model():
    unitary = sk.orthogonal(nn.Linear(3, 3, dtype=torch.complex64), "weight", "cayley")
    return nn.ModuleList([sk.orthogonal(nn.Linear(4, 4), "weight", "cayley"), unitary, nn.Linear(2, 2)])


def by_name(groups):
    return {group.get("name"): group for group in groups}


def test_settings_go_to_the_named_coordinate_and_the_rest_to_lr():
    groups = by_name(sk.optim.parameter_groups(model(), lr=1e-3, skew=dict(lr=1e-4, weight_decay=0.1), phase=1e-2))
    assert groups[None]["lr"] == 1e-3
    assert (groups["skew"]["lr"], groups["skew"]["weight_decay"]) == (1e-4, 0.1)
    assert (groups["phase"]["lr"], groups["phase"]["weight_decay"]) == (1e-2, 0.0)


def test_each_parameter_stands_in_one_group_and_coordinates_get_no_weight_decay_unless_asked():
    net = model()
    net.append(net[0])
    optimizer = torch.optim.AdamW(sk.optim.parameter_groups(net, lr=1e-3), weight_decay=0.3)
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in net.parameters())
    decays = {group.get("name"): group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {None: 0.3, "skew": 0.0, "phase": 0.0}


@pytest.mark.parametrize("name", ["skwe", "phase", "angle"])
@pytest.mark.parametrize("net", [sk.nn.RotationRNN(2, 4), sk.nn.OrthogonalRNN(2, 4), sk.nn.LRU(2, 4), nn.Linear(2, 2)])
def test_a_name_that_reaches_no_parameter_is_refused(net, name):
    """Those of other maps as well: a rate that reaches nothing would say nothing."""
    if f"{name}_l0" in dict(net.named_parameters()):
        assert by_name(sk.optim.parameter_groups(net, lr=1e-3, angle=1e-4))["angle"]["params"] == [net.angle_l0]
        return
    with pytest.raises(errors.UnknownNameError, match=name):
        sk.optim.parameter_groups(net, lr=1e-3, **{name: 1e-4})


def test_a_bare_name_stands_for_the_prefixed_ones_of_a_composite():
    net = sk.orthogonal(nn.Linear(4, 4), "weight", "margin")
    groups = by_name(sk.optim.parameter_groups(net, lr=1e-3, **{"skew": 1e-5, "v.skew": 1e-6}))
    assert {name: group["lr"] for name, group in groups.items()} == {
        None: 1e-3,
        "u.skew": 1e-5,
        "v.skew": 1e-6,
        "spectrum": 1e-3,
    }


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
@pytest.mark.parametrize("net", [sk.nn.RotationRNN(2, 4), sk.nn.LRU(2, 4, num_layers=2)])
def test_decay_of_what_a_recurrence_is_computed_from_is_warned_of(net, copied):
    for held in (net, copied(net)):
        optimizer = torch.optim.AdamW(held.parameters(), lr=0.1, weight_decay=0.5)
        with pytest.warns(UserWarning, match="AdamW shrinks .*'log_rate'.* by weight_decay=0.5"):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.optim.AdamW(sk.optim.parameter_groups(held, lr=0.1), weight_decay=0.5).step()


@pytest.mark.parametrize("lr", [-1.0, float("nan")])
def test_a_learning_rate_that_is_none_is_refused(lr):
    with pytest.raises(errors.OptionError, match="learning rate"):
        sk.optim.parameter_groups(model(), lr=lr)
    with pytest.raises(errors.OptionError, match="learning rate"):
        sk.optim.parameter_groups(model(), lr=1.0, skew=lr)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Rprop"])
def test_every_torch_optimizer_takes_the_groups_and_keeps_the_frame(name):
    net = model()
    optimizer = getattr(torch.optim, name)(sk.optim.parameter_groups(net, lr=1e-2, skew=1e-3))
    for _ in range(3):
        optimizer.zero_grad()
        (net[0](torch.ones(4)).sum() + net[1](torch.ones(3, dtype=torch.complex64)).abs().sum()).backward()
        optimizer.step()
    assert all(d.error < 5e-7 for d in sk.drift(net).values())


@pytest.mark.parametrize(
    ("rnn", "rates"),
    [
        (sk.nn.RotationRNN(2, 8, num_layers=2, heads=2, bidirectional=True), {"angle": 1e-5, "log_rate": 1e-4}),
        (sk.nn.LRU(2, 8, num_layers=2, bidirectional=True), {"log_angle": 1e-5, "log_rate": 1e-4, "log_scale": 1e-6}),
    ],
)
def test_free_coordinates_of_a_layer_have_groups_of_their_own_without_weight_decay(rnn, rates):
    groups = by_name(sk.optim.parameter_groups(rnn, lr=1e-3, weight_decay=0.1, **rates))
    assert set(groups) - {"skew"} == {None, *rates}
    for name, rate in rates.items():
        assert (groups[name]["lr"], groups[name]["weight_decay"]) == (rate, 0)
        ours = [p for key, p in rnn.named_parameters() if key.startswith(name)]
        assert {id(p) for p in groups[name]["params"]} == {id(p) for p in ours}
        assert len(ours) == 4
    assert sum(len(group["params"]) for group in groups.values()) == len(list(rnn.parameters()))
    with pytest.raises(errors.UnknownNameError, match="angel"):
        sk.optim.parameter_groups(rnn, lr=1e-3, angel=1e-4)
