"""Every optimizer of frames makes the steps that its paper says, where double precision shows it."""

import math

import pytest
import torch
from optimizers_at_hand import Shapes, excess, frame, gradient, group, run
from torch import nn

import stiefelkit as sk
from stiefelkit.metrics import orthogonality_error, rounding_limit

METRICS = ["canonical", "euclidean"]
SHAPES = [(6, 6), (7, 3), (5, 4), (4, 1), (1, 1), (9, 5)]


def generator_of(w, m, metric):
    """The n x n skew A with A W = the Riemannian gradient that belongs to M."""
    if metric == "canonical":
        return m @ w.mH - w @ m.mH
    inner = m @ w.mH - 0.5 * w @ (w.mH @ m @ w.mH)
    return inner - inner.mH


def cayley(a, w):
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    return torch.linalg.solve(eye + a / 2, (eye - a / 2) @ w)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lr", [1e-3, 0.1, 3.0])
def test_the_multiplicative_update_is_the_n_by_n_cayley_transform(shape, dtype, metric, lr):
    w = frame(shape, dtype)
    expected = w.detach().clone()
    optimizer = sk.optim.MultiplicativeCayley(group(w, metric=metric), lr=lr)
    for seed in range(4):
        g = gradient(shape, dtype, seed)
        expected = cayley(lr * generator_of(expected, g, metric), expected)
        run(optimizer, w, [g])
    assert torch.dist(w, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (7, 3)], ids=str)
def test_the_right_side_turns_the_frame_within_its_columns(shape, dtype):
    w, g = frame(shape, dtype), gradient(shape, dtype)
    b = w.mH @ g - g.mH @ w
    expected = (w @ cayley(0.3 * b, torch.eye(shape[-1], dtype=dtype))).detach()
    left = nn.Parameter(w.detach().clone())
    run(sk.optim.MultiplicativeCayley(group(w), lr=0.3, side="right"), w, [g])
    assert torch.dist(w, expected) < 1e-12
    run(sk.optim.MultiplicativeCayley(group(left), lr=0.3), left, [g])
    assert (torch.dist(w, left) < 1e-12) == (shape[0] == shape[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 3)], ids=str)
def test_preconditioning_divides_real_and_imaginary_parts_by_their_own_mean_squares(shape, dtype):
    w, lr, squares = frame(shape, dtype), 0.01, 0.0
    expected = w.detach().clone()
    optimizer = sk.optim.MultiplicativeCayley(group(w), lr=lr, precondition="rmsprop", alpha=0.8, eps=1e-3)
    for seed in range(3):
        g = gradient(shape, dtype, seed)
        run(optimizer, w, [g])
        parts = torch.view_as_real(g) if dtype.is_complex else g
        squares = 0.8 * squares + 0.2 * parts**2
        scaled = parts / (squares**0.5 + 1e-3)
        m = torch.view_as_complex(scaled) if dtype.is_complex else scaled
        expected = cayley(lr * generator_of(expected, m, "canonical"), expected)
    assert torch.dist(w, expected) < 1e-12


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 3)], ids=str)
def test_momentum_is_projected_on_each_tangent_space(shape, dtype, metric):
    for make in (sk.optim.MultiplicativeCayley, sk.optim.CayleySGD):
        w, lr, m = frame(shape, dtype), 0.05, 0.0
        expected = w.detach().clone()
        optimizer = make(group(w, metric=metric), lr=lr, momentum=0.9)
        for seed in range(4):
            g = gradient(shape, dtype, seed)
            run(optimizer, w, [g])
            m = 0.9 * m + g
            inner = expected.mH @ m
            moved = cayley(lr * generator_of(expected, m, metric), expected)
            m = m - expected @ (inner + inner.mH) / 2
            expected = moved
        assert torch.dist(w, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 3)], ids=str)
@pytest.mark.parametrize("lr", [0.05, 2.0])
def test_cayley_sgd_is_algorithm_1_of_its_paper(shape, dtype, lr):
    w, m = frame(shape, dtype), 0.0
    expected = w.detach().clone()
    optimizer = sk.optim.CayleySGD(group(w, metric="euclidean"), lr=lr, momentum=0.9, q=0.4)
    for seed in range(4):
        g = gradient(shape, dtype, seed)
        run(optimizer, w, [g])
        m = 0.9 * m - g
        a = generator_of(expected, m, "euclidean")
        m = a @ expected
        step = min(lr, 2 * 0.4 / torch.linalg.matrix_norm(a).item())
        expected = cayley(-step * a, expected)
    assert torch.dist(w, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (2, 4, 3)], ids=str)
