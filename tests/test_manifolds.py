import copy
import math
import pickle
import subprocess
import sys
from typing import Any

import geoopt
import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors, init
from stiefelkit.functional._stiefel_step import cayley_increment, riemannian_gradient
from stiefelkit.manifolds import RETRACTIONS, Stiefel
from stiefelkit.metrics import orthogonality_error, permitted_error, rounding_limit, working_dtype
from stiefelkit.testing import check_manifold, retraction_order, seeds

METRICS = ("canonical", "euclidean")
DTYPES = (torch.float64, torch.complex128)
SHAPES = [(6, 6), (7, 5), (9, 2), (2, 12, 3), (5, 1)]
ALL = [Stiefel(metric, retraction) for metric in METRICS for retraction in RETRACTIONS]


def parameter(*arguments, **options) -> Any:
    return geoopt.ManifoldParameter(*arguments, **options)


def drawn(shape, dtype, length=1.0, count=1):
    w = init.haar(shape, dtype)
    vectors = []
    for _ in range(count):
        s = torch.randn(shape, dtype=dtype)
        along = w.mH @ s
        u = s - w @ (along + along.mH) / 2
        vectors.append(length * u / u.norm())
    return w, *vectors


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


@pytest.mark.parametrize("manifold", ALL, ids=repr)
def test_laws(manifold):
    check_manifold(manifold)


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


@pytest.mark.parametrize("metric", METRICS)
def test_square_geodesics_are_w_exp(metric):
    w, u = drawn((5, 5), torch.complex128, 2.0)
    assert (Stiefel(metric).expmap(w, u) - w @ exponential_of(w.mH @ u)).norm() <= 1e-13


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 4), (6, 5), (12, 2)])
def test_euclidean_geodesics_accelerate_along_the_normal(shape, dtype):
    w, u = drawn(shape, dtype)
    manifold, h = Stiefel("euclidean"), 1e-3
    before, here, after = (manifold.expmap(w, t * u) for t in (0.7 - h, 0.7, 0.7 + h))
    acceleration = (after - 2 * here + before) / h**2
    assert manifold.proju(here, acceleration).norm() <= 1e-6 < acceleration.norm()


@pytest.mark.parametrize("metric", METRICS)
def test_geodesics_carry_isometrically(metric):
    w, u, v = drawn((9, 3), torch.complex128, 2.0, 2)
    manifold = Stiefel(metric)
    end, carried = manifold.expmap_transp(w, u, v)
    torch.testing.assert_close(manifold.inner(end, carried), manifold.inner(w, v))
    velocity = manifold.transp_follow_expmap(w, u, u)
    ahead = (manifold.expmap(w, 1.0001 * u) - manifold.expmap(w, 0.9999 * u)) / 2e-4
    assert (velocity - ahead).norm() <= 1e-6


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


@pytest.mark.parametrize("manifold", ALL, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 3), (4, 3), (7, 2)])
def test_gradients_of_steps_equal_finite_differences(manifold, shape, dtype):
    n, p = shape
    a, u, v = torch.randn(n, n, dtype=dtype), torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    leaves = [t.requires_grad_() for t in (a, u, v)]

    def step(method):
        def along(a, u, v):
            w = torch.linalg.matrix_exp(a - a.mH)[:, :p]
            return method(w, manifold.proju(w, u), manifold.proju(w, v))

        return along

    assert torch.autograd.gradcheck(step(manifold.retr_transp), leaves, fast_mode=True)
    if manifold.retraction == "cayley":
        assert torch.autograd.gradcheck(step(manifold.expmap_transp), leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(step(manifold.retr_transp), leaves, fast_mode=True)


@pytest.mark.parametrize("manifold", ALL, ids=repr)
def test_gradients_at_rest_are_finite(manifold):
    w = init.haar((9, 2))
    for method in (manifold.retr, manifold.expmap):
        u = torch.zeros(9, 2, dtype=torch.float64, requires_grad=True)
        g = torch.randn(9, 2, dtype=torch.float64)
        method(w, u).backward(g)
        torch.testing.assert_close(u.grad, manifold.proju(w, g))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 3), (6, 3), (2, 5, 2), (4, 1)])
