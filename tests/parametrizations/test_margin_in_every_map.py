"""Near-orthogonal weights with any pair of maps take and give back complex weights."""

import itertools

import pytest
import torch

from stiefelkit import init
from stiefelkit.metrics import rounding_limit, working_dtype
from stiefelkit.parametrizations import Margin
from stiefelkit.testing.seeds import generator

MAPS = ("cayley", "householder", "givens", "stiefel")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (2, 4, 4)])
@pytest.mark.parametrize(("u", "v"), [*itertools.product(MAPS, [*MAPS, "matrix_exp"]), ("matrix_exp", "cayley")])
def test_a_weight_comes_back(u, v, shape, dtype):
    map = Margin(shape, dtype=dtype, margin=0.1, u=u, v=v)
    working, p = working_dtype(dtype), shape[-1]
    left = init.haar(shape, working, generator(0))
    right = init.haar((*shape[:-2], p, p), working, generator(1))
    s = 1 + 0.18 * (torch.rand(*shape[:-2], p, dtype=torch.float64, generator=generator(2)) - 0.5)
    for w in (left * s.unsqueeze(-2) @ right.mH, left):
        w = w.to(dtype)
        with torch.no_grad():
            back = map(*map.right_inverse(w))
        bound = 100 if dtype == torch.complex128 else 16
        assert torch.linalg.matrix_norm((back - w).to(torch.complex128)).max() <= bound * rounding_limit(p, dtype)
