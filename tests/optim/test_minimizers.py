"""What optimizers of deterministic losses promise beyond the laws: orders, ends, and the geometry below."""

import itertools
import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_wine
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.functional import cayley_retraction, inner_product, riemannian_hessian
from stiefelkit.functional._stiefel.conjugate_gradients import truncated
from stiefelkit.functional._stiefel.retractions import cayley_curve
from stiefelkit.optim.deterministic.space import Space
from stiefelkit.testing.seeds import generator

METRICS = ("canonical", "euclidean")
SHAPES = ((6, 6), (7, 3), (5, 4), (4, 1))
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
each_metric = pytest.mark.parametrize("metric", METRICS)


def drawn(shape, dtype=torch.float64, number=0):
    return torch.randn(shape, dtype=dtype, generator=generator(number))


def frame(shape, dtype=torch.float64):
    return sk.init.haar(shape, dtype, generator(9))


def spread(n, dtype=torch.float64):
    """A Hermitian matrix with the eigenvalues 1, ..., n."""
    basis = frame((n, n), dtype)
    return (basis * torch.arange(1, n + 1)) @ basis.mH


@each_shape
@each_dtype
def test_a_cayley_curve_goes_through_the_points_of_the_retraction_and_carries_as_it_does(shape, dtype):
    w, u, z = frame(shape, dtype), drawn(shape, dtype, 1), drawn((2, *shape), dtype, 2)
    z = torch.stack([sk.functional.tangent_part(w, x) for x in z])
    point = cayley_curve(w, u).at(0.7)
    moved, *carried = cayley_retraction(w, 0.7 * u, *z)
    torch.testing.assert_close(point.frame, moved)
    torch.testing.assert_close(point.transport(z), torch.stack(carried))


@each_shape
@each_dtype
def test_the_slope_of_a_cayley_curve_is_its_derivative(shape, dtype):
    w, u, g = frame(shape, dtype), drawn(shape, dtype, 1), drawn(shape, dtype, 2)
    curve = cayley_curve(w, u)
    t = torch.tensor(0.7, dtype=torch.float64)
    _, slope = torch.autograd.functional.jvp(
        lambda t: (g.conj() * cayley_retraction(w, t * u)[0]).sum().real, t, torch.ones_like(t)
    )
    torch.testing.assert_close(curve.at(0.7).slope(g), slope)


@each_metric
@each_shape
@each_dtype
def test_flat_vectors_have_the_inner_product_and_the_hessian_of_the_metric(shape, dtype, metric):
    w, g, h = frame(shape, dtype), drawn(shape, dtype, 1), drawn(shape, dtype, 2)
    space = Space([w], [f"stiefel:{metric}"])
    x, y = (space.gradient([w], [drawn(shape, dtype, number)]) for number in (3, 4))
    ((u,), (v,)) = space.directions([w], x), space.directions([w], y)
    torch.testing.assert_close(torch.dot(x, y), inner_product(w, u, v, metric))
    (along,) = space.directions([w], space.hessian([w], [g])([u], [h]))
    torch.testing.assert_close(along, riemannian_hessian(w, g, h, u, metric))
    moved = space.path([w], x)(0.7)
    torch.testing.assert_close(torch.dot(moved.transport(x), moved.transport(y)), torch.dot(x, y))


def norms(optimizer, loss, most=40):
    """Lengths of the gradient after each iteration, until it is done."""
    found = []
    for _ in range(most):
        optimizer.step(loss)
        found.append(optimizer.progress.gradient_norm)
        if optimizer.progress.is_done:
            break
    return found


@each_metric
@each_dtype
def test_the_trust_region_converges_quadratically(metric, dtype):
    a, weights = spread(8, dtype), torch.arange(1, 4)
    w = nn.Parameter(frame((8, 3), dtype))
    groups = sk.optim.frames(w, manifold=f"stiefel:{metric}")
    optimizer = sk.optim.TrustRegion(groups, max_iter=1, tolerance_grad=0.0)
    found = norms(optimizer, lambda: (w.conj() * (a @ w) * weights).sum().real)
    last = [norm for norm in found if norm < 0.3]
    assert any(after < before**1.8 for before, after in itertools.pairwise(last)), found
    assert found[-1] < 1e-10


@each_metric
def test_the_trust_region_converges_as_fast_where_minima_are_no_points(metric):
    c = spread(30)
    result = sk.optim.minimize(lambda w: (w * (c @ w)).sum(), frame((30, 4)), manifold=f"stiefel:{metric}")
    assert result.is_converged
    assert result.value == pytest.approx(10, rel=1e-12)
    assert result.iterations < 20
    assert result.products < 300