def test_the_gradient_of_the_polar_factor_equals_finite_differences(shape, dtype):
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    assert torch.autograd.gradcheck(sk.functional.polar_factor, x)
    w = init.haar(shape, dtype).requires_grad_()
    assert torch.autograd.gradcheck(sk.functional.polar_factor, w)
    assert torch.autograd.gradcheck(lambda x: sk.functional.polar_factor(x, well_conditioned=True), w)


@pytest.mark.parametrize("manifold", ALL, ids=repr)
def test_steps_compose_with_vmap(manifold):
    w, u = drawn((3, 7, 2), torch.float64)
    for method in (manifold.retr, manifold.egrad2rgrad, manifold.inner):
        torch.testing.assert_close(torch.vmap(method)(w, u), method(w, u))


@pytest.mark.parametrize("manifold", ALL, ids=repr)
def test_one_frame_goes_many_ways(manifold):
    w, u = drawn((4, 7, 2), torch.float64)
    torch.testing.assert_close(manifold.retr(w[0], u), manifold.retr(w[:1].expand(4, 7, 2), u))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 6), (7, 5), (9, 2), (2, 12, 3), (5, 1)])
@pytest.mark.parametrize("length", [0.0, 1e-6, 0.5, 1.5])
def test_logmap_undoes_expmap(shape, dtype, length):
    manifold = Stiefel()
    w, u = drawn(shape, dtype, length)
    end = manifold.expmap(w, u)
    assert (manifold.logmap(w, end) - u).norm() <= 1e-12
    torch.testing.assert_close(manifold.dist(w, end), manifold.norm(w, u), atol=1e-12, rtol=1e-12)


def test_logmap_of_float32_frames_ends_there():
    w, u = drawn((9, 4), torch.float64)
    single, end = w.float(), Stiefel().expmap(w, u).float()
    back = Stiefel().expmap(single, Stiefel().logmap(single, end))
    assert back.dtype == torch.float32
    assert (back - end).norm() <= 1e-6


def test_logmap_has_no_derivative_rather_than_a_wrong_one():
    w, u = drawn((5, 2), torch.float64)
    end = Stiefel().expmap(w, u).requires_grad_()
    with pytest.raises(NotImplementedError, match="derivative"):
        Stiefel().dist(w, end).backward()


def test_logmap_refuses_what_it_cannot_do():
    w = init.haar((4, 4))
    mirrored = torch.cat([-w[:, :1], w[:, 1:]], dim=1)
    with pytest.raises(errors.ImageError, match="determinants differ"):
        Stiefel("euclidean").logmap(w, mirrored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("shape", [(16, 16), (24, 6)])
@pytest.mark.parametrize("retraction", RETRACTIONS)
def test_no_drift_in_hundreds_of_steps(retraction, shape, dtype):
    w = parameter(init.haar(shape, working_dtype(dtype)).to(dtype), Stiefel(retraction=retraction))
    optimizer = geoopt.optim.RiemannianAdam([w], lr=1e-2)
    gradients = torch.randn(16, *shape, dtype=dtype)
    worst = 0.0
    for step in range(600):
        w.grad = gradients[step % 16].clone()
        optimizer.step()
        worst = max(worst, orthogonality_error(w).item()) if step % 20 == 19 else worst
    assert worst <= permitted_error(shape[-1], dtype) <= 2 * rounding_limit(shape[-1], dtype) + 1e-7
    buffer = optimizer.state[w]["exp_avg"]
    assert w.manifold.check_vector_on_tangent(w, buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(16, 4), (8, 4), (5, 4), (5, 5), (6, 6), (3, 16, 4)], ids=str)
