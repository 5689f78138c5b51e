"""Recurrent layers in the place of torch's: positions, names and words are those that users of torch.nn know."""

import inspect
from typing import Any

import pytest
import torch

from stiefelkit import errors
from stiefelkit.nn import GORU, LinearTransitionRNN, OrthogonalRNN, OrthogonalRNNCell

KINDS = [OrthogonalRNN, LinearTransitionRNN, GORU]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def positional(kind: type) -> list[str]:
    parameters = inspect.signature(kind).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


RNN = "input_size hidden_size num_layers nonlinearity bias batch_first dropout bidirectional device dtype"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (OrthogonalRNN, RNN),
        (LinearTransitionRNN, RNN),
        (GORU, RNN.replace("nonlinearity ", "")),
        (OrthogonalRNNCell, "input_size hidden_size bias nonlinearity device dtype"),
    ],
)
def test_positional_arguments_are_torchs(kind, names):
    assert positional(kind) == names.split()


@pytest.mark.parametrize("kind", [OrthogonalRNN, LinearTransitionRNN, OrthogonalRNNCell])
def test_nonlinearity_is_another_name_of_activation(kind):
    assert kind(3, 4, nonlinearity="relu").activation == "relu"
    assert kind(3, 4, nonlinearity="leaky_relu(0.2)").nonlinearity == "leaky_relu(0.2)"
    assert kind(3, 4, activation="tanh").nonlinearity == "tanh"
    assert kind(3, 4).activation == kind(3, 4, activation=None).activation == "modrelu"
    for given in ("modrelu", "tanh"):
        with pytest.raises(errors.OptionError, match=rf"{kind.__name__} needs one of activation= and nonlinearity="):
            kind(3, 4, activation=given, nonlinearity="tanh")
    with pytest.raises(errors.UnknownNameError, match='did you mean "tanh"'):
        kind(3, 4, nonlinearity="tahn")


@each_kind
def test_first_states_are_given_as_hx(kind):
    rnn: Any = kind(3, 4)
    x, h = torch.randn(5, 2, 3), torch.randn(1, 2, 4)
    assert torch.equal(rnn(x, hx=h)[0], rnn(x, h)[0])
    assert torch.equal(rnn(input=x, hx=h)[0], rnn(x, h)[0])
    with pytest.raises(errors.ShapeError, match=rf"{kind.__name__} needs hx of shape \(1, 2, 4\)"):
        rnn(x, hx=torch.randn(1, 3, 4))


@each_kind
@pytest.mark.parametrize("bias", [True, False])
def test_all_weights_are_listed_by_layer_and_direction(kind, bias):
    rnn: Any = kind(3, 4, 2, bias=bias, bidirectional=True)
    listed = rnn.all_weights
    suffixes = ["_l0", "_l0_reverse", "_l1", "_l1_reverse"]
    gates = kind is GORU
    names = ["weight_ih", *["weight_gates"] * gates, "weight_hh", *["bias_gates"] * (gates and bias), *["bias"] * bias]
    assert len(listed) == len(suffixes)
    for weights, suffix in zip(listed, suffixes, strict=True):
        assert len(weights) == len(names)
        for weight, name in zip(weights, names, strict=True):
            assert torch.equal(weight, getattr(rnn, f"{name}{suffix}"))
    assert listed[0][0] is rnn.weight_ih_l0
