"""TF32, bfloat16 products and autocast never touch the geometry, compiled or not, at sizes where float32 is used."""

import contextlib
from typing import Any

import pytest
import torch

import stiefelkit as sk
from stiefelkit.functional import polish, product, split_defect
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.testing import lowered_products


@contextlib.contextmanager
def lowered():
    with lowered_products(), torch.autocast("cpu", dtype=torch.bfloat16):
        yield


class Weight(torch.nn.Module):
    def __init__(self, n, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(n, n, dtype=dtype).fill_(torch.nan))

    def forward(self):
        return self.weight


def precisions_of_maps() -> list[tuple[str, torch.dtype, str]]:
    found = []
    for name, cls in sk.available().items():
        for precision in cls.precisions:
            real = cls.supports((160, 160), torch.float32) is None
            found.append((name, torch.float32 if real else torch.complex64, precision))
    return found


@pytest.mark.parametrize(("name", "dtype", "precision"), precisions_of_maps())
def test_lowered_products_change_nothing(name, dtype, precision):
    layer: Any = sk.orthogonal(Weight(160, dtype), "weight", name, precision=precision)
    coordinates = list(layer.parameters())
    g = torch.randn(160, 160, dtype=dtype)
    w = layer()
    expected = torch.autograd.grad(w, coordinates, g)
    with lowered():
        again = layer()
        assert torch.equal(again, w)
    assert all(map(torch.equal, torch.autograd.grad(again, coordinates, g), expected))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with lowered():
        traced = compiled()
        found = torch.autograd.grad(traced, coordinates, g)
    limit = rounding_limit(160, dtype)
    slack = 0 if precision == "exact" else layer.parametrizations["weight"].param.error_bound(*coordinates)
    assert torch.dist(traced, w) <= 12 * limit + slack
    for a, b in zip(found, expected, strict=True):
        assert torch.dist(a, b) <= 1e-4 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(("n", "p"), [(3, 3), (64, 64), (300, 300), (400, 20)])
def test_a_polish_reaches_the_rounding_limit(n, p, dtype):
    q = torch.linalg.qr(torch.randn(n, p, dtype=dtype))[0]
    bound = 1.2 * rounding_limit(p, dtype) + 1.2e-7
    assert orthogonality_error(polish(q)) <= bound
    # The form for devices without float64.
    assert orthogonality_error(q - q @ split_defect(q) / 2) <= bound


def test_products_have_right_derivatives_everywhere():
    a = torch.randn(2, 3, 4, requires_grad=True)
    b = torch.randn(4, 5, requires_grad=True)
    doubled = (a.detach().double().requires_grad_(), b.detach().double().requires_grad_())
    expected = [g.float() for g in torch.autograd.grad((doubled[0] @ doubled[1]).square().sum(), doubled)]
    with lowered():
        found = torch.autograd.grad(product(a, b).square().sum(), (a, b))
    for x, y in zip(found, expected, strict=True):
        assert torch.allclose(x, y, atol=1e-4)
    together = torch.vmap(torch.func.grad(lambda a: product(a, b.detach()).square().sum()))(a.detach())
    assert torch.allclose(together, expected[0], atol=1e-4)


def test_an_inherited_flag_stays_inherited():
    layer = sk.orthogonal(Weight(64, torch.float32), "weight", "matrix_exp")
    backends: Any = torch.backends
    try:
        backends.fp32_precision = "tf32"
        layer()
        backends.fp32_precision = "ieee"
        assert backends.mkldnn.matmul.fp32_precision == "ieee"
    finally:
        backends.fp32_precision = "none"


def test_a_polish_hands_its_gradient_on():
    w = torch.linalg.qr(torch.randn(5, 3, dtype=torch.float64))[0].requires_grad_()
    g = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(torch.autograd.grad(polish(w), w, g)[0], g)