@pytest.mark.parametrize("retraction", RETRACTIONS)
def test_steps_of_any_length_end_in_a_frame(retraction, shape, dtype):
    manifold = Stiefel(retraction=retraction)
    w = init.haar(shape, working_dtype(dtype), seeds.generator(1)).to(dtype)
    u, v = (manifold.proju(w, torch.randn(shape, dtype=dtype, generator=seeds.generator(k))) for k in (2, 3))
    limit = 20 * rounding_limit(shape[-1], dtype) + torch.finfo(dtype).eps
    n, p = shape[-2:]
    for length in (1e-3, 1e3, *((1e8, 1e16, 1e30) if n >= 2 * p or retraction == "qr" else ())):
        moved, carried = manifold.retr_transp(w, length * u, v)
        assert orthogonality_error(moved).max() <= limit, length
        if manifold.retraction == "cayley":
            sizes = torch.linalg.matrix_norm(carried), torch.linalg.matrix_norm(v)
            assert torch.allclose(*sizes, rtol=100 * torch.finfo(dtype).eps), length


def test_a_step_too_long_for_its_arithmetic_is_refused_in_a_sentence():
    w, u = torch.eye(5, 4), torch.zeros(5, 4)
    u[4] = 1e30
    with pytest.raises(errors.RankError, match="shorter than 1e7"):
        Stiefel().retr(w, u)


def test_laws_hold_for_draws_that_are_nearly_normal_to_the_manifold(monkeypatch):
    drawn, w = torch.randn, torch.polar(*torch.tensor([[1.0], [0.3]], dtype=torch.float64)).view(1, 1)

    def nearly_normal(*shape, **options):
        z = drawn(*shape, **options)
        return torch.complex(z.real, 1e-6 * z.imag) * w if z.is_complex() else z

    monkeypatch.setattr(torch, "randn", nearly_normal)
    monkeypatch.setattr(init, "haar", lambda *_: w)
    check_manifold(Stiefel(), ["gradient", "transport"], [(1, 1)], [torch.complex128])


def test_steps_from_a_frame_that_is_off_by_rounding_do_not_keep_that():
    w = init.haar((32, 8)).float() * (1 + 1e-5)
    assert orthogonality_error(w) > 1e-5
    moved = Stiefel().retr(w, torch.zeros_like(w))
    assert orthogonality_error(moved) <= permitted_error(8, torch.float32)


OPTIMIZERS = {
    "sgd": (geoopt.optim.RiemannianSGD, dict(lr=0.2)),
    "momentum": (geoopt.optim.RiemannianSGD, dict(lr=0.1, momentum=0.8, stabilize=10)),
    "nesterov": (geoopt.optim.RiemannianSGD, dict(lr=0.1, momentum=0.8, nesterov=True)),
    "adam": (geoopt.optim.RiemannianAdam, dict(lr=0.3, betas=(0.8, 0.99), stabilize=25)),
    "armijo": (geoopt.optim.RiemannianLineSearch, dict()),
    "wolfe": (geoopt.optim.RiemannianLineSearch, dict(line_search_method="wolfe", cg_method="fr")),
}


def train(optimizer, loss, w, steps):
    cls, options = OPTIMIZERS[optimizer]
    stepper = cls([w], **options)

    def closure():
        stepper.zero_grad()
        value = loss(w)
        value.backward()
        return value.detach()

    for k in range(steps):
        if optimizer == "adam":
            stepper.param_groups[0]["lr"] = options["lr"] * 0.5 * (1 + math.cos(math.pi * k / steps))
        stepper.step(closure)
        with torch.no_grad():
            if w.manifold.norm(w, w.manifold.egrad2rgrad(w, w.grad)) < 1e-5:
                break
    return loss(w).item()


