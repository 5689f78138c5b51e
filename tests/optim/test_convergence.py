"""Problems with a known optimum: every optimizer of frames comes within 1e-6 of it."""

import numpy as np
import pytest
import torch
from optimizers_at_hand import OPTIMIZERS
from sklearn.datasets import load_breast_cancer
from torch import nn

import stiefelkit as sk
from stiefelkit import init
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.testing import seeds

METRICS = ["canonical", "euclidean"]
PROBLEMS = [
    ((12, 12), torch.float32, "canonical"),
    ((12, 12), torch.complex64, "euclidean"),
    ((20, 5), torch.float32, "euclidean"),
    ((20, 5), torch.complex64, "canonical"),
]
"""Each pair of a shape, a field and a metric once."""


def random(*shape, dtype, seed):
    return torch.randn(*shape, dtype=working_dtype(dtype), generator=seeds.generator(seed))


def haar(shape, dtype, seed):
    return init.haar(shape, working_dtype(dtype), seeds.generator(seed))


def minimise(name, objective, shape, dtype, metric, lr, target):
    """Runs an optimizer from a Haar frame until the objective, in double, is at the target, and returns it."""
    found = torch.inf
    w = nn.Parameter(haar(shape, dtype, 0).to(dtype))
    lr, steps, halvings = {
        "CayleyAdam": (1.0, 1000, 20),
        "ManifoldMuon": (0.1, 800, 14),
        "POGO": (0.05, 600, 0),
        "SPEL": (0.1, 800, 14),
        "StiefelAdam": (0.1, 600, 14),
    }.get(name, (lr, 1000, 0))
    optimizer = getattr(sk.optim, name)([{"params": [w], "manifold": f"stiefel:{metric}"}], lr=lr)
    # the steps of Adam, and those of the spectral norm, do not shrink with the gradient
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 ** (halvings / steps))
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        objective(w).backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            found = objective(w.detach().to(working_dtype(dtype))).item()
            if found <= target:
                break
    assert orthogonality_error(w) <= 2 * rounding_limit(shape[-1], dtype) + torch.finfo(dtype).eps
    return found


@pytest.mark.parametrize(("shape", "dtype", "metric"), PROBLEMS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_procrustes(name, shape, dtype, metric):
    """Min ||A W - B||_F^2 over frames with A = I: the polar factor of B."""
    b, start = haar(shape, dtype, 1), haar(shape, dtype, 0)
    if shape[0] == shape[1] and not dtype.is_complex and torch.linalg.det(b) * torch.linalg.det(start) < 0:
        b[:, 0] *= -1  # the start and the optimum in one component of O(n)
    b += 0.2 * random(*shape, dtype=dtype, seed=2) / shape[0] ** 0.5
    optimum = (b.abs().square().sum() + shape[1] - 2 * torch.linalg.svdvals(b).sum()).item()
    target = optimum + 1e-6 * b.abs().square().sum().item()
    found = minimise(name, lambda w: (w - b.to(w.dtype)).abs().square().sum(), shape, dtype, metric, 0.05, target)
    assert found <= target


@pytest.mark.parametrize("rate", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("name", ["CayleySGD", "MultiplicativeCayley", "POGO"])
def test_defaults_end_at_the_optimum_and_not_in_a_cycle_around_it(name, rate):
    """Principal components, whose dL/dW is far from zero at the optimum, by rates over more than a decade."""
    n, p = 30, 4
    q = haar((n, n), torch.float64, 6)
    a = (q * torch.cat([torch.linspace(1, 0.7, p), torch.linspace(0.4, 0, n - p)]).double()) @ q.mT
    w = nn.Parameter(haar((n, p), torch.float64, 7))
    optimizer = getattr(sk.optim, name)([{"params": [w], "manifold": "stiefel:canonical"}], lr=rate)
    for _ in range(1500):
        w.grad = -2 * a @ w.detach()
        optimizer.step()
    rest = w.detach() - q[:, :p] @ (q[:, :p].mT @ w.detach())
    assert torch.linalg.matrix_norm(rest) <= 1e-8


@pytest.mark.parametrize("metric", METRICS)
def test_stiefel_adam_comes_as_far_on_raw_data_in_single_precision_as_in_double(metric):
    """Variances from 4e5 to 1e-6, and a rotation within the columns that is rounding, which no step goes along."""
    single, steps = torch.from_numpy(np.cov(load_breast_cancer(return_X_y=True)[0].T)).float(), 800
    best = torch.linalg.eigvalsh(single.double())[-5:].sum().item()

    def gap(dtype):
        c, w = single.to(dtype), nn.Parameter(haar((30, 5), torch.float32, 0).to(dtype))
        optimizer = sk.optim.StiefelAdam([{"params": [w], "manifold": f"stiefel:{metric}"}], lr=0.02)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            w.grad = -2 * c @ w.detach()
            optimizer.step()
            schedule.step()
        end = w.detach().double()
        return best - (end * (single.double() @ end)).sum().item()

    double = gap(torch.float64)
    assert double < 1e-3 * best
    assert gap(torch.float32) <= 2 * double + 4 * torch.finfo(torch.float32).eps * best
