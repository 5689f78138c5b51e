"""The adjoints of torchdiffeq call a model without gradients, and anew in the backward pass: gradients are right."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import stiefelkit as sk
from stiefelkit.testing import seeds

torchdiffeq = pytest.importorskip("torchdiffeq", reason="needs the extra [interop]")

maps = pytest.mark.parametrize("name", ["cayley", "householder", "stiefel"])


class Field(nn.Module):
    """The right-hand side of a differential equation."""

    def __init__(self, name: str, **options: Any):
        super().__init__()
        torch.manual_seed(seeds.seed(1))
        self.first, self.last = (
            sk.orthogonal(nn.Linear(4, 4, dtype=torch.float64), "weight", name, **options) for _ in range(2)
        )

    def forward(self, t, y):
        return self.last(torch.tanh(self.first(y)))


CONTEXTS = {"plain": lambda _: nullcontext(), "cached": lambda _: parametrize.cached(), "grouped": sk.grouped}


@maps
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("options", [{}, {"gain": 0.7}], ids=["bare", "gain"])
def test_the_adjoint_of_torchdiffeq_gives_the_gradients_of_backpropagation(name, context, options):
    y0 = torch.randn(3, 4, dtype=torch.float64, generator=seeds.generator(2))
    t, steps = torch.linspace(0, 1, 2, dtype=torch.float64), {"method": "rk4", "options": {"step_size": 0.05}}
    found = []
    for solve in (torchdiffeq.odeint, torchdiffeq.odeint_adjoint):
        f = Field(name, **options)
        with nullcontext() if solve is torchdiffeq.odeint else CONTEXTS[context](f):
            solve(f, y0, t, **steps)[-1].square().sum().backward()
        found.append([p.grad for p in f.parameters()])
    for expected, g in zip(*found, strict=True):
        assert torch.allclose(g, expected, rtol=1e-5, atol=1e-6)
