"""The logarithm near the identity, where angles are small and cosines are 1 to the last digits."""

import pytest
import torch

from stiefelkit.functional import exponential, skew_logarithm
from stiefelkit.metrics import rounding_limit, working_dtype
from stiefelkit.parametrizations import MatrixExp
from stiefelkit.testing.seeds import generator

SIZES = [10.0**-k for k in range(1, 10)]


def skew(n, dtype, size, number=0):
    a = torch.randn(n, n, dtype=dtype, generator=generator(number))
    a = a - a.mH
    return size * a / torch.linalg.matrix_norm(a, 2)


@pytest.mark.parametrize("size", [*SIZES, 3e-5, 1.7e-4, 2e-4, 0.5, 1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("n", [2, 3, 16, 64])
def test_the_logarithm_undoes_the_exponential_to_one_limit(n, dtype, size):
    for number in range(3):
        a = skew(n, dtype, size, number)
        w = exponential(a, skew=True, polish=True)
        found, exists = skew_logarithm(w)
        assert exists.all()
        back = exponential(found, skew=True, polish=True)
        # Far from the identity the law of the round trip: 100 limits for 64 rows.
        permitted = (4 if size <= 0.1 else 100) * rounding_limit(n, dtype)
        assert (back - w).norm() <= permitted
        assert (found - a).norm() <= permitted


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("n", [3, 16, 64])
def test_float32_frames_near_the_identity_come_back(n, dtype, size):
    w = exponential(skew(n, working_dtype(dtype), size), skew=True, polish=True).to(dtype)
    map = MatrixExp((n, n), dtype=dtype)
    error = torch.linalg.matrix_norm((map(*map.right_inverse(w)) - w).to(torch.complex128)).item()
    defect = torch.linalg.matrix_norm(w.to(torch.complex128).mH @ w.to(torch.complex128) - torch.eye(n)).item()
    assert error <= 2 * rounding_limit(n, dtype) + defect
