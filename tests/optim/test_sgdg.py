"""SGDG: the published call and step, made exactly."""

import inspect
import random
from typing import Any

import pytest
import torch
from optimizers_at_hand import excess, frame, gradient
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.testing import seeds

PUBLISHED = "params lr momentum dampening weight_decay nesterov stiefel omega grad_clip".split()


def published_step(w, g, lr):
    """Rows are what is rotated there: R Cay(a skew(R^T G)), a bounded by the largest sum in a column."""
    a = (w.mT @ g - g.mT @ w) / 2
    h = min(lr, 1 / a.abs().sum(0).max().item()) / 2
    eye = torch.eye(len(w), dtype=w.dtype)
    return w @ torch.linalg.solve(eye + h * a, eye - h * a)


def test_it_is_called_as_the_published_class_is():
    parameters = list(inspect.signature(sk.optim.SGDG).parameters.values())
    assert [p.name for p in parameters[: len(PUBLISHED)]] == PUBLISHED
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[: len(PUBLISHED)])
    w = frame((4, 4))
    (group,) = sk.optim.SGDG([w], 1.5, 0, 0, 0.1, False, True, 0, None).param_groups
    assert (group["manifold"], group["weight_decay"]) == ("stiefel:euclidean", 0.0)


@pytest.mark.parametrize("lr", [0.05, 1.5])
def test_a_step_is_the_published_one_with_the_inverse_in_place_of_five_iterations(lr):
    w, g = frame((9, 9), torch.float64), gradient((9, 9), torch.float64) * 3
    expected = published_step(w.detach(), g, lr)
    optimizer = sk.optim.SGDG([w], lr=lr, stiefel=True)
    w.grad = g
    optimizer.step()
    assert torch.dist(w, expected) < 1e-13


def test_without_stiefel_it_is_torchs_sgd():
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3)) for _ in range(2))
    settings: dict[str, Any] = dict(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    with pytest.warns(UserWarning, match="holds no frame"):
        optimizer = sk.optim.SGDG([ours], **settings)
    for one, p in ((optimizer, ours), (torch.optim.SGD([theirs], **settings), theirs)):
        for k in range(3):
            p.grad = torch.full_like(p, k - 0.5)
            one.step()
    assert torch.equal(ours, theirs)


def learned_rotation(steps=30, n=96):
    """A float32 rotation inside a bfloat16 model, learned as SpinQuant learns one."""
    source = seeds.generator()
    x = torch.randn(64, n, generator=source)
    x[:, ::16] *= 20
    layer: Any = nn.Linear(n, n, bias=False, dtype=torch.bfloat16)
    sk.orthogonal(layer, "weight", "stiefel", init="identity")
    optimizer = sk.optim.SGDG(sk.optim.parameter_groups(layer, lr=1.5), lr=1.5, momentum=0.5)
    worst, rotation = 0.0, sk.coordinates(layer, "weight")["stiefel"]
    for _ in range(steps):
        random.random()
        optimizer.zero_grad()
        y = layer(x.bfloat16()).float()
        (y.pow(4).mean() / y.square().mean().square()).backward()
        optimizer.step()
        worst = max(worst, orthogonality_error(rotation).item() / rounding_limit(n, torch.float32))
    return rotation.detach().clone(), worst


def test_a_float32_rotation_in_a_bfloat16_model_is_the_same_every_time_and_within_two_limits():
    (one, worst), (other, _) = learned_rotation(), learned_rotation()
    assert one.dtype == torch.float32
    assert torch.dist(one, torch.eye(len(one))) > 0.5
    assert torch.equal(one, other)
    assert worst <= 2


def test_clipping_bounds_the_gradient_of_each_frame():
    w, v = frame((6, 6), torch.float64), frame((6, 6), torch.float64)
    g = gradient((6, 6), torch.float64)
    for one, clip, scale in ((w, 0.1, 1.0), (v, None, 0.1 / g.norm().item())):
        optimizer = sk.optim.SGDG([one], lr=0.1, stiefel=True, grad_clip=clip)
        one.grad = g * scale
        optimizer.step()
    assert torch.dist(w, v) < 1e-13


def test_groups_say_by_themselves_what_they_are():
    w, b = frame((5, 5)), nn.Parameter(torch.ones(3))
    optimizer = sk.optim.SGDG([{"params": [w], "stiefel": True}, {"params": [b]}], lr=0.1)
    w.grad, b.grad = gradient((5, 5)), torch.ones(3)
    optimizer.step()
    assert torch.allclose(b, torch.full((3,), 0.9))
    assert excess(w) <= 2


def test_what_it_cannot_move_is_refused():
    with pytest.raises(errors.OptionError, match="nesterov"):
        sk.optim.SGDG([frame((3, 3))], lr=0.1, nesterov=True, stiefel=True)
    with pytest.raises(errors.ShapeError, match="adjoint"):
        sk.optim.SGDG([nn.Parameter(torch.eye(4)[:2])], lr=0.1, stiefel=True)
    with pytest.raises(errors.OptionError, match="grad_clip"):
        sk.optim.SGDG([frame((3, 3))], lr=0.1, stiefel=True, grad_clip=0)