@pytest.mark.filterwarnings("ignore::geoopt.optim.rlinesearch.LineSearchWarning")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 5), (8, 3)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_solve_procrustes(optimizer, shape, dtype, metric):
    target = init.haar(shape, dtype) * torch.linspace(1, 2, shape[-1])
    optimum = (target - sk.functional.polar_factor(target)).norm() ** 2 / 2
    # Square real frames have two components, and no step leaves one.
    best, away = sk.functional.polar_factor(target), torch.randn(shape, dtype=dtype)
    w = parameter(Stiefel(metric).retr(best, away), Stiefel(metric))
    found = train(optimizer, lambda w: (target - w).abs().square().sum() / 2, w, 150)
    assert found - optimum <= 1e-6
    assert orthogonality_error(w) <= permitted_error(shape[-1], dtype)


@pytest.mark.filterwarnings("ignore::geoopt.optim.rlinesearch.LineSearchWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_find_the_leading_eigenspace(optimizer, dtype):
    q = init.haar((8, 8), dtype)
    values = torch.tensor([3.0, 2.5, 2.2, 0.5, 0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    h = (q * values) @ q.mH
    w = parameter(init.haar((8, 3), dtype), Stiefel())
    found = train(optimizer, lambda w: -(w.mH @ h @ w).diagonal().real.sum() / 2, w, 300)
    assert found + values[:3].sum() / 2 <= 1e-6


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
    tensor = Stiefel().random(4, 2)
    one = parameter(tensor, manifold=Stiefel())
    for twin in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert twin.manifold == Stiefel()
        assert torch.equal(twin, one)


def test_what_is_no_frame_is_refused_with_figures():
    manifold: Any = Stiefel()
    ok, reason = manifold.check_point_on_manifold(2 * torch.eye(4, 2), explain=True)
    assert (ok, reason) == (False, "||W^H W - I||_F = 4.24, permitted 2.41e-05")
    batch = torch.stack([torch.eye(3), 1.1 * torch.eye(3)])
    assert "0.364" in manifold.check_point_on_manifold(batch, explain=True)[1]
    ok, reason = manifold.check_vector_on_tangent(torch.eye(4, 2), torch.eye(4, 2), explain=True)
    assert not ok
    assert "||W^H U + U^H W||_F = 2.83" in reason
    with pytest.raises(errors.NotAFrameError, match="projx"):
        manifold.assert_check_point_on_manifold(2 * torch.eye(4, 2))
    with pytest.raises(errors.ShapeError, match=r"n >= p >= 1, got \(2, 4\); take the transpose"):
        parameter(torch.eye(2, 4), manifold)
    with pytest.raises(errors.DtypeError, match="bfloat16"):
        parameter(torch.eye(4, 2, dtype=torch.bfloat16), manifold)
    assert not manifold.check_point_on_manifold(torch.eye(4, 2, dtype=torch.int64))
    assert manifold.check_point(torch.eye(2, 4), explain=True)[0] is False


def test_unknown_options_are_refused():
    with pytest.raises(errors.OptionError, match='did you mean "canonical"'):
        Stiefel("cannonical")
    with pytest.raises(errors.OptionError, match='did you mean "polar"'):
        Stiefel(retraction="pollar")
    with pytest.raises(errors.OptionError, match="gen"):
        Stiefel().random(3, 2, gen=1)
    with pytest.raises(errors.ShapeError, match="transpose"):
        Stiefel().random(2, 3)
    with pytest.raises(errors.DtypeError, match="float16"):
        Stiefel().random(3, 2, dtype=torch.float16)


def test_nan_propagates():
    w, u = drawn((6, 3), torch.float64)
    u[0, 0] = torch.nan
    for manifold in ALL:
        if manifold.retraction != "polar":
            assert manifold.retr(w, u).isnan().any()


def test_importing_the_package_leaves_geoopt_alone():
    code = "import sys, stiefelkit; assert 'geoopt' not in sys.modules; stiefelkit.manifolds.Stiefel()"
    subprocess.run([sys.executable, "-c", code], check=True)
