"""What the scan is asked by, what it refuses, and what layers hand on to it."""

from typing import Any

import numpy as np
import pytest
import torch

from stiefelkit import errors
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.scan import rotation_scan, scan, scan_backend

STEPS = torch.zeros(5, 4)
SCANS: dict[str, Any] = {
    "scan": lambda **steps: scan(STEPS, torch.eye(4), torch.ones(3, 4), **steps),
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
    with pytest.raises(errors.OptionError, match="GPU"):
        scan(torch.zeros(2, 1, 4), w, torch.zeros(1, 4), backend="triton")
    with pytest.raises(errors.UnknownNameError, match="reference"):
        OrthogonalRNN(2, 3, backend="refrence")
    with pytest.raises(errors.ShapeError, match="square"):
        scan_backend(torch.zeros(()))


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (dict(activation="oplu"), errors.ShapeError, "even"),
        (dict(activation="leaky_relu(-1)"), errors.OptionError, "above"),
        (dict(activation="tanh(2)"), errors.OptionError, "leaky_relu"),
        (dict(activation="tanh", bias=torch.zeros(1)), errors.ShapeError, "bias"),
        (dict(x=torch.zeros(2, 3, 5, dtype=torch.complex64)), errors.DtypeError, "complex"),
        (dict(h0=torch.zeros(3, 5, dtype=torch.complex64)), errors.DtypeError, "h0"),
        (dict(w=1j * torch.eye(5), activation_bias=1j * torch.zeros(5)), errors.DtypeError, "activation_bias"),
        (dict(w=torch.eye(5, dtype=torch.int64)), errors.DtypeError, "int64"),
        (dict(x=torch.zeros(6, 5), batch_sizes=[3, 2]), errors.ShapeError, "rows"),
        (dict(w=torch.eye(5, 6)), errors.ShapeError, "square"),
        (dict(x=torch.zeros(0, 3, 5)), errors.ShapeError, "T >= 1"),
        (dict(x=torch.zeros(2, 3, 4)), errors.ShapeError, "width"),
        (dict(u=torch.zeros(5, 4)), errors.ShapeError, "u of shape"),
        (dict(h0=torch.zeros(1, 5)), errors.ShapeError, "h0 of shape"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, error, word):
    arguments = dict(x=torch.zeros(2, 3, 5), w=torch.eye(5), h0=torch.zeros(3, 5))
    with pytest.raises(error, match=word):
        scan(**{**arguments, **change})


@pytest.mark.parametrize("who", list(SCANS))
def test_sizes_may_be_any_integers_and_are_those_of_rows(who):
    expected = SCANS[who](batch_sizes=[3, 2])
    for sizes in (torch.tensor([3, 2]), np.array([3, 2])):
        assert all(map(torch.equal, SCANS[who](batch_sizes=sizes), expected))
    with pytest.raises(errors.ShapeError, match="increase"):
        SCANS[who](batch_sizes=[2, 3])
    with pytest.raises(errors.OptionError, match="integers"):
        SCANS[who](batch_sizes=[3.0, 2.0])