@pytest.mark.parametrize("lr", [0.1, 4.0])
def test_cayley_adam_is_algorithm_2_of_its_paper(shape, dtype, lr):
    w = frame(shape, dtype)
    starts = w.detach().clone().reshape(-1, *shape[-2:])
    optimizer = sk.optim.CayleyAdam(group(w, metric="euclidean"), lr=lr, betas=(0.9, 0.95), eps=1e-5)
    seeds = range(4)
    run(optimizer, w, [gradient(shape, dtype, seed) for seed in seeds])
    for i, expected in enumerate(starts):
        m, v = 0.0, 0.0
        for k, seed in enumerate(seeds, 1):
            g = gradient(shape, dtype, seed).reshape(-1, *shape[-2:])[i]
            m = 0.9 * m + 0.1 * g
            v = 0.95 * v + 0.05 * torch.linalg.matrix_norm(g).item() ** 2
            r = (1 - 0.9**k) * math.sqrt(v / (1 - 0.95**k) + 1e-5)
            a = generator_of(expected, m, "euclidean") / r
            m = r * a @ expected
            step = min(lr, 1 / torch.linalg.matrix_norm(a).item())
            expected = cayley(step * a, expected)
        assert torch.dist(w.detach().reshape(-1, *shape[-2:])[i], expected) < 1e-12


@pytest.mark.parametrize("base", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 3)], ids=str)
def test_pogo_is_a_tangent_step_and_one_step_back(shape, dtype, base):
    w, m, v, lr = frame(shape, dtype), 0.0, 0.0, 0.01
    expected, eye = w.detach().clone(), torch.eye(shape[-1], dtype=dtype)
    optimizer = sk.optim.POGO(group(w, metric="euclidean"), lr=lr, base=base, moment="ambient", precision="fast")
    for k in range(1, 5):
        g = gradient(shape, dtype, k)
        run(optimizer, w, [g])
        m = 0.9 * m + (0.1 if base == "adam" else 1.0) * g
        v = 0.999 * v + 0.001 * torch.linalg.matrix_norm(g).item() ** 2
        scale = 1.0 if base == "sgd" else 1 / ((1 - 0.9**k) * (math.sqrt(v / (1 - 0.999**k)) + 1e-8))
        inner = expected.mH @ m
        x = expected - lr * scale * (m - expected @ (inner + inner.mH) / 2)
        expected = x - x @ (x.mH @ x - eye) / 2
    assert torch.dist(w, expected) < 1e-6


@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
def test_pogo_goes_at_half_the_rate_of_its_authors_where_the_metric_is_canonical(metric):
    w, g, lr = frame((5, 5), torch.float64), gradient((5, 5), torch.float64), 1e-5
    start = w.detach().clone()
    direction = (g @ start.mT @ start - start @ g.mT @ start) / 2
    run(sk.optim.POGO(group(w, metric=metric), lr=lr), w, [g])
    rate = 2 * lr if metric == "canonical" else lr
    assert torch.dist(w, start - rate * direction) < 10 * (rate * direction.norm()) ** 2


def test_small_steps_add_up_in_the_remainder():
    w, g = frame((16, 16)), gradient((16, 16))
    optimizer = sk.optim.MultiplicativeCayley(group(w), lr=1e-9)

    def master():
        return w.detach().double() + optimizer.state[w]["lo"].double()

    run(optimizer, w, [g])
    start = master()
    run(optimizer, w, [g] * 300)
    expected = cayley(3e-7 * generator_of(start, g.double(), "canonical"), start) - start
    assert torch.dist(master() - start, expected) < 1e-4 * torch.linalg.matrix_norm(expected)


def test_a_looser_tolerance_is_kept_costs_fewer_products_and_no_orthogonality():
    def stepped(tolerance):
        w, g = frame((40, 40), seed=2), gradient((40, 40))
        exact = frame((40, 40), torch.float64, seed=2).detach()
        expected = cayley(2e-3 * generator_of(exact, g.double(), "canonical"), exact) - exact
        optimizer = sk.optim.CayleySGD(group(w), lr=2e-3, q=math.inf, tolerance=tolerance)
        with Shapes() as seen:
            run(optimizer, w, [g])
        moved = w.detach().double() + optimizer.state[w]["lo"] - exact
        run(optimizer, w, [gradient((40, 40), seed=seed) for seed in range(40)])
        assert excess(w) < 2
        return (torch.dist(moved, expected) / torch.linalg.matrix_norm(expected)).item(), seen.products

    found = [stepped(tolerance) for tolerance in (1e-2, 1e-3, None)]
    for (error, _), tolerance in zip(found, (1e-2, 1e-3, 1e-5), strict=True):
        assert error <= tolerance
    assert found[0][1] < found[2][1]


@pytest.mark.parametrize("length", [1e-3, 0.1, 1.0])
def test_a_fast_pogo_is_off_by_the_fourth_power_of_its_step_at_most(length):
    w = frame((24, 24))
    optimizer = sk.optim.POGO(group(w), lr=length, precision="fast")
    for seed in range(30):
        run(optimizer, w, [gradient((24, 24), seed=seed % 5)])
        assert orthogonality_error(w) <= 0.2 + rounding_limit(24, w.dtype)
