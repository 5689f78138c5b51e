"""Copies by `__dict__`, as libraries of meta-learning make them, ensembles and charts: right, or refused."""

import contextlib
from typing import Any

import pytest
import torch
from every_map import close, make, squares
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.metrics import orthogonality_error

FLAT = [name for name in sk.available() if name not in ("stiefel", "fourier")]


def copied(module) -> Any:
    """The same module with its own tables of parameters and children, and tensors in the graph of the original's."""
    other = module.__new__(type(module))
    other.__dict__ = dict(module.__dict__)
    other._parameters = {key: None if p is None else p.clone() for key, p in module._parameters.items()}
    other._buffers = dict(module._buffers)
    other._modules = {key: copied(child) for key, child in module._modules.items()}
    return other


def replaced(module, values):
    for key, p in module._parameters.items():
        if p is not None:
            module._parameters[key] = values.pop(0)
    for child in module._modules.values():
        replaced(child, values)


def stepped(module, x, rate=0.1):
    gradients = torch.autograd.grad(squares(module(x) - 1), list(module.parameters()), create_graph=True)
    return [p - rate * g for p, g in zip(module.parameters(), gradients, strict=True)]


@pytest.mark.parametrize("is_grouped", [False, True], ids=["alone", "grouped"])
@pytest.mark.parametrize("name", FLAT)
def test_a_step_of_a_copy_is_its_own_and_has_a_gradient_in_the_original(name, is_grouped):
    net: Any = nn.Sequential(*(make(name, torch.float32) for _ in range(2)))
    x, w = torch.ones(2, 4), net[0].weight.detach().clone()
    with sk.grouped(net) if is_grouped else contextlib.nullcontext():
        net(x)
        other = copied(net)
        replaced(other, stepped(other, x))
        found = other(x)
    names = [key for key, _ in net.named_parameters()]
    state = dict(zip(names, stepped(net, x), strict=True)), dict(net.named_buffers())
    expected = torch.func.functional_call(net, state, (x,))
    assert close(found, expected, 1e-4)
    assert not torch.equal(found, net(x))
    assert torch.equal(net[0].weight, w)
    found, expected = (torch.autograd.grad(squares(y), list(net.parameters())) for y in (found, expected))
    assert all(close(a, b, 1e-3) for a, b in zip(found, expected, strict=True))


def test_a_plain_step_of_a_frame_is_refused_and_one_along_the_manifold_is_not():
    layer, x = make("stiefel", torch.float32), torch.ones(2, 4)
    other = copied(layer)
    replaced(other, stepped(other, x))
    with pytest.raises(errors.NotAFrameError, match="manifolds"):
        other(x)
    other, manifold = copied(layer), sk.manifolds.Stiefel()
    held = other.parametrizations.weight
    (g,) = torch.autograd.grad(squares(other(x) - 1), [held.original0], create_graph=True)
    held._parameters["original0"] = manifold.retr(held.original0, -0.1 * manifold.egrad2rgrad(held.original0, g))
    assert orthogonality_error(other.weight.detach()).item() < 1e-6
    squares(other(x)).backward()
    assert sk.coordinates(layer, "weight")["stiefel"].grad is not None


@pytest.mark.parametrize("dim", [0, 2])
def test_an_ensemble_of_frames_that_are_none_is_refused(dim):
    layer = make("stiefel", torch.float32)
    w = torch.stack([layer.weight.detach() for _ in range(3)], dim)

    def run(w):
        state = {"bias": layer.bias, "parametrizations.weight.original0": w}
        return torch.func.functional_call(layer, state, (torch.ones(4),))

    assert torch.vmap(run, dim)(w).shape == (3, 4)
    with pytest.raises(errors.NotAFrameError, match="stiefel"):
        torch.vmap(run, dim)(1.5 * w)


@pytest.mark.parametrize("name", ["matrix_exp", "rebased"])
def test_a_frame_in_a_chart_that_trains_is_refused(name):
    layer, x = make(name, torch.float32, 4, 3), torch.ones(3)
    chart = dict(layer.named_buffers())
    trained = {key: b.clone().requires_grad_() for key, b in chart.items() if key.endswith((".rotation", ".base"))}
    assert trained
    assert torch.equal(torch.func.functional_call(layer, chart, (x,)), layer(x))
    with pytest.raises(errors.OptionError, match="chart"):
        torch.func.functional_call(layer, chart | trained, (x,))
    stacks = {key: torch.stack([b, b]) for key, b in trained.items()}
    with pytest.raises(errors.OptionError, match="chart"):
        torch.vmap(lambda frames: torch.func.functional_call(layer, chart | frames, (x,)))(stacks)
