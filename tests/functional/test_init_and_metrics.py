import math

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.metrics import bits_lost, orthogonality_error, permitted_error, rounding_limit
from stiefelkit.tensors import working_dtype
from stiefelkit.testing import seeds


def test_haar_moments_are_those_of_the_uniform_measure():
    # E W_11 = 0, E W_11^2 = 1/n, E trace^2 = 1 for O(n), E |trace|^2 = 1 for U(n); det takes both signs.
    generator = seeds.generator()
    w = sk.init.haar((20000, 4, 4), torch.float64, generator)
    assert abs(w[:, 0, 0].mean()) < 0.015
    assert abs((w[:, 0, 0] ** 2).mean() - 0.25) < 0.01
    assert abs((w.diagonal(dim1=1, dim2=2).sum(1) ** 2).mean() - 1) < 0.05
    assert abs(torch.linalg.det(w).mean()) < 0.03
    u = sk.init.haar((20000, 3, 3), torch.complex128, generator)
    assert abs((u.diagonal(dim1=1, dim2=2).sum(1).abs() ** 2).mean() - 1) < 0.05


def test_unit_circle_eigenvalues_have_uniform_angles():
    for dtype in (torch.float64, torch.complex128):
        w = sk.init.draw("unit_circle", (500, 4, 4), dtype, seeds.generator(1))
        angles = torch.linalg.eigvals(w).angle()
        assert abs((angles > 0).double().mean() - 0.5) < 0.05
        assert abs((angles.abs() > math.pi / 2).double().mean() - 0.5) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [16, 64, 256])
def test_the_limit_is_what_rounding_a_frame_costs(dtype, p):
    # One error scatters by about 1.3 / p: at p = 16 the mean of 64 is within 0.2 by more than ten of its deviations.
    errors = orthogonality_error(sk.init.haar((1024 // p, p, p)).to(dtype))
    assert errors.mean().item() == pytest.approx(rounding_limit(p, dtype), rel=0.2)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_frames_drawn_in_double_precision_are_exact(dtype, shape):
    drawn = {scheme: draw((20_000, *shape), dtype, seeds.generator()) for scheme, draw in sk.init.SCHEMES.items()}
    off = {scheme: orthogonality_error(w).max().item() for scheme, w in drawn.items()}
    assert max(off.values()) <= 0.7 * permitted_error(shape[-1], dtype), off


@pytest.mark.parametrize("scheme", ["haar", "identity", "henaff", "unit_circle"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64])
def test_a_frame_drawn_in_any_dtype_is_rounded_once(scheme, dtype):
    w = sk.init.draw(scheme, (3, 8, 5), dtype, seeds.generator())
    exact = sk.init.draw(scheme, (3, 8, 5), working_dtype(dtype), seeds.generator())
    assert w.dtype == dtype
    assert w.is_contiguous()  # as safetensors and FSDP2 ask of parameters
    torch.testing.assert_close(w, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_errors_are_measured_in_float64_per_matrix():
    w = torch.stack([torch.eye(3), 2 * torch.eye(3)]).bfloat16()
    error = orthogonality_error(w)
    assert error.dtype == torch.float64
    assert error.tolist() == pytest.approx([0, 3 * math.sqrt(3)])


def test_a_wide_matrix_is_refused_and_the_remedy_measures_its_rows():
    w = sk.init.haar((2, 5, 3)).mT
    with pytest.raises(errors.ShapeError, match="pass"):
        orthogonality_error(w)
    assert orthogonality_error(w.mT).max() < 1e-14


@pytest.mark.parametrize(
    ("scheme", "shape", "dtype", "error"),
    [("harr", (2, 2), torch.float64, errors.OptionError), ("haar", (2, 5), torch.float64, errors.ShapeError)],
)
def test_what_cannot_be_drawn_is_refused(scheme, shape, dtype, error):
    with pytest.raises(error):
        sk.init.draw(scheme, shape, dtype)


def test_bits_lost_count_from_the_limit():
    assert (bits_lost(1.0, 2.0), bits_lost(8.0, 2.0)) == (0, 2)
    w = 1.1 * sk.init.haar((9, 4), torch.complex64)
    expected = pytest.approx(bits_lost(orthogonality_error(w).item(), rounding_limit(4, w.dtype)))
    assert bits_lost(torch.stack([sk.init.haar((9, 4), w.dtype), w]).mH) == expected
    with pytest.raises(errors.OptionError, match="limit"):
        bits_lost(1e-7)
