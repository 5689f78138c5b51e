"""Modules make everything on their device: "meta" mixes with no other, so that a tensor made elsewhere is told."""

from typing import Any

import pytest
import torch
from torch.utils import _pytree

import stiefelkit as sk
from stiefelkit import models
from stiefelkit.weights.coordinate_list import CoordinateList

INPUTS, UNITS, STEPS = 3, 4, 5
VECTORS, SEQUENCES = (2, INPUTS), (STEPS, 2, INPUTS)

MODULES: dict[str, Any] = {
    "CayleyConv2d": (lambda: sk.nn.CayleyConv2d(INPUTS, UNITS, 2, device="meta"), (2, INPUTS, 4, 4)),
    "GORU": (lambda: sk.nn.GORU(INPUTS, UNITS, device="meta"), SEQUENCES),
    "LRU": (lambda: sk.nn.LRU(INPUTS, UNITS, device="meta"), SEQUENCES),
    "LRUBlock": (lambda: sk.nn.LRUBlock(INPUTS, UNITS, device="meta"), (2, STEPS, INPUTS)),
    "LinearTransitionRNN": (lambda: sk.nn.LinearTransitionRNN(INPUTS, UNITS, device="meta"), SEQUENCES),
    "ModReLU": (lambda: sk.nn.ModReLU(INPUTS, device="meta"), VECTORS),
    "OrthogonalConv2d": (lambda: sk.nn.OrthogonalConv2d(INPUTS, UNITS, 3, device="meta"), (2, INPUTS, 4, 4)),
    "OrthogonalConvTranspose2d": (
        lambda: sk.nn.OrthogonalConvTranspose2d(INPUTS, UNITS, 3, device="meta"),
        (2, INPUTS, 4, 4),
    ),
    "OrthogonalLinear": (lambda: sk.nn.OrthogonalLinear(INPUTS, UNITS, device="meta"), VECTORS),
    "OrthogonalRNN": (lambda: sk.nn.OrthogonalRNN(INPUTS, UNITS, 2, bidirectional=True, device="meta"), SEQUENCES),
    "OrthogonalRNNCell": (lambda: sk.nn.OrthogonalRNNCell(INPUTS, UNITS, device="meta"), VECTORS),
    "RotationBlock": (lambda: sk.nn.RotationBlock(INPUTS, UNITS, device="meta"), (2, STEPS, INPUTS)),
    "RotationRNN": (lambda: sk.nn.RotationRNN(INPUTS, UNITS, device="meta"), SEQUENCES),
    "adapt": (
        lambda: sk.nn.adapt(
            torch.nn.Sequential(torch.nn.Linear(INPUTS, UNITS, device="meta")), "0.weight", block_size=INPUTS
        ),
        VECTORS,
    ),
}


@pytest.fixture
def a_map_takes_coordinates_without_values(monkeypatch):
    monkeypatch.setattr(CoordinateList, "_is_unfilled", lambda self: False)


@pytest.mark.usefixtures("a_map_takes_coordinates_without_values")
@pytest.mark.parametrize("name", MODULES)
def test_modules_make_everything_on_the_device_they_are_given(name):
    make, shape = MODULES[name]
    check_that_all_is_on_meta(make(), shape)


@pytest.mark.usefixtures("a_map_takes_coordinates_without_values")
@pytest.mark.parametrize("name", models.names())
def test_models_make_everything_on_the_device_of_the_context(name):
    with torch.device("meta"):
        net = models.create(name, INPUTS, UNITS, 2)
    check_that_all_is_on_meta(net, (2, STEPS, INPUTS))


def check_that_all_is_on_meta(module: Any, shape: tuple[int, ...]) -> None:
    tree: Any = _pytree
    outs = [t for t in tree.tree_leaves(module(torch.empty(shape, device="meta"))) if isinstance(t, torch.Tensor)]
    torch.stack([t.real.sum() for t in outs]).sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert gradients
    assert all(t.is_meta for t in (*module.parameters(), *module.buffers(), *outs, *gradients))
