"""The manifold as geoopt sees it, and what users of other toolboxes look for: logarithms, Hessians, random frames."""

import subprocess
import sys
from typing import Any

import geoopt
import pytest
import torch

from stiefelkit import errors, init
from stiefelkit.manifolds import Stiefel
from stiefelkit.metrics import working_dtype
from stiefelkit.testing import seeds


def parameter(*arguments, **options) -> Any:
    return geoopt.ManifoldParameter(*arguments, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_random_frames_are_haar_and_reproducible(dtype):
    manifold = Stiefel()
    one = manifold.random(3, 5, 2, dtype=dtype, generator=seeds.generator(1))
    two = manifold.random((3, 5, 2), dtype=dtype, generator=seeds.generator(1))
    assert isinstance(one, geoopt.ManifoldTensor)
    assert one.manifold is manifold
    assert one.dtype == dtype
    assert torch.equal(one, two)
    assert manifold.check_point_on_manifold(one)
    expected = init.haar((3, 5, 2), working_dtype(dtype), seeds.generator(1))
    assert torch.equal(one, expected.to(dtype))
    assert torch.equal(manifold.origin(5, 2, dtype=dtype), torch.eye(5, 2, dtype=dtype))


def test_manifolds_match_by_metric_and_retraction():
    assert Stiefel() == Stiefel("canonical", "cayley") != Stiefel("euclidean")
    assert Stiefel() != geoopt.CanonicalStiefel()
    assert len({Stiefel(), Stiefel(), Stiefel(retraction="qr")}) == 2
    assert repr(Stiefel()) == "Stiefel(canonical, cayley) manifold"


def test_what_is_no_frame_is_refused():
    manifold: Any = Stiefel()
    ok, reason = manifold.check_vector_on_tangent(torch.eye(4, 2), torch.eye(4, 2), explain=True)
    assert not ok
    assert "2.83" in reason
    with pytest.raises(errors.NotAFrameError):
        manifold.assert_check_point_on_manifold(2 * torch.eye(4, 2))
    with pytest.raises(errors.ShapeError):
        parameter(torch.eye(2, 4), manifold)
    with pytest.raises(errors.DtypeError):
        parameter(torch.eye(4, 2, dtype=torch.bfloat16), manifold)
    assert not manifold.check_point_on_manifold(torch.eye(4, 2, dtype=torch.int64))


def test_unknown_options_are_refused():
    for options in ({"metric": "stiefel:canonical"}, {"retraction": "pollar"}):
        with pytest.raises(errors.OptionError):
            Stiefel(**options)
    with pytest.raises(errors.ShapeError):
        Stiefel().random(2, 3)
    with pytest.raises(errors.DtypeError):
        Stiefel().random(3, 2, dtype=torch.float16)


@pytest.mark.slow
def test_importing_the_package_leaves_geoopt_alone():
    code = "import sys, stiefelkit; assert 'geoopt' not in sys.modules; stiefelkit.manifolds.Stiefel()"
    subprocess.run([sys.executable, "-c", code], check=True)


METRICS = ("canonical", "euclidean")
REAL, COMPLEX = torch.float64, torch.complex128
SHAPES = [(1, 1), (4, 4), (5, 4), (7, 3), (6, 1), (2, 5, 2)]


def gaussians(shape, dtype, count, number=0):
    g = seeds.generator(number)
    return [torch.randn(shape, dtype=dtype, generator=g) for _ in range(count)]


def euclidean(a, b):
    return (a.conj() * b).real.sum((-2, -1))


def test_the_hessian_of_single_frames_is_rounded_once_and_batches_broadcast():
    manifold, w = Stiefel(), init.haar((7, 3), REAL, seeds.generator(7))
    g, h, *others = gaussians((7, 3), REAL, 4, 8)
    u, v = (manifold.proju(w, z) for z in others)
    single = [z.float() for z in (w, g, h, u)]
    expected = manifold.ehess2rhess(*(z.double() for z in single))
    found = manifold.ehess2rhess(*single)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.float())
    both = torch.stack([u, v])
    together = manifold.ehess2rhess(w, g, torch.stack([h, 2 * h]), both)
    torch.testing.assert_close(together[1], manifold.ehess2rhess(w, g, 2 * h, v))


@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (5, 3), (6, 1)])
def test_the_dimension_is_the_rank_of_the_projection_on_tangent_vectors(shape, dtype):
    units = torch.eye(shape[0] * shape[1], dtype=dtype)
    units = (torch.cat([units, 1j * units]) if dtype.is_complex else units).view(-1, *shape)
    w = init.haar(shape, dtype, seeds.generator())
    trace = euclidean(units, Stiefel().proju(w, units)).sum()
    assert abs(trace - Stiefel().dim(*shape, dtype=dtype)) <= 1e-12
    assert Stiefel("euclidean").dim((3, *shape), dtype=dtype) == Stiefel().dim(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_typical_distance_is_the_mean_chord_but_for_the_square_root_of_two(dtype):
    count, n, p = 2000, 5, 3
    w, y = (Stiefel().random(count, n, p, dtype=dtype, generator=seeds.generator(k)) for k in (1, 2))
    squares = torch.linalg.matrix_norm(w - y).square() / 2
    # ||X - Y||^2 / 2 = p - Re tr(X^H Y), whose variance is p / n, half that where complex: six standard errors.
    assert abs(squares.mean() - Stiefel().typical_dist(n, p, dtype=dtype) ** 2) <= 6 * (p / n / count) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("det", [1, -1])
def test_random_frames_come_from_the_component_that_is_asked_for(det, n, dtype):
    w = Stiefel().random(50, n, n, dtype=dtype, generator=seeds.generator(3), det=det)
    assert isinstance(w, geoopt.ManifoldTensor)
    assert (torch.linalg.det(w) * det > 0.9).all()
    free = Stiefel().random(50, n, n, dtype=dtype, generator=seeds.generator(3))
    fits = torch.linalg.det(free) * det > 0
    assert torch.equal(w[fits], free[fits])
