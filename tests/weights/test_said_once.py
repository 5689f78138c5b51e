"""What an optimizer would do without a word is said once, with the remedy."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk


def linear(name="cayley", **options) -> Any:
    return sk.orthogonal(nn.Linear(4, 4), "weight", name, **options)


def train(module, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.ones(4)).square().sum().backward()
        optimizer.step()


def said(module, optimizer, steps=1) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(module, optimizer, steps)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("make", "change"), [(lambda: nn.Linear(4, 4), sk.orthogonal), (linear, sk.bake)])
def test_an_optimizer_made_before_the_weight_was_orthogonal_or_baked(make, change):
    layer = make()
    optimizer = torch.optim.SGD(sk.optim.parameter_groups(layer, lr=0.1))
    train(layer, optimizer)
    change(layer, "weight")
    (text,) = said(layer, optimizer, 3)
    assert f"SGD holds what Linear.weight had before sk.{change.__name__}" in text
    assert "make a new optimizer" in text


def test_an_optimizer_that_was_given_the_coordinates_since_is_left_in_peace():
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    sk.orthogonal(layer, "weight")
    optimizer.add_param_group({"params": list(sk.coordinates(layer, "weight").values())})
    assert said(layer, optimizer, 2) == []
    frozen = nn.Linear(4, 4)
    frozen.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(frozen.parameters(), lr=0.1)
    sk.orthogonal(frozen, "weight")
    assert said(frozen, optimizer) == []


def test_tied_weights_that_have_come_apart():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    net = Tied()
    sk.orthogonal(net.b, "weight")
    (text,) = said(net, torch.optim.SGD(net.parameters(), lr=0.1), 3)
    assert "trains what Linear.weight had before sk.orthogonal: another module was tied" in text
    assert 'sk.tie(module, "weight", other, "weight")' in text
    assert "make the optimizer after that" in text
    sk.tie(net.b, "weight", net.a, "weight")
    assert said(net, torch.optim.SGD(net.parameters(), lr=0.1), 3) == []


def test_weight_decay_of_coordinates():
    layer = linear()
    (text,) = said(layer, torch.optim.AdamW(layer.parameters(), lr=0.1), 3)
    assert "AdamW shrinks 'skew' of Linear.weight by weight_decay=0.01" in text
    assert "sk.optim.parameter_groups" in text


def test_several_coordinates_and_decays_are_one_warning_and_a_gain_may_shrink():
    net = nn.Sequential(linear("cayley", gain="learned"), linear("householder"))
    groups = [dict(params=net[0].parameters(), weight_decay=0.1), dict(params=net[1].parameters())]
    (text,) = said(net, torch.optim.AdamW(groups, lr=0.1), 3)
    assert "AdamW shrinks 'skew', 'reflectors' of Linear.weight by weight_decay up to 0.1, which moves the f" in text
    gain = sk.coordinates(net, "0.weight")["gain"]
    assert said(net, torch.optim.AdamW([gain], lr=0.1)) == []


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_warning_points_to_the_line_that_calls_step(scheduled):
    layer = linear()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    if scheduled:
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.warns(UserWarning, match="shrinks") as caught:
        train(layer, optimizer)
    assert caught[0].filename == __file__


def test_decay_that_is_absent_or_asked_for_is_left_in_peace():
    for groups in (
        sk.optim.parameter_groups(linear(), lr=0.1),
        sk.optim.parameter_groups(linear(), lr=0.1, weight_decay=0.1, skew=dict(weight_decay=0.1)),
    ):
        optimizer = torch.optim.AdamW(groups)
        for p in optimizer.param_groups[-1]["params"]:
            p.grad = torch.ones_like(p)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert caught == []
    net = nn.Sequential(linear().requires_grad_(False), nn.Linear(4, 4))
    assert said(net, torch.optim.AdamW(net.parameters())) == []


def test_a_frozen_weight_makes_a_frozen_frame_and_the_remedy_trains_it():
    model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))).requires_grad_(False)
    with pytest.warns(UserWarning, match="frozen") as caught:
        sk.orthogonal(model, where="*.weight")
    (text,) = (str(warning.message) for warning in caught)
    assert text.startswith("0.weight, 1.weight, 2.weight and 2 more: frozen, and therefore a frozen frame; model.")
    assert not any(p.requires_grad for p in model.parameters())
    exec(text.split("; ")[1].split(" trains ")[0])
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.parametrizations.weight.original0"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sk.orthogonal(nn.Linear(4, 4), "weight").requires_grad_(False)
