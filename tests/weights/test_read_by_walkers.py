"""Code that reads weights in backward passes, walks through a model or lists entries itself gets frames right."""

import copy
from typing import Any

import pytest
import torch
from every_map import close, make, over_all_maps, squares
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.testing import seeds


class Vjp(torch.autograd.Function):
    """Calls a layer without gradients, and anew in the backward pass, as adjoints of differential equations do."""

    @staticmethod
    def forward(ctx, layer, x, *parameters):
        ctx.layer, ctx.parameters = layer, parameters
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, *gradients):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        found = torch.autograd.grad(y, (x, *ctx.parameters), gradients, allow_unused=True)
        return None, *found


def without_first(layer, x):
    with torch.no_grad():
        layer(x)
    return layer(layer(x))


def by_vjp(layer, x):
    return Vjp.apply(layer, Vjp.apply(layer, x, *layer.parameters()), *layer.parameters())


def by_checkpoint(use_reentrant):
    def call(layer, x):
        y = checkpoint(layer, x, use_reentrant=use_reentrant)
        return layer(checkpoint(lambda y: layer(layer(y)), y, use_reentrant=use_reentrant))

    return call


WAYS = {
    "first without gradients": without_first,
    "vjp in backward": by_vjp,
    "reentrant checkpoint": by_checkpoint(True),
    "checkpoint": by_checkpoint(False),
}


@over_all_maps
@pytest.mark.parametrize("way", WAYS)
def test_cached_weights_have_the_gradients_of_those_that_are_not_cached(name, dtype, way):
    layer = make(name, dtype)
    x = torch.randn(3, 4, dtype=dtype, generator=seeds.generator(1)).requires_grad_()
    squares(WAYS[way](layer, x)).backward()
    expected = [t.grad.clone() for t in (x, *layer.parameters())]  # type: ignore[union-attr]
    for t in (x, *layer.parameters()):
        t.grad = None
    with parametrize.cached():
        squares(WAYS[way](layer, x)).backward()
    for t, g in zip((x, *layer.parameters()), expected, strict=True):
        assert t.grad is not None
        assert close(t.grad, g)


def test_a_frozen_weight_is_cached_with_and_without_gradients():
    layer = make("cayley", torch.float32).requires_grad_(False)
    for mode in (True, False):
        with parametrize.cached(), torch.set_grad_enabled(mode):
            assert layer.weight is layer.weight


class Listing(nn.Linear):
    """A layer that lists its entries of a state dict itself, without asking torch."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in ("weight", "bias"):
            t = getattr(self, name)
            destination[prefix + name] = t if keep_vars else t.detach()


@over_all_maps
def test_a_layer_that_lists_its_weight_saves_the_coordinates_alone_and_loads(name, dtype):
    layers: Any = [sk.orthogonal(Listing(4, 4, dtype=dtype), "weight", name) for _ in range(2)]
    first, second = map(nn.Sequential, layers)
    state = first.state_dict()
    assert "0.weight" not in state
    second.load_state_dict(state)
    assert torch.equal(layers[1].weight, layers[0].weight)
    assert torch.equal(copy.deepcopy(first)[0].weight, layers[0].weight)  # type: ignore[arg-type]
    sk.bake(first)
    assert list(first.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("options", [{}, {"gain": 0.5}], ids=["bare", "gain"])
@pytest.mark.parametrize("name", ["cayley", "householder", "givens", "matrix_exp", "stiefel"])
def test_counters_that_register_buffers_everywhere_are_refused_before_a_map_has_one(name, options):
    layer: Any = sk.orthogonal(nn.Linear(4, 3), "weight", name, **options)
    chart = list(layer.parametrizations.weight.param.chart)

    def count(module):
        module.register_buffer("total", torch.zeros(1))

    with pytest.raises(errors.OptionError, match="deepcopy"):
        layer.apply(count)
    assert list(layer.parametrizations.weight.param.chart) == chart
    assert list(sk.drift(layer)) == ["weight"]
    plain = sk.bake(copy.deepcopy(layer)).apply(count)
    assert "total" in plain.state_dict()
