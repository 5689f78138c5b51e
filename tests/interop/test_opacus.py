"""opacus takes the gradient of every sample: of frames it is right, a map with a chart is refused by opacus."""

from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk

opacus = pytest.importorskip("opacus", reason="needs the extra [interop]")


def net(name) -> Any:
    first, last = (sk.orthogonal(nn.Linear(6, n), "weight", name) for n in (6, 4))
    return nn.Sequential(first, nn.Tanh(), last)


@pytest.mark.parametrize("is_functional", [False, True], ids=["hooks", "functorch"])
def test_gradients_of_samples_are_those_of_the_loop(is_functional):
    model, x = net("stiefel"), torch.randn(5, 6)
    losses = [(model(row) - 1).square().sum() for row in x.split(1)]
    expected = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    sampled = opacus.GradSampleModule(model, loss_reduction="sum", force_functorch=is_functional)
    (sampled(x) - 1).square().sum().backward()
    for p, loop in zip(model.parameters(), zip(*expected, strict=True), strict=True):
        found: Any = getattr(p, "grad_sample", None)
        assert torch.allclose(found, torch.stack(loop), atol=1e-5)


def test_a_map_with_a_chart_is_refused_before_training():
    with pytest.raises(NotImplementedError, match="buffers"):
        opacus.GradSampleModule(net("cayley"))
