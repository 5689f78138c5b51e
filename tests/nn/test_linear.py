"""OrthogonalLinear against torch's linear with the same weight."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parametrize

import stiefelkit as sk

MAPS = [
    ("cayley", torch.float32, (12, 12), {}),
    ("cayley", torch.float32, (12, 5), {}),
    ("householder", torch.float32, (80, 80), {"reflections": 3}),
    ("householder", torch.complex64, (80, 80), {"reflections": 3}),
    ("givens", torch.float32, (80, 80), {"layers": 2}),
    ("matrix_exp", torch.float64, (9, 12), {}),
    ("fourier", torch.complex64, (16, 16), {}),
]


@pytest.mark.parametrize(("name", "dtype", "shape", "options"), MAPS)
def test_it_equals_torchs_linear(name, dtype, shape, options):
    layer = sk.nn.OrthogonalLinear(shape[1], shape[0], parametrization=name, dtype=dtype, **options)
    x = torch.randn(2, 7, shape[1], dtype=dtype, requires_grad=True)
    g = torch.randn(2, 7, shape[0], dtype=dtype)
    y, expected = layer(x), F.linear(x, layer.weight, layer.bias)
    assert y.dtype == expected.dtype
    assert torch.dist(y, expected) <= 8 * torch.finfo(dtype).eps * expected.norm()
    inputs = [x, *layer.parameters()]
    ours, theirs = torch.autograd.grad(y, inputs, g), torch.autograd.grad(expected, inputs, g)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
    for leading in ((), (0,), (2, 0)):
        assert layer(torch.zeros(*leading, shape[1], dtype=dtype)).shape == (*leading, shape[0])
    with pytest.raises(RuntimeError):
        layer(torch.zeros(2, shape[1], dtype=torch.complex128 if dtype != torch.complex128 else torch.float32))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_the_output_has_torchs_dtype(x_dtype):
    layer = sk.nn.OrthogonalLinear(80, 80, parametrization="householder", reflections=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(3, 80, dtype=x_dtype)
        y, expected = layer(x), F.linear(x, layer.weight, layer.bias)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(y.float(), expected.float(), atol=0.1)


def test_a_cached_weight_and_further_parametrizations_are_respected():
    class Halved(torch.nn.Module):
        def forward(self, w):
            return w / 2

    layer = sk.nn.OrthogonalLinear(80, 80, bias=False, parametrization="householder", reflections=2)
    x = torch.randn(3, 80)
    with parametrize.cached():
        w = layer.weight
        assert layer.weight is w
        assert torch.equal(layer(x), F.linear(x, w))
    parametrize.register_parametrization(layer, "weight", Halved())
    assert torch.allclose(layer(x).norm(), x.norm() / 2, atol=1e-4)


def test_it_starts_as_asked_and_resets():
    layer = sk.nn.OrthogonalLinear(4, 4, parametrization="cayley", init="identity")
    assert torch.allclose(layer.weight, torch.eye(4))
    layer = sk.nn.OrthogonalLinear(6, 4)
    before = layer.weight.detach().clone()
    layer.reset_parameters()
    assert not torch.allclose(layer.weight, before)
    assert torch.allclose(layer.weight @ layer.weight.mT, torch.eye(4), atol=1e-6)
