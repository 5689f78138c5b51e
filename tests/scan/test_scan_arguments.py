"""What the scan is asked by, what it refuses, and what layers hand on to it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from stiefelkit import errors
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.scan import scan, scan_backend


def test_the_choice_of_a_backend_is_visible_and_checked():
    w = torch.eye(4)
    assert scan_backend(w) == scan_backend(w, 8) == "inplace"
    assert scan_backend(w, 7) == "reference"
    assert scan_backend(w, backend="reference") == "reference"
    with pytest.raises(errors.UnknownNameError, match='did you mean "inplace"'):
        scan_backend(w, backend="in_place")
    for backend in ("triton", "cuda_graphs"):
        with pytest.raises(errors.OptionError, match="GPU"):
            scan(torch.zeros(2, 1, 4), w, torch.zeros(1, 4), backend=backend)
    with pytest.raises(errors.UnknownNameError, match="reference"):
        OrthogonalRNN(2, 3, backend="refrence")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(activation="oplu"), errors.ShapeError, "even number of units, got 5"),
        (dict(activation="leaky_relu(-1)"), errors.OptionError, "above zero"),
        (dict(activation="tanh(2)"), errors.OptionError, "Only leaky_relu"),
        (dict(activation="tanh", bias=torch.zeros(1)), errors.ShapeError, "bias of shape (5,)"),
        (dict(activation_bias=torch.zeros(5, 1)), errors.ShapeError, "activation_bias of shape (5,)"),
        (dict(x=torch.zeros(2, 3, 5, dtype=torch.complex64)), errors.DtypeError, "complex w"),
        (dict(h0=torch.zeros(3, 5, dtype=torch.complex64)), errors.DtypeError, "complex w for complex h0"),
        (dict(u=torch.eye(5, dtype=torch.complex64)), errors.DtypeError, "complex w for complex u"),
        (
            dict(w=torch.eye(5, dtype=torch.complex64), activation_bias=torch.zeros(5, dtype=torch.complex64)),
            errors.DtypeError,
            "real activation_bias with modrelu",
        ),
        (dict(w=torch.eye(5, dtype=torch.int64)), errors.DtypeError, "int64"),
        (dict(x=torch.zeros(6, 5), h0=torch.zeros(0, 5), batch_sizes=[]), errors.ShapeError, "add up to the rows of x"),
        (dict(x=torch.zeros(6, 5), batch_sizes=[3, 2]), errors.ShapeError, "add up to the rows of x, 6, got 5"),
    ],
)
def test_bad_arguments_are_said_in_one_sentence(change, error, text):
    arguments = dict(x=torch.zeros(2, 3, 5), w=torch.eye(5), h0=torch.zeros(3, 5))
    with pytest.raises(error) as caught:
        scan(**{**arguments, **change})
    assert text in str(caught.value)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_layer_gives_the_last_state_without_the_outputs(bidirectional):
    rnn: Any = OrthogonalRNN(3, 4, 2, bidirectional=bidirectional)
    x = torch.randn(9, 2, 3)
    out, h_n = rnn(x, last_only=True)
    assert out is None
    assert torch.allclose(h_n, rnn(x)[1], atol=1e-6)
    packed = nn.utils.rnn.pack_sequence([x[:, 0], x[:4, 1]])
    out, h_n = rnn(packed, last_only=True)
    assert out is None
    assert torch.allclose(h_n, rnn(packed)[1], atol=1e-6)
    assert rnn(x[:, 0], last_only=True)[0] is None


def test_layers_of_every_backend_copy():
    rnn: Any = OrthogonalRNN(3, 4, backend="reference")
    assert copy.deepcopy(rnn).backend == "reference"
