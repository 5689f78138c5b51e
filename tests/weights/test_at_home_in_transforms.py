"""Calls, ensembles and traces of orthogonal weights: the rows of docs/at-home-in-torch.md on torch.func, fx and jit."""

import copy
from typing import Any

import pytest
import torch
from every_map import OwnLinear, close, make, over_all_maps, squares
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.testing import seeds
from stiefelkit.testing.cases import random_coordinates


class Twice(nn.Module):
    """Two layers, one after the other, that read one weight."""

    def __init__(self, first):
        super().__init__()
        self.first, self.last = first, nn.Linear(4, 4, dtype=first.bias.dtype)

    def forward(self, x):
        return self.last(self.first(x))


def test_functional_call_that_ties_leaves_what_it_was_given_in_shared_modules_of_torchs_own_too():
    net = nn.Sequential(layer := nn.Linear(4, 4), layer)
    given = {key: torch.zeros_like(p) for key, p in net.named_parameters()}
    torch.func.functional_call(net, given, torch.ones(4))
    assert any(p is given.get(key) for key, p in net.named_parameters()), "torch mends it: take it out of docs/faq.md"


@over_all_maps
def test_functional_call_leaves_tied_weights_as_they_were_without_tying_them_itself(name, dtype):
    net, other = (Twice(make(name, dtype)) for _ in range(2))
    for each in (net, other):
        sk.tie(each.first, "weight", each.last, "weight")
    other.last.bias = nn.Parameter(net.last.bias.detach().clone() + 1)
    before = {key: id(p) for key, p in net.named_parameters(remove_duplicate=False)}
    parameters, buffers = (dict(held()) for held in (other.named_parameters, other.named_buffers))
    x, w = torch.ones(2, 4, dtype=dtype), net.first.weight.detach().clone()

    def call(parameters):
        return torch.func.functional_call(net, (parameters, buffers), x, tie_weights=False)

    assert torch.equal(call(parameters), other(x))
    assert {key: id(p) for key, p in net.named_parameters(remove_duplicate=False)} == before
    assert torch.equal(net.first.weight, w)
    grads = torch.func.grad(lambda parameters: squares(call(parameters)))(parameters)
    squares(other(x)).backward()
    for key, p in other.named_parameters():
        assert close(grads[key], p.grad, 1e-4)


@over_all_maps
def test_ensembles_by_torchs_recipe(name, dtype):
    models = [nn.Sequential(make(name, dtype), nn.Tanh(), make(name, dtype)) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    base = copy.deepcopy(models[0]).to("meta")
    x = torch.ones(2, 4, dtype=dtype)

    def run(parameters, buffers, x):
        return torch.func.functional_call(base, (parameters, buffers), (x,))

    out = torch.vmap(run, (0, 0, None))(parameters, buffers, x)
    squares(out).backward()
    for i, model in enumerate(models):
        assert close(out[i], model(x))
        squares(model(x)).backward()
        for key, p in model.named_parameters():
            assert close(parameters[key].grad[i], p.grad, 1e-4)


def moved(layer):
    """Other values for a layer's parameters: large coordinates, another frame."""
    coordinate_list = layer.parametrizations.weight
    drawn = random_coordinates(coordinate_list.param, 3.0, seeds.generator(6))
    with torch.no_grad():
        coordinate_list.fill_(drawn)
    return layer


@over_all_maps
def test_symbolic_trace_has_the_weight_as_one_module(name, dtype):
    own = sk.orthogonal(OwnLinear(4, 4, dtype=dtype), "weight", name)
    layers = nn.Sequential(own, sk.nn.OrthogonalLinear(4, 4, parametrization=name, dtype=dtype))
    traced = torch.fx.symbolic_trace(layers)
    for layer in layers:
        moved(layer)
    x = torch.ones(2, 4, dtype=dtype)
    assert close(traced(x), layers(x))
    found, expected = (torch.autograd.grad(squares(f(x)), list(layers.parameters())) for f in (traced, layers))
    assert all(close(a, b, 1e-4) for a, b in zip(found, expected, strict=True))


@over_all_maps
def test_make_fx_writes_down_the_weight_and_its_gradient_for_all_coordinates(name, dtype):
    layer, mode = make(name, dtype), "real" if dtype.is_complex else "fake"

    def gradients(parameters, buffers, x):
        def loss(parameters):
            return squares(torch.func.functional_call(layer, (parameters, buffers), (x,)))

        return torch.func.grad_and_value(loss)(parameters)

    def state():
        return {key: p.detach() for key, p in layer.named_parameters()}, dict(layer.named_buffers())

    x = torch.ones(2, 4, dtype=dtype)
    traced = make_fx(gradients, tracing_mode=mode)(*state(), x)
    moved(layer)
    (found, value), (expected, other) = traced(*state(), x), gradients(*state(), x)
    assert close(value, other)
    assert all(close(found[key], expected[key], 1e-4) for key in expected)


@over_all_maps
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_follows_the_coordinates_and_gives_their_gradients(name, dtype):
    layer = make(name, dtype)
    traced: Any = torch.jit.trace(layer, (torch.ones(2, 4, dtype=dtype),))
    moved(layer)
    x = torch.randn(3, 4, dtype=dtype)
    assert close(traced(x), layer(x))
    found, expected = (torch.autograd.grad(squares(f(x)), list(layer.parameters())) for f in (traced, layer))
    assert all(close(a, b, 1e-4) for a, b in zip(found, expected, strict=True))


@over_all_maps
def test_a_whole_weight_in_functional_call_is_assigned_for_the_call(name, dtype):
    layer, other = make(name, dtype), make(name, dtype)
    w, x = layer.weight.detach().clone(), torch.ones(2, 4, dtype=dtype)
    call = {"weight": other.weight.detach()}
    if not layer.parametrizations.weight.param.traits.invertible:
        with pytest.raises(errors.ImageError):
            torch.func.functional_call(layer, call, x)
        return
    assert close(torch.func.functional_call(layer, call, x), x @ other.weight.mT + layer.bias)
    assert close(layer.weight, w)
