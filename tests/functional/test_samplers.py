"""The Monte Carlo samplers of geoopt run on frames and draw from the density that they are given."""

from typing import Any

import geoopt
import pytest
import torch

from stiefelkit import errors
from stiefelkit.manifolds import Stiefel
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing import seeds

SAMPLERS: dict[str, Any] = {
    "rhmc": lambda w: geoopt.samplers.RHMC([w], epsilon=0.05, n_steps=3),
    "rsgld": lambda w: geoopt.samplers.RSGLD([w], epsilon=1e-3),
    "sgrhmc": lambda w: geoopt.samplers.SGRHMC([w], epsilon=1e-3, n_steps=2, alpha=0.5),
}


def parameter(w, manifold) -> Any:
    return geoopt.ManifoldParameter(w, manifold=manifold)  # type: ignore[call-arg]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 4), (4, 4), (3, 5, 2)])
@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_stay_on_frames(sampler, metric, shape, dtype):
    manifold = Stiefel(metric)
    w = parameter(manifold.random(*shape, dtype=dtype, generator=seeds.generator()), manifold)
    target = torch.randn(shape, dtype=dtype, generator=seeds.generator(1))
    chain = SAMPLERS[sampler](w)
    chain.burnin = False
    for _ in range(5):
        chain.step(lambda: (w * target).sum())
    chain.stabilize()
    assert torch.isfinite(torch.tensor(chain.log_probs)).all()
    assert orthogonality_error(w).max() <= permitted_error(shape[-1], dtype)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_refuse_to_start_where_there_is_no_frame(sampler):
    w = parameter(torch.full((5, 4), 2.0), Stiefel())
    with pytest.raises(errors.NotAFrameError, match="projx"):
        SAMPLERS[sampler](w).step(lambda: w.sum())


def test_samplers_refuse_retractions_that_cannot_be_taken_back():
    manifold = Stiefel(retraction="qr")
    w = parameter(manifold.random(5, 4), manifold)
    with pytest.raises(ValueError, match="reversible"):
        SAMPLERS["rhmc"](w)


def test_without_a_density_hamiltonian_steps_are_all_accepted():
    # The kinetic energy of a vector that is carried isometrically does not change.
    w = parameter(Stiefel("euclidean").random(5, 3, dtype=torch.float64), Stiefel("euclidean"))
    chain = SAMPLERS["rhmc"](w)
    chain.burnin = False
    for _ in range(20):
        chain.step(lambda: 0 * w.sum())
    assert min(chain.acceptance_probs) >= 1 - 1e-12
    assert chain.n_rejected == 0


def test_langevin_steps_draw_from_the_density():
    # Chains side by side of the density exp(k tr(M^T W)) on 4 x 2 frames, M the first columns of the identity; its
    # mean is that of uniform frames, weighted. Half the Laplacian of W is -((n - p) / 2 + (p - 1) / 4) W, so chains
    # forget their start as e^{-5t/4}, t the sum of the steps; a step of e errs by the order of e^2, a mean by e.
    k, epsilon, steps, count = 1.0, 0.02, 300, 1500
    manifold = Stiefel("euclidean")
    uniform = manifold.random(40000, 4, 2, dtype=torch.float64, generator=seeds.generator(2))
    trace = uniform.diagonal(dim1=-2, dim2=-1).sum(-1)
    weights = (k * trace).exp()
    expected = (weights * trace).sum() / weights.sum()
    seeds.reseed(3)
    w = parameter(manifold.random(count, 4, 2, dtype=torch.float64, generator=seeds.generator(4)), manifold)
    chain = geoopt.samplers.RSGLD([w], epsilon=epsilon)
    for _ in range(steps):
        chain.step(lambda: k * w.diagonal(dim1=-2, dim2=-1).sum())
    found = w.detach().diagonal(dim1=-2, dim2=-1).sum(-1)
    # The standard error of the chains, and of the weighted mean, whose weights vary by a factor e^{2k}.
    error = found.std() / count**0.5 + (weights * (trace - expected)).std() / weights.mean() / 200
    assert abs(found.mean() - expected) <= 5 * error + epsilon * expected
