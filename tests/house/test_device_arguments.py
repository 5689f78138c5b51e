"""Modules make everything on their device: "meta" mixes with no other, so that a tensor made elsewhere is told."""

from typing import Any

import pytest
import torch
from torch.utils import _pytree

import stiefelkit as sk
from stiefelkit import models
from stiefelkit.weights.coordinate_list import CoordinateList

INPUTS, UNITS, STEPS = 3, 4, 5
VECTORS, SEQUENCES, BATCHES = (2, INPUTS), (STEPS, 2, INPUTS), (2, STEPS, INPUTS)
IMAGES = (2, INPUTS, 4, 4)
BOTH = (INPUTS, UNITS)
MODULES: dict[str, tuple[tuple[int, ...], dict[str, Any], tuple[int, ...]]] = {
    "CayleyConv2d": ((*BOTH, 2), {}, IMAGES),
    "GORU": (BOTH, {}, SEQUENCES),
    "LRU": (BOTH, {}, SEQUENCES),
    "LRUBlock": (BOTH, {}, BATCHES),
    "LinearTransitionRNN": (BOTH, {}, SEQUENCES),
    "ModReLU": ((INPUTS,), {}, VECTORS),
    "OrthogonalConv2d": ((*BOTH, 3), {}, IMAGES),
    "OrthogonalConvTranspose2d": ((*BOTH, 3), {}, IMAGES),
    "OrthogonalLinear": (BOTH, {}, VECTORS),
    "OrthogonalRNN": ((*BOTH, 2), {"bidirectional": True}, SEQUENCES),
    "OrthogonalRNNCell": (BOTH, {}, VECTORS),
    "ReflectorBlock": (BOTH, {}, BATCHES),
    "ReflectorRNN": (BOTH, {"decay": (0.9, 0.99), "conv": 2}, SEQUENCES),
    "RotationBlock": (BOTH, {}, BATCHES),
    "RotationRNN": (BOTH, {}, SEQUENCES),
}
"""Name to arguments, options, and the shape of an input."""


@pytest.fixture
def a_map_takes_coordinates_without_values(monkeypatch):
    monkeypatch.setattr(CoordinateList, "_is_unfilled", lambda self: False)


@pytest.mark.usefixtures("a_map_takes_coordinates_without_values")
@pytest.mark.parametrize("name", MODULES)
def test_modules_make_everything_on_the_device_they_are_given(name):
    sizes, options, shape = MODULES[name]
    check_that_all_is_on_meta(getattr(sk.nn, name)(*sizes, **options, device="meta"), shape)


@pytest.mark.usefixtures("a_map_takes_coordinates_without_values")
def test_an_adapter_is_on_the_device_of_its_weight():
    net = torch.nn.Sequential(torch.nn.Linear(INPUTS, UNITS, device="meta"))
    check_that_all_is_on_meta(sk.nn.adapt(net, "0.weight", block_size=INPUTS), VECTORS)


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
