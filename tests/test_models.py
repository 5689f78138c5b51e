"""The papers' systems: parameter counts, initial values, choices."""

import math
from typing import Any

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.registry import Registry

# name, (input, hidden, output), count: the figures that the papers print, in full.
PAPERS = [
    ("scornn", (2, 170, 1), 15046),  # adding, Helfrich et al.
    ("scornn", (1, 170, 10), 170 * 169 // 2 + 170 + 170 + 1700 + 10),  # pixel MNIST, "16k"
    ("scornn", (1, 360, 10), 68950),  # "69k"
    ("scornn", (10, 190, 9), 190 * 189 // 2 + 1900 + 190 + 1710 + 9),  # copying, "22k"
    ("scurnn", (1, 116, 10), 16482),  # pixel MNIST, Maduranga et al.
    ("scurnn", (1, 250, 10), 69010),
    ("scurnn", (10, 130, 9), 22369),  # copying
    ("scurnn", (2, 116, 1), 14617),  # adding
    ("scurnn", (129, 128, 129), 83073),  # TIMIT
    ("scurnn", (129, 258, 129), 200853),
    ("full_urnn", (1, 116, 10), 116**2 + 116 * (2 + 20 + 3) + 10),  # pixel MNIST, Wisdom et al., "16k"
    ("full_urnn", (1, 512, 10), 512**2 + 512 * (2 + 20 + 3) + 10),  # "270k"
    ("full_urnn", (10, 128, 9), 128**2 + 128 * (20 + 18 + 3) + 9),  # copying, "22k"
    ("full_urnn", (129, 128, 129), 128**2 + 128 * (258 + 258 + 3) + 129),  # speech, "83k"
    ("lstm", (10, 68, 9), 4 * 68 * (68 + 10 + 1) + 68 * 9 + 9),
    ("lstm", (1, 128, 10), 4 * 128 * (128 + 1 + 1) + 1280 + 10),
]


@pytest.mark.parametrize(("name", "sizes", "count"), PAPERS)
def test_parameter_counts_are_the_papers(name, sizes, count):
    assert sk.models.count_parameters(sk.models.create(name, *sizes)) == count


@pytest.mark.parametrize("name", sk.models.names())
def test_every_model_reads_sequences_and_trains_every_parameter(name):
    net: Any = sk.models.create(name, 3, 8, 5)
    x = torch.randn(2, 6, 3)
    every = net(x)
    assert every.shape == (2, 6, 5)
    assert torch.allclose(net(x, last_only=True), every[:, -1])
    every.square().sum().backward()
    trained = [p for p in net.parameters() if p.requires_grad]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in trained)


def test_scornn_starts_as_its_code_does():
    net: Any = sk.models.create("scornn", 2, 10, 1, negative=4)
    rnn = net.rnn
    assert rnn.parametrizations.weight_hh_l0.signs.tolist() == [1] * 6 + [-1] * 4
    assert rnn.weight_ih_l0.abs().max() <= 0.01
    assert torch.equal(rnn.bias_l0, torch.zeros(10))
    assert torch.equal(net.output.bias, torch.zeros(1))
    assert net.output.weight.abs().max() <= math.sqrt(6 / 11)
    assert not rnn.trainable_h0
    angles = torch.linalg.eigvals(rnn.weight_hh_l0 * rnn.parametrizations.weight_hh_l0.signs).angle().abs()
    assert angles.max() <= math.pi / 2 + 1e-5


def test_scurnn_starts_as_its_code_does():
    net: Any = sk.models.create("scurnn", 2, 10, 3)
    rnn = net.rnn
    coordinates = rnn.parametrizations.weight_hh_l0.coordinates
    table = coordinates["skew"].view(10, 10)
    assert torch.equal(table.triu(), torch.zeros(10, 10))
    assert torch.all((coordinates["phase"] >= 0) & (coordinates["phase"] <= 2 * math.pi))
    assert rnn.bias_l0.abs().max() <= 0.01
    assert rnn.bias_l0.abs().max() > 0
    assert rnn.h0_l0.shape == (20,)
    assert 0 < rnn.h0_l0.abs().max() <= 0.01
    assert net.output.weight.shape == (3, 20)


def test_full_urnn_starts_as_its_code_does():
    net: Any = sk.models.create("full_urnn", 2, 10, 3)
    rnn = net.rnn
    assert list(rnn.parametrizations.weight_hh_l0.coordinates) == ["stiefel"]
    assert rnn.parametrizations.weight_hh_l0.scheme == "restricted"
    assert sk.drift(rnn)["weight_hh_l0"].error <= 1e-6
    assert rnn.weight_ih_l0.shape == (20, 2)
    assert 0.1 < rnn.weight_ih_l0.abs().max() <= math.sqrt(6 / 22)
    assert 0 < rnn.bias_l0.abs().max() <= 0.01
    assert rnn.bias_l0.shape == (10,)
    assert rnn.h0_l0.shape == (20,)
    assert 0.1 < rnn.h0_l0.abs().max() <= math.sqrt(3 / 20)
    assert net.output.weight.abs().max() <= math.sqrt(6 / 23)
    assert torch.equal(net.output.bias, torch.zeros(3))
    assert torch.equal(sk.models.create("full_urnn", 2, 4, 3, bias_bound=0.0).rnn.bias_l0, torch.zeros(4))  # type: ignore[union-attr]


def test_full_urnn_draws_the_same_by_the_class_as_by_its_name():
    nets: list[Any] = []
    for given in ("stiefel", sk.parametrizations.StiefelPoint):
        torch.manual_seed(0)
        nets.append(sk.models.create("full_urnn", 2, 8, 3, parametrization=given))
    assert {net.rnn.parametrizations.weight_hh_l0.scheme for net in nets} == {"restricted"}
    assert torch.equal(*(net.rnn.weight_hh_l0 for net in nets))


@pytest.mark.parametrize("name", ["cayley", "householder", "givens", "matrix_exp", "fourier", "stiefel"])
def test_full_urnn_takes_any_unitary_map(name):
    net: Any = sk.models.create("full_urnn", 2, 8, 3, parametrization=name)
    assert net(torch.randn(2, 5, 2)).shape == (2, 5, 3)
    assert type(net.rnn.parametrizations.weight_hh_l0.param) is sk.available()[name]


def test_the_lstm_has_one_bias_and_an_open_forget_gate():
    net: Any = sk.models.create("lstm", 2, 4, 3, forget_bias=2.0)
    assert net.rnn.bias_ih_l0.tolist() == [0.0] * 4 + [2.0] * 4 + [0.0] * 8
    assert not net.rnn.bias_hh_l0.requires_grad


def test_separate_coordinates_take_separate_rates():
    net: Any = sk.models.create("scurnn", 2, 4, 3)
    groups = sk.optim.parameter_groups(net, lr=1e-3, skew=dict(lr=1e-4), phase=dict(lr=1e-2))
    assert {group.get("name"): group["lr"] for group in groups} == {None: 1e-3, "skew": 1e-4, "phase": 1e-2}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (("scorn", 1, 2, 3), {}, errors.UnknownNameError, 'did you mean "scornn"'),
        (("scornn", 1, 0, 3), {}, errors.OptionError, "hidden_size >= 1"),
        (("scornn", 1, 2, 3), {"negativ": 1}, errors.OptionError, 'did you mean "negative"'),
        (("scornn", 1, 2, 3), {"negative": 9}, errors.OptionError, "between 0 and p = 2"),
        (("full_urnn", 1, 2, 3), {"bias_bound": -1.0}, errors.OptionError, "bias_bound >= 0"),
        (("full_urnn", 1, 2, 3), {"parametrization": "caley"}, errors.UnknownNameError, 'did you mean "cayley"'),
        (("full_urnn", 1, 2, 3), {"init": "restrictd"}, errors.OptionError, 'did you mean "restricted"'),
    ],
)
def test_bad_models_are_said_in_one_sentence(arguments, options, error, text):
    with pytest.raises(error) as caught:
        sk.models.create(*arguments, **options)
    assert text in str(caught.value)


def test_a_model_is_registered_by_name(monkeypatch):
    own = Registry("model", dict(sk.models._models._targets), "nobody.home")
    monkeypatch.setattr(sk.models, "_models", own)
    sk.models.register("mine", "stiefelkit.models.scornn:scornn")
    net: Any = sk.models.create("mine", 1, 2, 3)
    assert net.output.weight.shape == (3, 2)
