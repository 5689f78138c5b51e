"""What the scan is asked by, what it refuses, and what layers hand on to it."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stiefelkit import errors
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.scan import goru_scan, rotation_scan, scan, scan_backend

STEPS = torch.zeros(5, 4)
SCANS: dict[str, Any] = {
    "scan": lambda **steps: scan(STEPS, torch.eye(4), torch.ones(3, 4), **steps),
    "goru_scan": lambda **steps: goru_scan(
        STEPS, torch.ones(3, 4), torch.eye(4), torch.zeros(8, 4), u=torch.zeros(12, 4), bias=torch.zeros(8), **steps
    ),
    "rotation_scan": lambda **steps: rotation_scan(STEPS, torch.ones(2), h0=torch.ones(3, 4), **steps),
}
"""Scans of five packed rows; what they go by over time is left out."""


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


@pytest.mark.parametrize("who", list(SCANS))
@pytest.mark.parametrize("sizes", [3, 5.0, True, "32", [3.0, 2.0], [3, "2"], (3, None), [[3], [2]], torch.tensor(5)])
def test_sizes_of_another_kind_are_refused_by_name(who, sizes):
    with pytest.raises(errors.OptionError, match=f"{who} needs batch_sizes as a sequence of integers, or None, got"):
        SCANS[who](batch_sizes=sizes)


@pytest.mark.parametrize("who", list(SCANS))
def test_sizes_may_be_any_integers_and_are_those_of_rows(who):
    expected = SCANS[who](batch_sizes=[3, 2])
    for sizes in (torch.tensor([3, 2]), np.array([3, 2]), (n for n in (3, 2))):
        assert all(map(torch.equal, SCANS[who](batch_sizes=sizes), expected))
    for sizes in ([2, 3], [3, 2, 0], [6, -1]):
        with pytest.raises(errors.ShapeError, match=f"{who} needs batch_sizes that do not increase, each >= 1, got"):
            SCANS[who](batch_sizes=sizes)


@pytest.mark.parametrize("who", list(SCANS))
@pytest.mark.parametrize("flag", ["reverse", "last_only"])
def test_a_flag_that_is_none_is_refused(who, flag):
    for value in ("False", None, 1, [True], torch.ones(2)):
        with pytest.raises(errors.OptionError, match=f"{who} needs {flag} to be True or False, got"):
            SCANS[who](batch_sizes=[3, 2], **{flag: value})
    assert SCANS[who](batch_sizes=[3, 2], **{flag: np.True_})[1].shape == (3, 4)
    with pytest.raises(errors.OptionError, match="OrthogonalRNN needs last_only to be True or False, got 'no'"):
        OrthogonalRNN(3, 4)(torch.zeros(2, 1, 3), last_only="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [3, "x", [1.0], object()])
def test_what_is_no_tensor_is_refused_by_name(value):
    tensors = {"x": torch.zeros(2, 3, 4), "h0": torch.zeros(3, 4), "w": torch.eye(4)}
    gates = {"q": torch.eye(4), "w": torch.zeros(8, 4), "u": torch.zeros(12, 4), "bias": torch.zeros(8)}
    for run, given in ((scan, tensors), (goru_scan, {**tensors, **gates})):
        for name in {*given, "u", "bias", "activation_bias"}:
            with pytest.raises(errors.DtypeError, match=f"{run.__name__} needs {name} that is a tensor, got"):
                run(**{**given, name: value})
    with pytest.raises(errors.DtypeError, match="goru_scan needs bias that is a tensor, got NoneType"):
        goru_scan(**{**tensors, **gates, "bias": None})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3,), errors.DtypeError, "w that is a tensor, got int"),
        ((torch.zeros(()),), errors.ShapeError, r"a square w, got shape \(\)"),
        ((torch.eye(4), "x"), errors.OptionError, "an integer steps >= 1, or None, got 'x'"),
        ((torch.eye(4), 8.0), errors.OptionError, "got 8.0; write 8"),
    ],
)
def test_a_choice_is_asked_for_by_a_matrix_and_a_number_of_steps(arguments, error, text):
    with pytest.raises(error, match=f"scan_backend needs .*{text}"):
        scan_backend(*arguments)


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
