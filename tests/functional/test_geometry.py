"""Steps and geodesics of the Stiefel manifold are those of their n x n formulas, as functions and as a manifold."""

import dataclasses

import pytest
import torch
from drawn_frames import ALL, DTYPES, METRICS, SHAPES, drawn
from manifold_laws import retraction_order

from stiefelkit import functional, init
from stiefelkit.functional import RETRACTIONS, cayley_increment, riemannian_gradient
from stiefelkit.manifolds import Stiefel
from stiefelkit.testing import seeds


def generator_of(w, u, alpha=1):
    """The n x n skew matrix A with A W = U for alpha = 1."""
    om = w.mH @ u
    v = u - w @ om
    return alpha * w @ om @ w.mH + v @ w.mH - w @ v.mH


def exponential_of(a):
    """By eigenvectors: torch.matrix_exp is up to 1.4e-10 off at norms of 0.01 to 0.05."""
    values, q = torch.linalg.eigh(1j * a)
    found = (q * torch.exp(-1j * values).unsqueeze(-2)) @ q.mH
    return found if a.is_complex() else found.real


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1e-8, 1.0, 100.0])
def test_cayley_equals_the_n_by_n_solve(shape, dtype, length):
    w, u, v = drawn(shape, dtype, length, 2)
    a, eye = generator_of(w, u), torch.eye(shape[-2], dtype=dtype)
    q = torch.linalg.solve(eye - a / 2, eye + a / 2)
    moved, carried = Stiefel().retr_transp(w, u, v)
    assert (moved - q @ w).norm() <= 1e-13 * max(1, length)
    assert (carried - q @ v).norm() <= 1e-13 * max(1, length) * v.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 6), (9, 2), (2, 12, 3)])
@pytest.mark.parametrize("metric", METRICS)
def test_a_step_of_the_optimizers_is_the_same_step(metric, shape, dtype):
    w, g = init.haar(shape, dtype), torch.randn(shape, dtype=dtype)
    manifold = Stiefel(metric)
    moved = manifold.retr(w, -0.1 * manifold.egrad2rgrad(w, g))
    increment = cayley_increment(w, riemannian_gradient(w, g, metric), 0.1)
    assert (moved - w - increment).norm() <= 1e-13


def test_a_small_cayley_step_keeps_the_digits_of_the_increment():
    w, u = drawn((50, 4), torch.float64, 1e-9)
    assert (Stiefel().retr(w, u) - w - u).norm() <= 1e-15


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (40, 3)])
@pytest.mark.parametrize(("metric", "alpha"), [("canonical", 1), ("euclidean", 2)])
def test_geodesics_equal_their_n_by_n_exponentials(metric, alpha, shape, dtype):
    for length in (1e-3, 1.0, 30.0):
        w, u, v = drawn(shape, dtype, length, 2)
        left = exponential_of(generator_of(w, u, alpha))
        along = w.mH @ u
        right = exponential_of((1 - alpha) * (along - along.mH) / 2)
        moved, carried = Stiefel(metric).expmap_transp(w, u, v)
        assert (moved - left @ w @ right).norm() <= 1e-12
        assert (carried - left @ v @ right).norm() <= 1e-11 * v.norm()
        assert (Stiefel(metric).expmap(w, u) - moved).norm() <= 1e-12


@pytest.mark.parametrize(
    ("metric", "retraction", "square", "tall"),
    [
        ("canonical", "cayley", 2, 2),
        ("euclidean", "cayley", 2, 1),
        ("canonical", "polar", 2, 1),
        ("euclidean", "polar", 2, 2),
        ("canonical", "qr", 1, 1),
        ("euclidean", "qr", 1, 1),
    ],
)
def test_retractions_have_the_order_they_state(metric, retraction, square, tall):
    manifold = Stiefel(metric, retraction)
    for shape, order in (((6, 6), square), ((9, 4), tall)):
        for dtype in DTYPES:
            assert abs(retraction_order(manifold, *drawn(shape, dtype)) - order) < 0.1


@pytest.mark.parametrize("manifold", ALL, ids=repr)
def test_what_is_not_tangent_of_a_direction_does_not_count(manifold):
    w, u, v = drawn((7, 3), torch.complex128, 1.0, 2)
    normal = w @ (w.mH @ w + torch.ones(3, 3))
    for method in (manifold.retr_transp, manifold.expmap_transp):
        for a, b in zip(method(w, u + normal, v), method(w, u, v), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 6), (9, 2), (2, 12, 3)])
@pytest.mark.parametrize("metric", METRICS)
def test_the_manifold_moves_and_measures_as_the_functions_do(metric, shape, dtype):
    manifold, (w, u, v) = Stiefel(metric), drawn(shape, dtype, 1.0, 2)
    end, carried = functional.geodesic(w, u, v, metric=metric)
    hessian = functional.riemannian_hessian(w, v, u, u, metric)
    pairs = {
        "expmap_transp": (torch.stack(manifold.expmap_transp(w, u, v)), torch.stack([end, carried])),
        "inner": (manifold.inner(w, u, v), functional.inner_product(w, u, v, metric)),
        "ehess2rhess": (manifold.ehess2rhess(w, v, u, u), hessian),
        "proju": (manifold.proju(w, v), functional.tangent_part(w, v)),
    }
    if metric == "canonical" or shape == (6, 6):
        back, joined = functional.geodesic_logarithm(w, end, metric)
        assert joined.all()
        pairs["logmap"] = manifold.logmap(w, end), back
    for name, step in RETRACTIONS.items():
        pairs[name] = (torch.stack(Stiefel(retraction=name).retr_transp(w, u, v)), torch.stack(step(w, u, v)))
    for name, (mine, other) in pairs.items():
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=0, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [1e-24, 1e-8, 1e8, 1e18])
def test_a_cayley_step_depends_on_the_product_of_direction_and_step(dtype, size):
    """Though the square of the direction leave the range of float32."""
    g = seeds.generator(3)
    w, along = init.haar((6, 6), dtype, g), torch.randn(6, 6, dtype=dtype, generator=g)
    gradient = functional.riemannian_gradient(w, along)
    scaled = dataclasses.replace(gradient, rotation=gradient.rotation * size)
    step = functional.cayley_increment(w, gradient, 0.5)
    torch.testing.assert_close(functional.cayley_increment(w, scaled, 0.5 / size), step, atol=1e-6, rtol=0)
