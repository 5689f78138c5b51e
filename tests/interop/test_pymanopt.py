"""The same problem, to the same value, here and by pymanopt."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_wine

import stiefelkit as sk
from stiefelkit.testing.seeds import generator

pymanopt = pytest.importorskip("pymanopt", reason="needs the extra [interop]")


@pytest.mark.parametrize("load", [load_breast_cancer, load_wine], ids=["cancer", "wine"])
def test_principal_components_have_the_value_that_pymanopt_finds_or_a_better_one(load):
    c = torch.from_numpy(np.cov(load().data.T))
    start = sk.init.haar((len(c), 5), torch.float64, generator(0)).numpy()
    manifold = pymanopt.manifolds.Stiefel(len(c), 5)

    @pymanopt.function.pytorch(manifold)
    def cost(w):
        return -(w * (c @ w)).sum()

    problem = pymanopt.Problem(manifold, cost)
    there = pymanopt.optimizers.TrustRegions(verbosity=0, max_time=2).run(problem, initial_point=start.copy())
    here = sk.optim.minimize(lambda w: -(w * (c @ w)).sum(), start)
    best = -torch.linalg.eigvalsh(c)[-5:].sum().item()
    assert here.is_converged
    assert here.value == pytest.approx(best, rel=1e-13)
    assert here.value <= there.cost + 1e-12 * abs(best)
