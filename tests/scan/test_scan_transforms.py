"""The fast scan under transforms of torch, in orders and on tensors of every layout."""

from typing import Any

import pytest
import torch

from stiefelkit.scan import scan
from stiefelkit.scan.checks import Recurrence
from stiefelkit.testing import lowered_products

DOUBLE = torch.float64


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize(
    ("activation", "is_complex"), [("tanh", False), ("abs", False), ("oplu", False), ("modrelu", True)]
)
def test_gradients_of_maps_over_samples_are_those_of_their_loop(activation, is_complex, last_only):
    dtype = DOUBLE.to_complex() if is_complex else DOUBLE
    samples, h0 = torch.randn(2, 9, 3, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype)
    w = torch.linalg.qr(torch.randn(4, 4, dtype=dtype))[0].contiguous()
    bias = 0.3 * torch.randn(4, dtype=DOUBLE)

    def loss(x: Any, w: Any, backend: str = "inplace") -> Any:
        out, last = scan(x, w, h0, activation=activation, activation_bias=bias, last_only=last_only, backend=backend)
        return (last if out is None else out).abs().square().sum()

    def mapped(x: Any, w: Any) -> Any:
        return torch.func.vmap(loss, (0, None))(x, w).sum()

    leaves = [samples.clone().requires_grad_(), w.clone().requires_grad_()]
    total = torch.stack([loss(x, leaves[1], "reference") for x in leaves[0]]).sum()
    for i, expected in enumerate(torch.autograd.grad(total, leaves)):
        assert torch.allclose(torch.func.grad(mapped, i)(samples, w), expected)
        alone = [t if j == i else t.detach() for j, t in enumerate(leaves)]
        assert torch.allclose(torch.autograd.grad(mapped(*alone), leaves[i])[0], expected)


@pytest.mark.parametrize("is_complex", [False, True])
def test_last_states_alone_lie_in_memory_as_tracing_says_whatever_h0_and_its_gradient_do(is_complex):
    dtype = DOUBLE.to_complex() if is_complex else DOUBLE
    w = torch.linalg.qr(torch.randn(4, 4, dtype=dtype))[0].contiguous()
    h0, g = torch.randn(4, 3, dtype=dtype).mT.requires_grad_(), torch.randn(4, 3, dtype=dtype).mT
    x = torch.randn(9, 3, 4, dtype=dtype)
    forward, backward = torch.ops.stiefelkit.scan_forward.default, torch.ops.stiefelkit.scan_backward.default
    leaves = (x, w, h0, None, None, None, *Recurrence("identity", None, False, True, False, "inplace"))
    torch.library.opcheck(forward, (*leaves, True), test_utils="test_faketensor")
    marks, _, saved = (t.detach() for t in forward(*leaves, True))
    needs = [True, True, True, False, False, False]
    torch.library.opcheck(backward, (*leaves, marks, saved, None, g, needs), test_utils="test_faketensor")


@pytest.mark.parametrize("last_only", [False, True])
def test_batches_of_gradients_of_autograds_own_are_those_of_torch_func(last_only):
    w, h0 = torch.linalg.qr(torch.randn(3, 3, dtype=DOUBLE))[0], torch.zeros(2, 3, dtype=DOUBLE)

    def last(x: torch.Tensor, backend: str = "inplace") -> torch.Tensor:
        return scan(x, w, h0, activation="tanh", last_only=last_only, backend=backend)[1]

    x, jacobian = torch.randn(9, 2, 3, dtype=DOUBLE), torch.autograd.functional.jacobian
    expected: Any = jacobian(lambda x: last(x, "reference"), x, vectorize=True)
    assert torch.allclose(torch.func.jacrev(last)(x), expected)
    assert torch.allclose(jacobian(last, x, vectorize=True), expected)


@pytest.mark.parametrize("backend", ["reference", "inplace"])
def test_lowered_products_reach_neither_states_nor_gradients(backend):
    w, x, h0 = torch.linalg.qr(torch.randn(64, 64))[0].contiguous(), torch.randn(20, 32, 64), torch.zeros(32, 64)

    def results():
        leaf = w.clone().requires_grad_()
        out: Any = scan(x, leaf, h0, activation="tanh", backend=backend)[0]
        return [out, *torch.autograd.grad(out.sum(), leaf)]

    exact = results()
    with lowered_products():
        lowered = results()
    for a, b in zip(lowered, exact, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_scan_of_no_inputs_and_on_the_meta_device_has_its_shapes():
    inputs = torch.zeros(9, 2, 0), torch.eye(3), torch.ones(2, 3)
    found: Any = scan(*inputs, u=torch.zeros(3, 0), activation="tanh")
    assert found[0].shape == (9, 2, 3)
    found = scan(*(torch.empty(shape, device="meta") for shape in ((9, 2, 3), (3, 3), (2, 3))), activation="tanh")
    assert found[0].shape == (9, 2, 3)
    assert found[1].is_meta
