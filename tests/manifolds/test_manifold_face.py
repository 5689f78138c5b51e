"""What users of other manifold toolboxes look for: Hessians, dimensions, random points, samplers."""

import geoopt
import pytest
import torch

from stiefelkit import errors, init
from stiefelkit.functional import polar_factor
from stiefelkit.manifolds import Stiefel
from stiefelkit.testing import seeds

METRICS = ("canonical", "euclidean")
REAL, COMPLEX = torch.float64, torch.complex128
SHAPES = [(1, 1), (4, 4), (5, 4), (7, 3), (6, 1), (2, 5, 2)]


def gaussians(shape, dtype, count, number=0):
    g = seeds.generator(number)
    return [torch.randn(shape, dtype=dtype, generator=g) for _ in range(count)]


def euclidean(a, b):
    return (a.conj() * b).real.sum((-2, -1))


def problem(shape, dtype, number=0):
    """A function of frames with third derivatives, its gradient, and its Hessian along a direction."""
    n = shape[-2]
    b, c = gaussians(shape, dtype, 2, number)
    s = gaussians((n, n), dtype, 1, number + 1)[0] / n
    s = s + s.mH

    def value(w):
        return euclidean(c, w) + euclidean(w, s @ w) / 2 + euclidean(b, w) ** 3 / 6

    def gradient(w):
        return c + s @ w + (euclidean(b, w) ** 2 / 2)[..., None, None] * b

    def hessian(w, u):
        return s @ u + (euclidean(b, w) * euclidean(b, u))[..., None, None] * b

    return value, gradient, hessian


def frame_and_tangents(shape, dtype, manifold, count=2):
    w = init.haar(shape, dtype, seeds.generator(7))
    tangents = [manifold.proju(w, z) for z in gaussians(shape, dtype, count, 8)]
    return w, *(u / torch.linalg.matrix_norm(u, keepdim=True).clamp(min=1e-9) for u in tangents)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_hessian_is_the_second_derivative_along_geodesics(shape, dtype, metric):
    manifold = Stiefel(metric)
    value, gradient, hessian = problem(shape, dtype)
    w, u, _ = frame_and_tangents(shape, dtype, manifold)
    h = 2.0**-8
    f = [value(manifold.expmap(w, k * h * u)) for k in (-2, -1, 0, 1, 2)]
    second = (16 * (f[1] + f[3]) - f[0] - f[4] - 30 * f[2]) / (12 * h * h)
    found = manifold.inner(w, u, manifold.ehess2rhess(w, gradient(w), hessian(w, u), u))
    # The k-th derivative of a geodesic of unit speed is at most 3^k, so the sixth of f is at most 729 (||C|| + 32
    # ||S|| + 3^5 ||B||^3), of which the stencil errs by h^4 / 90; beyond that it magnifies the rounding of f.
    size = max(torch.linalg.matrix_norm(z).max().item() for z in gaussians(shape, dtype, 2))
    bound = h**4 / 90 * 729 * (size + 128 + 243 * size**3) + 64 * 100 * 2.0**-52 * size**3 / (12 * h * h)
    assert (found - second).abs().max() <= bound


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_hessian_is_self_adjoint_and_tangent(shape, dtype, metric):
    manifold = Stiefel(metric)
    _, gradient, hessian = problem(shape, dtype)
    w, u, v = frame_and_tangents(shape, dtype, manifold)
    along_u, along_v = (manifold.ehess2rhess(w, gradient(w), hessian(w, z), z) for z in (u, v))
    scale = torch.linalg.matrix_norm(along_u).max() + 1
    assert (manifold.inner(w, along_u, v) - manifold.inner(w, u, along_v)).abs().max() <= 1e-13 * scale
    assert manifold.check_vector_on_tangent(w, along_u, atol=1e-13 * scale.item(), rtol=0)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
def test_newtons_method_with_the_hessian_converges_quadratically(metric, dtype):
    manifold = Stiefel(metric)
    n, p = 6, 2
    s = torch.diag(torch.arange(1, n + 1).to(dtype))
    d = torch.diag(torch.arange(p, 0, -1).to(dtype))
    w = polar_factor(torch.eye(n, p, dtype=dtype) + 0.05 * gaussians((n, p), dtype, 1)[0])
    units = torch.eye(n * p, dtype=dtype)
    units = torch.cat([units, 1j * units]) if dtype.is_complex else units
    sizes = []
    for _ in range(5):
        r = manifold.egrad2rgrad(w, s @ w @ d)
        sizes.append(manifold.norm(w, r).item())
        basis = manifold.proju(w, units.view(-1, n, p))
        images = manifold.ehess2rhess(w.expand_as(basis), (s @ w @ d).expand_as(basis), s @ basis @ d, basis)
        columns, target = (torch.view_as_real(z.to(COMPLEX)).flatten(-3) for z in (images, -r))
        x = torch.linalg.pinv(columns.mT, rtol=1e-9) @ target
        w = manifold.expmap(w, (x[:, None, None] * basis).sum(0))
    assert sizes[-1] <= 1e-12
    assert sizes[2] <= sizes[1] ** 1.5


def test_the_hessian_of_single_frames_is_rounded_once_and_batches_broadcast():
    manifold = Stiefel()
    _, gradient, hessian = problem((7, 3), REAL)
    w, u, v = frame_and_tangents((7, 3), REAL, manifold)
    single = [z.float() for z in (w, gradient(w), hessian(w, u), u)]
    expected = manifold.ehess2rhess(*(z.double() for z in single))
    found = manifold.ehess2rhess(*single)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.float())
    both = torch.stack([u, v])
    together = manifold.ehess2rhess(w, gradient(w), hessian(w.expand_as(both), both), both)
    torch.testing.assert_close(together[1], manifold.ehess2rhess(w, gradient(w), hessian(w, v), v))


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


def test_rotations_are_drawn_uniformly():
    count = 4000
    w = Stiefel().random(count, 3, 3, dtype=REAL, generator=seeds.generator(4), det=1)
    trace = w.diagonal(dim1=-2, dim2=-1).sum(-1)
    # Of uniform rotations the trace has the mean 0, the mean square 1, and the mean fourth power 3.
    assert abs(trace.mean()) <= 6 / count**0.5
    assert abs(trace.square().mean() - 1) <= 6 * (2 / count) ** 0.5


@pytest.mark.parametrize(
    ("size", "options"),
    [((3, 3), dict(det=0)), ((3, 2), dict(det=1)), ((3, 3), dict(det=1, dtype=COMPLEX))],
)
def test_a_component_that_there_is_not_is_refused(size, options):
    with pytest.raises(errors.OptionError, match="det"):
        Stiefel().random(*size, **options)


@pytest.mark.parametrize("dtype", [torch.float32, COMPLEX])
def test_random_naive_draws_what_random_draws(dtype):
    naive = Stiefel().random_naive(3, 5, 2, dtype=dtype, generator=seeds.generator(1))
    assert isinstance(naive, geoopt.ManifoldTensor)
    assert naive.manifold == Stiefel()
    assert torch.equal(naive, Stiefel().random((3, 5, 2), dtype=dtype, generator=seeds.generator(1)))
