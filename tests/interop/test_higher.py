"""higher differentiates through steps of an inner loop: of coordinates, whose weights stay on their manifolds."""

from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors

higher = pytest.importorskip("higher", reason="needs the extra [interop]")


def net(name) -> Any:
    return nn.Sequential(*(sk.orthogonal(nn.Linear(4, 4), "weight", name) for _ in range(2)))


@pytest.mark.parametrize("is_grouped", [False, True], ids=["alone", "grouped"])
@pytest.mark.parametrize("name", ["cayley", "householder", "givens", "matrix_exp"])
def test_a_step_of_the_inner_loop_is_that_of_functional_call(name, is_grouped):
    model, x = net(name), torch.ones(2, 4)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    names, held = [*before], list(model.parameters())
    g = torch.autograd.grad((model(x) - 1).square().sum(), held, create_graph=True)
    after = {key: p - 0.1 * d for key, p, d in zip(names, held, g, strict=True)}
    expected = torch.func.functional_call(model, (after, dict(model.named_buffers())), (x,))
    wanted = torch.autograd.grad(expected.square().sum(), held)
    if is_grouped:
        sk.group_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with higher.innerloop_ctx(model, optimizer, copy_initial_weights=False) as (inner, steps):
        steps.step((inner(x) - 1).square().sum())
        found = inner(x)
        got = torch.autograd.grad(found.square().sum(), held)
    assert torch.allclose(found, expected, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(got, wanted, strict=True))
    assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())


def test_a_plain_step_of_a_frame_is_refused():
    model, x = net("stiefel"), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with higher.innerloop_ctx(model, optimizer) as (inner, steps):
        steps.step((inner(x) - 1).square().sum())
        with pytest.raises(errors.NotAFrameError, match="flat map, such as cayley"):
            inner(x)
