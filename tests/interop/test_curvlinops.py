"""curvlinops multiplies by Hessians, forward over reverse without grad mode: of coordinates, to rounding."""

import pytest
import torch
from torch import nn

import stiefelkit as sk

curvlinops = pytest.importorskip("curvlinops", reason="needs curvlinops-for-pytorch, which brings torchvision")


@pytest.mark.parametrize("name", ["cayley", "householder", "givens", "matrix_exp", "stiefel"])
def test_the_hessian_is_that_of_torch(name):
    model = nn.Sequential(sk.orthogonal(nn.Linear(4, 3), "weight", name), nn.Tanh()).double()
    x, target, loss = torch.randn(5, 4).double(), torch.randint(0, 3, (5,)), nn.CrossEntropyLoss()
    held, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    sizes = [p.numel() for p in held.values()]

    def value(vector):
        parts = [part.view_as(p) for part, p in zip(vector.split(sizes), held.values(), strict=True)]
        state = dict(zip(held, parts, strict=True)), buffers
        return loss(torch.func.functional_call(model, state, (x,)), target)

    vector = nn.utils.parameters_to_vector(held.values()).detach()
    expected = torch.func.jacrev(torch.func.jacrev(value))(vector)
    operator = curvlinops.HessianLinearOperator(model, loss, list(held.values()), [(x, target)])
    found = operator @ torch.eye(len(vector), dtype=torch.float64)
    assert expected.abs().max() > 1e-3
    assert torch.allclose(found, expected, atol=1e-10)