def test_differences_of_gradients_lead_the_trust_region_as_far():
    a, weights, w = spread(8), torch.arange(1, 4), nn.Parameter(frame((8, 3)))

    def closure():
        w.grad = None
        loss = (w * (a @ w) * weights).sum()
        loss.backward()
        return loss.detach()

    optimizer = sk.optim.TrustRegion(sk.optim.frames(w), max_iter=60)
    optimizer.step(closure)
    assert optimizer.progress.gradient_norm < 1e-10
    assert optimizer.progress.evaluations > optimizer.progress.products > 0


@pytest.mark.parametrize("name", ["conjugate_gradient", "lbfgs"])
def test_on_a_quadratic_loss_with_exact_line_searches_the_dimension_is_enough(name):
    a, b = spread(6), drawn(6)
    x = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    settings = {"history_size": 6} if name == "lbfgs" else {}
    cls = sk.optim.minimizers.get(name)
    optimizer = cls([x], max_iter=7, curvature=1e-9, tolerance_grad=1e-9, **settings)
    optimizer.step(lambda: 0.5 * x @ a @ x - b @ x)
    assert optimizer.progress.is_done
    torch.testing.assert_close(x.detach(), torch.linalg.solve(a, b))


def test_truncated_conjugate_gradients_solve_what_is_definite_and_leave_what_is_not():
    h, g = spread(7), drawn(7)
    model = truncated(g, lambda u: h @ u, 100.0, 1e-12, 0.0, 50)
    torch.testing.assert_close(model.u, -torch.linalg.solve(h, g))
    assert not model.is_at_boundary
    assert model.gain == pytest.approx(0.5 * g @ torch.linalg.solve(h, g))
    model = truncated(g, lambda u: h @ u - 4 * u, 2.5, 0.1, 1.0, 50)
    assert model.is_at_boundary
    assert model.u.norm().item() == pytest.approx(2.5)


@pytest.mark.parametrize("load", [load_breast_cancer, load_wine], ids=["cancer", "wine"])
@pytest.mark.parametrize("name", sk.optim.minimizers.names())
def test_principal_components_of_raw_data_in_single_precision_end_at_the_best_value(name, load):
    """Variances from 4e5 to 1e-6: five components are found as far as the rounding of the loss goes."""
    c = torch.from_numpy(np.cov(load().data.T)).float()
    exact = c.double()
    best = torch.linalg.eigvalsh(exact)[-5:].sum().item()
    # The value of a gradient of 4 eps sqrt(p) ||G||, at the curvature 2 (lambda_5 - lambda_6).
    rounding = 4 * torch.finfo(c.dtype).eps * best
    for seed in range(6 if name == "trust_region" else 1):
        w0, losses = sk.init.haar((len(c), 5), torch.float32, generator(seed)), []
        for most in (20, 1000):
            found = sk.optim.minimize(lambda w: -(w * (c @ w)).sum(), w0, name, max_iter=most)
            w = found.point.double()
            losses.append(best - (w * (exact @ w)).sum().item())
            assert found.is_converged == (found.stopped in ("gradient", "rounding"))
            assert not found.is_converged or losses[-1] <= rounding
        assert found.stopped == "rounding"
        assert losses[1] <= min(rounding, losses[0] + rounding)


