"""The matrix sign by products: exact to the limit, soft where singular values are small, the same in batches."""

import pytest
import torch

from stiefelkit import init
from stiefelkit.functional import msign
from stiefelkit.functional._polar import quintics
from stiefelkit.metrics import orthogonality_error, permitted_error, working_dtype
from stiefelkit.testing import lowered_products
from stiefelkit.testing.seeds import generator

FIELDS = (torch.float64, torch.complex128)
DTYPES = (torch.float32, torch.complex64, *FIELDS)


def with_values(shape, dtype, values):
    n, p = shape
    u, v = init.haar((n, p), dtype, generator(1)), init.haar((p, p), dtype, generator(2))
    return u * torch.as_tensor(values, dtype=torch.float64) @ v.mH, u @ v.mH


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (6, 6), (40, 12), (33, 33)], ids=str)
@pytest.mark.parametrize("lowest", [0.5, 1e-3, 1e-5])
def test_full_rank_gives_the_nearest_frame_at_the_rounding_limit(shape, dtype, lowest):
    x, exact = with_values(shape, working_dtype(dtype), torch.logspace(0, torch.tensor(lowest).log10(), shape[-1]))
    signed = msign(x.to(dtype), lowest=lowest)
    assert orthogonality_error(signed) <= permitted_error(shape[-1], dtype)
    # Rounding of X, over the smallest sum of singular values.
    assert torch.dist(signed, exact) <= 20 * torch.finfo(dtype).eps * shape[-1] ** 0.5 / lowest


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1.0, 1e30])
def test_the_size_of_a_matrix_does_not_count(size):
    x, exact = with_values((12, 5), torch.float64, torch.linspace(1, 0.1, 5))
    assert torch.dist(msign((x * size).float()), exact) <= 1e-5


@pytest.mark.parametrize("dtype", FIELDS, ids=str)
@pytest.mark.parametrize("lowest", [1e-1, 1e-3])
def test_small_singular_values_come_out_between_0_and_1_in_order(dtype, lowest):
    values = torch.logspace(0, -9, 28, dtype=torch.float64)
    x, _ = with_values((40, 28), dtype, values)
    found = torch.linalg.svdvals(msign(x, lowest=lowest, precision="fast"))
    assert found.max() <= 1 + 1e-12
    assert (found >= values * (1 - 1e-6)).all()
    assert (found <= values * 20 / lowest + 1e-12).all()
    large = values >= lowest
    assert (found[: large.sum()] - 1).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_matrix_of_low_rank_gives_its_partial_isometry_and_zero_gives_zero(dtype):
    values = torch.tensor([1.0, 0.7, 0.3, 0.0, 0.0])
    x, _ = with_values((9, 5), working_dtype(dtype), values)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    limit = 20 / 1e-3 * torch.finfo(dtype).eps  # of the default `lowest`
    assert torch.dist(msign(x.to(dtype)), u[:, :3] @ vh[:3]) <= limit
    assert torch.equal(msign(torch.zeros(3, 2, dtype=dtype)), torch.zeros(3, 2, dtype=dtype))
    assert msign(torch.zeros(0, 3, 2, dtype=dtype)).shape == (0, 3, 2)
    assert msign(torch.full((3, 2), torch.nan, dtype=dtype)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_matrices_batches_vmap_and_compiled_code_are_the_same(dtype):
    x = torch.randn(2, 3, 6, 4, dtype=dtype, generator=generator(0))
    x[0, 1] = 0
    signed = msign(x)
    limit = 100 * torch.finfo(dtype).eps
    assert torch.dist(signed, torch.stack([torch.stack([msign(m) for m in row]) for row in x])) <= limit
    assert torch.dist(msign(x.mH), signed.mH) <= limit
    assert torch.dist(torch.func.vmap(msign)(x), signed) <= limit
    with lowered_products():
        assert torch.equal(msign(x), signed)
    assert not msign(x.clone().requires_grad_()).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_done_in_single(dtype):
    x = torch.randn(8, 4, generator=generator(3)).to(dtype)
    assert torch.equal(msign(x), msign(x.float()).to(dtype))


@pytest.mark.parametrize("lowest", [1e-12, 1e-8, 1e-4, 1e-2, 0.3, 0.5])
@pytest.mark.parametrize("is_double", [False, True])
def test_quintics_take_an_interval_to_1(lowest, is_double):
    x = torch.cat([torch.logspace(torch.tensor(lowest).log10(), 0, 500, dtype=torch.float64), torch.ones(1)])
    for a, b, c in quintics(lowest, is_double):
        x = x * (a + b * x**2 + c * x**4)
        assert x.min() > 0
    assert (x - 1).abs().max() <= (1e-13 if is_double else 1e-6)


def test_the_coefficients_are_those_published_but_for_a_margin():
    published = [(8.2872, -23.5961, 17.3006), (4.1071, -2.9479, 0.5448), (3.9487, -2.9089, 0.5518)]
    for found, steps in zip(quintics(1e-3, True)[:2], published[:2], strict=True):
        with_margin = torch.tensor(found) * torch.tensor([1.01, 1.01**3, 1.01**5])
        assert torch.allclose(with_margin, torch.tensor(steps), rtol=3e-2)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16], ids=str)
def test_the_largest_and_smallest_numbers_have_a_sign(dtype):
    for size in (torch.finfo(dtype).max, torch.finfo(dtype).tiny):
        torch.testing.assert_close(msign(size * torch.eye(3, dtype=dtype)), torch.eye(3, dtype=dtype))
