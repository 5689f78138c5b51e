"""geoopt's optimizers find optima on the manifold, and do not leave it."""

import math
from typing import Any

import geoopt
import pytest
import torch
from drawn_frames import DTYPES, METRICS

import stiefelkit as sk
from stiefelkit import init
from stiefelkit.manifolds import RETRACTIONS, Stiefel
from stiefelkit.metrics import orthogonality_error, permitted_error, rounding_limit, working_dtype


def parameter(*arguments, **options) -> Any:
    return geoopt.ManifoldParameter(*arguments, **options)


OPTIMIZERS = {
    "sgd": (geoopt.optim.RiemannianSGD, dict(lr=0.2)),
    "momentum": (geoopt.optim.RiemannianSGD, dict(lr=0.1, momentum=0.8, stabilize=10)),
    "nesterov": (geoopt.optim.RiemannianSGD, dict(lr=0.1, momentum=0.8, nesterov=True)),
    "adam": (geoopt.optim.RiemannianAdam, dict(lr=0.3, betas=(0.8, 0.99), stabilize=25)),
    "armijo": (geoopt.optim.RiemannianLineSearch, dict()),
    "wolfe": (geoopt.optim.RiemannianLineSearch, dict(line_search_method="wolfe", cg_method="fr")),
}


def train(optimizer, loss, w, steps):
    cls, options = OPTIMIZERS[optimizer]
    stepper = cls([w], **options)

    def closure():
        stepper.zero_grad()
        value = loss(w)
        value.backward()
        return value.detach()

    for k in range(steps):
        if optimizer == "adam":
            stepper.param_groups[0]["lr"] = options["lr"] * 0.5 * (1 + math.cos(math.pi * k / steps))
        stepper.step(closure)
        with torch.no_grad():
            if w.manifold.norm(w, w.manifold.egrad2rgrad(w, w.grad)) < 1e-5:
                break
    return loss(w).item()


@pytest.mark.filterwarnings("ignore::geoopt.optim.rlinesearch.LineSearchWarning")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 5), (8, 3)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_solve_procrustes(optimizer, shape, dtype, metric):
    target = init.haar(shape, dtype) * torch.linspace(1, 2, shape[-1])
    optimum = (target - sk.functional.polar_factor(target)).norm() ** 2 / 2
    # Square real frames have two components, and no step leaves one.
    best, away = sk.functional.polar_factor(target), torch.randn(shape, dtype=dtype)
    w = parameter(Stiefel(metric).retr(best, away), Stiefel(metric))
    found = train(optimizer, lambda w: (target - w).abs().square().sum() / 2, w, 150)
    assert found - optimum <= 1e-6
    assert orthogonality_error(w) <= permitted_error(shape[-1], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("shape", [(16, 16), (24, 6)])
@pytest.mark.parametrize("retraction", RETRACTIONS)
def test_no_drift_in_hundreds_of_steps(retraction, shape, dtype):
    w = parameter(init.haar(shape, working_dtype(dtype)).to(dtype), Stiefel(retraction=retraction))
    optimizer = geoopt.optim.RiemannianAdam([w], lr=1e-2)
    gradients = torch.randn(16, *shape, dtype=dtype)
    worst = 0.0
    for step in range(600):
        w.grad = gradients[step % 16].clone()
        optimizer.step()
        worst = max(worst, orthogonality_error(w).item()) if step % 20 == 19 else worst
    assert worst <= permitted_error(shape[-1], dtype) <= 2 * rounding_limit(shape[-1], dtype) + 1e-7
    buffer = optimizer.state[w]["exp_avg"]
    assert w.manifold.check_vector_on_tangent(w, buffer)