@pytest.mark.parametrize("name", sk.optim.minimizers.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_gradient_that_vanishes_at_the_minimum_is_measured_against_the_rounding_there(name, dtype):
    """An exact fit: dL/dW itself goes to zero, and what it rounds to does not tell its size."""
    x, truth = drawn((40, 6), number=1).to(dtype), sk.init.haar((6, 3), dtype, generator(2))
    y = x @ truth
    found = sk.optim.minimize(
        lambda w: (x @ w - y).square().sum(), sk.init.haar((6, 3), dtype, generator(3)), name, tolerance_grad=0.0
    )
    assert found.stopped in ("rounding", "gradient")  # the latter where it comes to exactly zero
    assert found.iterations < 200
    assert torch.dist(found.point, truth) < 20 * torch.finfo(dtype).eps


def test_a_frame_that_somebody_else_has_moved_starts_anew():
    a, w = spread(6), nn.Parameter(frame((6, 2)))
    optimizer = sk.optim.LBFGS(sk.optim.frames(w), max_iter=5)
    optimizer.step(lambda: (w * (a @ w)).sum())
    fresh = sk.optim.LBFGS(sk.optim.frames(w), max_iter=5)
    with torch.no_grad():
        w.copy_(sk.init.haar((6, 2), torch.float64, generator(3)))
    start = w.detach().clone()
    optimizer.step(lambda: (w * (a @ w)).sum())
    end = w.detach().clone()
    with torch.no_grad():
        w.copy_(start)
    fresh.step(lambda: (w * (a @ w)).sum())
    torch.testing.assert_close(w.detach(), end, rtol=0, atol=0)


def test_minimize_returns_where_it_ends_and_leaves_the_start_alone():
    a, start = spread(6, torch.complex128), frame((2, 6, 2), torch.complex128)
    kept = start.clone()
    result = sk.optim.minimize(lambda w: (w.conj() * (a @ w)).sum().real, start)
    assert torch.equal(start, kept)
    assert result.is_converged
    assert result.value == pytest.approx(6, abs=1e-10)
    assert result.point.shape == start.shape
    assert not result.point.requires_grad
    assert math.isfinite(result.gradient_norm)
    assert result.products > 0


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", ">f8"])
def test_minimize_takes_arrays(dtype):
    start = np.asfortranarray(frame((6, 2)).numpy()).astype(dtype)
    kept, a = start.copy(), spread(6)
    start.setflags(write=False)
    found = sk.optim.minimize(lambda w: (w.conj() * (a.to(w.dtype) @ w)).sum().real, start)
    assert np.array_equal(start, kept)
    assert found.is_converged
    assert found.value == pytest.approx(3, rel=1e-5)
    assert found.point.numpy().dtype == start.dtype.newbyteorder("=")


@pytest.mark.parametrize("name", sk.optim.minimizers.names())
def test_minimize_takes_several_points_each_on_its_manifold(name):
    x, truth, shift = drawn((40, 5)), frame((5, 3)), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    y = x @ truth + shift
    found = sk.optim.minimize(
        lambda w, b: (x @ w + b - y).square().sum(),
        (sk.init.identity((5, 3)), np.zeros(3)),
        name,
        manifold=("stiefel:euclidean", None),
    )
    w, b = found.point
    torch.testing.assert_close(w, truth)
    torch.testing.assert_close(b, shift)
    m = drawn((6, 5))
    both = sk.optim.minimize(lambda u, v: -torch.trace(u.mT @ m @ v), [frame((6, 2)), frame((5, 2))], name)
    assert both.value == pytest.approx(-torch.linalg.svdvals(m)[:2].sum().item())
    with pytest.raises(errors.OptionError, match="manifold"):
        sk.optim.minimize(lambda u, v: u.sum() + v.sum(), [frame((6, 2)), frame((5, 2))], manifold=[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (1, 1)], ids=str)
def test_an_end_in_the_wrong_component_of_the_orthogonal_group_is_named(shape, dtype):
    b = drawn(shape).to(dtype)

    def loss(w):
        return (w - b).square().sum()

    best = (shape[0] + b.square().sum() - 2 * torch.linalg.svdvals(b).sum()).item()
    right = sk.init.haar(shape, dtype, generator(4))
    right[:, 0] *= torch.sign(torch.det(right) * torch.det(b))
    wrong = right.clone()
    wrong[:, 0] *= -1
    found = sk.optim.minimize(loss, right)
    assert found.reflected is None
    assert found.value == pytest.approx(best, rel=1e-5)
    with pytest.warns(UserWarning, match="the other determinant"):
        found = sk.optim.minimize(loss, wrong)
    assert found.value > best + 0.01
    assert sk.optim.minimize(loss, found.reflected).value == pytest.approx(best, rel=1e-5)


def test_both_components_are_searched_and_each_iteration_is_told(monkeypatch):
    mirror, seen, lines = torch.diag(torch.tensor([1.0, 1.0, -1.0])), [], []
    monkeypatch.setattr(logging.getLogger("stiefelkit.optim.minimize"), "info", lambda *words: lines.append(words))
    found = sk.optim.minimize(
        lambda w: (w - mirror).square().sum(),
        sk.init.haar((3, 3), torch.float32, generator(3)) * torch.tensor([-1.0, 1.0, 1.0]),
        components="both",
        callback=lambda *told: seen.append(told),
    )
    assert found.component == ("reflected" if torch.det(seen[0][0]) > 0 else "start")
    assert (found.value, found.reflected) == (pytest.approx(0, abs=1e-5), None)
    assert len(lines) == len(seen) > 1
    assert all(w.dtype == torch.float32 and value >= 0 and length >= 0 for w, value, length in seen)
    refused: Any = {"NumPy": (lambda w: w.numpy().sum(), None), "callback": (torch.sum, 3)}
    for word, (loss, callback) in refused.items():
        with pytest.raises(errors.OptionError, match=word):
            sk.optim.minimize(loss, sk.init.haar((3, 2)), callback=callback)


@pytest.mark.parametrize("count", [1, 3])
def test_the_other_component_is_found_where_no_reflection_of_the_end_is_lower_itself(count):
    """Procrustes with noise and columns of unlike size: the lower frame is some steps away from the reflection."""
    for seed in range(12):
        a = drawn((20, 3), number=seed) * torch.tensor([3.0, 1.0, 0.3], dtype=torch.float64)
        truth, start = (sk.init.haar((count, 3, 3), torch.float64, generator(seed + k)) for k in (1, 2))
        b = a @ truth + 0.3 * drawn((count, 20, 3), number=seed + 3)

        def loss(w, a=a, b=b):
            return (a @ w - b).square().sum()

        start[..., 0] *= (torch.det(truth) * torch.det(start)).sign()[:, None]
        best = sk.optim.minimize(loss, start, reflections=0).value
        start[0, :, 0] *= -1
        with pytest.warns(UserWarning, match="the other determinant"):
            found = sk.optim.minimize(loss, start)
        lower = loss(found.reflected).item()
        assert lower < found.value
        assert lower <= best * (1 + 1e-9)


@pytest.mark.parametrize("size", [1e-8, 1e-30])
@pytest.mark.parametrize("name", sk.optim.minimizers.names())
def test_a_small_loss_is_minimised_as_far_as_a_large_one(name, size):
    a = spread(8)
    for seed in range(5):
        start = sk.init.haar((8, 3), torch.float64, generator(seed))
        found = sk.optim.minimize(lambda w: size * (w * (a @ w)).sum(), start, name)
        assert found.is_converged
        assert found.value == pytest.approx(size * 6, rel=1e-13)


def test_minimize_refuses_what_it_cannot_minimise():
    with pytest.raises(errors.UnknownNameError, match="trust_region"):
        sk.optim.minimize(torch.sum, frame((4, 2)), "trust_regoin")
    with pytest.raises(errors.OptionError, match="subclass"):
        sk.optim.minimize(torch.sum, frame((4, 2)), torch.optim.LBFGS)  # type: ignore[arg-type]
    with pytest.raises(errors.DtypeError, match="array"):
        sk.optim.minimize(torch.sum, np.eye(3, dtype=int))
    with pytest.raises(errors.NotAFrameError):
        sk.optim.minimize(torch.sum, 2 * frame((4, 2)))
    with pytest.raises(errors.OptimizerError, match="returns the loss"):
        sk.optim.minimize(lambda w: torch.ones(()), frame((4, 2)))


@pytest.mark.parametrize("name", sk.optim.minimizers.names())
def test_a_complex_loss_is_answered_with_a_remedy_that_works(name):
    a = drawn((4, 4), torch.complex128)
    with pytest.raises(errors.OptimizerError, match="real"):
        sk.optim.minimize(lambda w: (w.mH @ a @ w).trace(), frame((4, 2), torch.complex128), name)
    assert sk.optim.minimize(lambda w: (w.mH @ a @ w).trace().real, frame((4, 2), torch.complex128), name).is_converged


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64])
@pytest.mark.parametrize("name", sk.optim.minimizers.available())
def test_a_loss_of_any_size_is_minimised_or_refused_in_a_sentence_and_the_frame_stays_one(name, dtype):
    exponents = (-300, -200, 0, 160, 300) if dtype == torch.float64 else (-40, -22, 0, 19, 38)
    for exponent in exponents:
        w = nn.Parameter(sk.init.haar((4, 3), dtype, generator(0)))
        a = torch.randn(w.shape, dtype=sk.metrics.working_dtype(dtype), generator=generator(1))
        a, before = (a / a.abs().max() * 10.0**exponent).to(dtype), w.detach().clone()
        optimizer = sk.optim.minimizers.get(name)(sk.optim.frames(w), max_iter=100)
        try:
            optimizer.step(lambda w=w, a=a: (w * a.conj()).sum().real)
        except errors.StiefelkitError:
            assert torch.equal(w, before)
            assert exponent != 0
            continue
        assert sk.metrics.orthogonality_error(w) <= sk.metrics.frame_tolerance(3, dtype)
        assert optimizer.progress.is_done
