"""geoopt's own tests on our manifold and our optimizers; and, where their sources are not, their laws in our words."""

from typing import Any

import geoopt
import pytest
import torch
from their_tests import IS_FULL, run_theirs

from stiefelkit.manifolds import Stiefel
from stiefelkit.testing import seeds

over_manifolds = pytest.mark.parametrize(
    "manifold", [Stiefel(metric, kind) for metric in ("canonical", "euclidean") for kind in ("cayley", "polar", "qr")]
)
pytestmark = pytest.mark.timeout(1500)
only_in_full = pytest.mark.skipif(not IS_FULL, reason="takes a while: make peers-suites")


def test_their_tests_of_manifolds():
    files = ["test_manifold_basic.py", "test_random.py", "test_origin.py", "test_product_manifold.py"]
    which = "(Frames or Stiefel or roduct)" + ("" if IS_FULL else " and not (2- or 3- or 4- or 5-)")
    run_theirs("geoopt", files, which)


@pytest.mark.parametrize("optimizers", [pytest.param("theirs", marks=only_in_full), "ours"])
def test_their_tests_of_gradient_descent(optimizers):
    run_theirs("geoopt", ["test_rsgd.py"], "stiefel or init_manifold", STIEFELKIT_SUITES_OPTIMIZERS=optimizers)


@only_in_full
@pytest.mark.parametrize("optimizers", ["theirs", "ours"])
def test_their_tests_of_adam(optimizers):
    run_theirs("geoopt", ["test_adam.py"], "stiefel", STIEFELKIT_SUITES_OPTIMIZERS=optimizers)


@only_in_full
def test_their_tests_of_line_searches():
    run_theirs("geoopt", ["test_rlinesearch.py"], "stiefel")


@only_in_full
def test_their_tests_of_samplers():
    run_theirs("geoopt", ["test_rhmc.py"], "sampling_manifold")


def point_and_tangents(manifold: Any, shape: tuple[int, ...], count: int = 2) -> list[Any]:
    x = manifold.random(*shape, dtype=torch.float64, generator=seeds.generator(1))
    drawn = torch.randn(count, *shape, dtype=torch.float64, generator=seeds.generator(2))
    return [x, *(manifold.proju(x, u) / 3 for u in drawn)]


@over_manifolds
def test_scaled_it_measures_by_the_scale_and_stays_what_it_is(manifold):
    scaled = geoopt.Scaled(manifold, 2.0)
    x, u, v = point_and_tangents(manifold, (5, 2))
    y = scaled.expmap(x, u)
    torch.testing.assert_close(y, manifold.expmap(x, u / 2))
    scaled.assert_check_point_on_manifold(y)
    if manifold.metric == "canonical":
        torch.testing.assert_close(scaled.dist(x, y), 2 * manifold.dist(x, y))
        torch.testing.assert_close(scaled.dist(x, y), scaled.norm(x, u), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(scaled.expmap(x, scaled.logmap(x, y)), y)
    z, carried = scaled.retr_transp(x, u, v)
    scaled.assert_check_vector_on_tangent(z, carried)
    assert scaled.reversible == manifold.reversible
    assert isinstance(geoopt.utils.canonical_manifold(scaled), Stiefel)
    assert geoopt.ismanifold(scaled, Stiefel)


@over_manifolds
def test_in_a_product_it_goes_as_by_itself(manifold):
    product: Any = geoopt.ProductManifold((geoopt.Sphere(), 4), (manifold, (5, 2)), (geoopt.Euclidean(), 3))
    frame, u, _ = point_and_tangents(manifold, (3, 5, 2))
    others = [geoopt.Sphere().random_uniform(3, 4, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)]
    x = product.pack_point(others[0], frame, others[1])
    step = product.pack_point(torch.zeros(3, 4, dtype=torch.float64), u, torch.zeros(3, 3, dtype=torch.float64))
    product.assert_check_point_on_manifold(x)
    for move, alone in ((product.retr, manifold.retr), (product.expmap, manifold.expmap)):
        moved = move(x, step)
        product.assert_check_point_on_manifold(moved)
        torch.testing.assert_close(product.unpack_tensor(moved)[1], alone(frame, u))
    if manifold.metric == "canonical":
        found, expected = product.dist(x, product.expmap(x, step)), manifold.norm(frame, u)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # the sphere has the root of a rounding
    assert product.inner(x, step).shape == (3,)
    assert product.inner(x, step, keepdim=True).shape == (3, 1)
    for made in (product.random(2, product.n_elements), product.origin(2, product.n_elements)):
        product.assert_check_point_on_manifold(made)


@over_manifolds
@pytest.mark.parametrize("make", ["random", "random_naive", "origin"])
def test_points_that_it_makes_are_its_own_and_sizes_without_any_are_refused(manifold, make):
    point = getattr(manifold, make)(3, 10, 10)
    assert point.manifold is manifold
    manifold.assert_check_point_on_manifold(point)
    for size in ((), (5, 10)):
        with pytest.raises(ValueError, match="needs `size` of shape"):
            getattr(manifold, make)(size)


@over_manifolds
def test_vectors_are_plain_tensors_and_points_are_of_one_manifold(manifold):
    point = manifold.random(5, 2)
    assert type(manifold.proju(point, torch.randn(5, 2))) is torch.Tensor
    with pytest.raises(ValueError, match="Manifolds do not match"):
        geoopt.ManifoldParameter(point, manifold=geoopt.Euclidean(ndim=2))  # type: ignore[call-arg]
