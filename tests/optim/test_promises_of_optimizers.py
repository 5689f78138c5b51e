"""What optimizers promise of orthogonality, where an error model is needed to keep it: long, aligned and many steps."""

import contextlib
import math

import pytest
import torch
from optimizers_at_hand import OPTIMIZERS, STATEFUL, every_optimizer, excess, frame, group
from torch import nn

import stiefelkit as sk
from benchmarks import draws
from stiefelkit import errors, init
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.optim.steps import PROMISED, measured, polish_threshold
from stiefelkit.testing import seeds


def optimizer_of(w, lr, **settings):
    return sk.optim.CayleySGD(group(w), lr=lr, momentum=0.0, q=math.inf, **settings)


def of_length(w, g, length):
    """G such that a step of rate 1 has a length."""
    s = w.detach().mH @ g
    r = g - w.detach() @ s.mH
    return g * (length / torch.linalg.vector_norm(r).item())


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_random_draws_of_optimizers_keep_what_is_promised(first, monkeypatch):
    drifting = draws.draw(433)  # a momentum in one column, of which a split step once left twice the defect
    monkeypatch.setattr(draws, "LARGEST", 200)
    for d in [drifting, *(draws.draw(seeds.seed(number)) for number in range(first, first + 30))]:
        promised = PROMISED["float64" if torch.finfo(d.dtype).eps < 1e-12 else str(d.settings["precision"])]
        found = draws.worst(d)
        assert found <= promised, f"{found:.3g} limits, {d}"


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (8, 8), (32, 32)])
def test_roundings_of_steady_steps_line_up_and_small_frames_keep_what_is_promised(shape, dtype, precision):
    *_, p = shape
    eps, limit = torch.finfo(dtype).eps, rounding_limit(p, dtype)
    promised = PROMISED[precision if dtype == torch.float32 else "float64"] * limit + eps
    for share in (0.2, 1.3):
        w = nn.Parameter(init.haar((1000 // shape[0] ** 2 + 20, *shape), dtype, seeds.generator()))
        optimizer = optimizer_of(w, share * eps, precision=precision)
        w.grad = torch.randn(w.shape, dtype=dtype, generator=seeds.generator(1))
        for _ in range(18):
            optimizer.step()
            assert orthogonality_error(w).max() <= promised


@pytest.mark.parametrize("optimizer", [sk.optim.SPEL, sk.optim.ManifoldMuon, sk.optim.StiefelSGD])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_roots_by_eigenvectors_are_right_to_rounding_of_double_precision(optimizer, dtype):
    w = nn.Parameter(init.haar((2000, 2, 2), dtype, seeds.generator()))
    moves = optimizer(group(w, metric="euclidean"), lr=1.65, precision="fast", momentum=0.0)
    for number in range(6):
        w.grad = torch.randn(w.shape, dtype=dtype, generator=seeds.generator(number))
        moves.step()
        assert orthogonality_error(w).max() <= PROMISED["float64"] * rounding_limit(2, dtype) + torch.finfo(dtype).eps


@pytest.mark.parametrize("share", [0.5, 1.0, 1.9])
def test_long_steps_along_one_direction_keep_a_fast_frame_that_its_own_state_dict_takes(share):
    layer = sk.orthogonal(nn.Linear(128, 784, bias=False), "weight", "stiefel")
    (w,) = sk.coordinates(layer, "weight").values()
    optimizer, generator = optimizer_of(w, 1.0, precision="fast"), seeds.generator(2)
    for _ in range(3):
        g = torch.outer(torch.randn(784, generator=generator), torch.randn(128, generator=generator))
        w.grad = of_length(w, g, share * math.sqrt(128))
        optimizer.step()
        assert excess(w) <= PROMISED["fast"]
    layer.load_state_dict(layer.state_dict())


@pytest.mark.parametrize(("n", "p", "rate"), [(20, 4, 1.4), (64, 12, 1.0), (128, 42, 0.5)])
@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_a_defect_that_is_taken_away_with_a_long_step_does_not_grow(precision, n, p, rate):
    """A gradient of rank 1 that stays: steps of 1 to 3 along one direction, again and again."""
    w, generator = frame((n, p)), seeds.generator(6)
    g = torch.randn(n, 1, generator=generator) @ torch.randn(1, p, generator=generator)
    optimizer = sk.optim.MultiplicativeCayley(group(w, metric="euclidean"), lr=rate, precision=precision)
    for _ in range(60):
        w.grad = g * (p**0.5 / g.norm())
        optimizer.step()
        assert orthogonality_error(w) <= PROMISED[precision] * rounding_limit(p, w.dtype) + 1.2e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize(("n", "p"), [(64, 64), (160, 160), (300, 20), (512, 64), (400, 200)])
def test_steps_just_below_those_that_are_polished_at_once_add_up_to_no_more(n, p, dtype):
    for share in (0.45, 0.9, 1.1, 1.9):
        w, generator = frame((n, p), dtype), seeds.generator(3)
        optimizer = optimizer_of(w, 1.0)
        fixed = torch.randn(n, 1, dtype=dtype, generator=generator) @ torch.randn(
            1, p, dtype=dtype, generator=generator
        )
        for k in range(9):
            g = fixed if k % 3 else torch.randn(n, p, dtype=dtype, generator=generator)
            w.grad = of_length(w, g, share * polish_threshold(n, p, "exact"))
            optimizer.step()
            assert excess(w) <= PROMISED["exact"], (share, k)


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_near_an_optimum_at_which_the_gradient_is_large_nothing_is_magnified(precision):
    """Max tr(C^T W): W ends at the polar factor of C, where what moves it is a small rest of G = -C."""
    w = frame((53, 9))
    c = torch.ones(53, 9) + 0.05 * torch.randn(53, 9, generator=seeds.generator(4))
    optimizer = sk.optim.CayleySGD(group(w, metric="euclidean"), lr=0.3, precision=precision)
    for _ in range(60):
        w.grad = -c
        optimizer.step()
        assert orthogonality_error(w) <= PROMISED[precision] * rounding_limit(9, w.dtype) + 1.2e-7


@pytest.mark.parametrize("length", [0.02, 0.05, 0.1, 0.2, 0.4])
def test_a_plane_among_many_that_turns_faster_costs_no_orthogonality(length):
    """Bounds hold for every spectrum: a few eigenvalues far beyond the rest, wherever they are."""
    n = 96
    generator = seeds.generator(5)
    bulk = torch.randn(n, n, dtype=torch.float64, generator=generator)
    q = init.haar((n, n), torch.float64, generator)
    for planes in (1, 2, 8):
        for ratio in (2.0, 4.0, 16.0):
            sizes = torch.zeros(n, dtype=torch.float64)
            sizes[: 2 * planes : 2] = 1
            block = torch.diag(sizes[:-1], 1)
            a = q @ (block - block.mT) @ q.mT
            a += (bulk - bulk.mT) / (2.9 * n**0.5 * ratio)
            w = frame((n, n))
            optimizer = optimizer_of(w, length)
            for _ in range(3):
                w.grad = (a.float() / 2) @ w.detach()
                optimizer.step()
                assert excess(w) <= PROMISED["exact"], (planes, ratio)


@pytest.mark.parametrize("course", ["random", "steady", "there and back"])
@pytest.mark.parametrize(("n", "p"), [(64, 64), (256, 256), (300, 20), (1024, 64)])
def test_what_the_error_model_says_bounds_what_rounding_has_done(n, p, course):
    w, generator = frame((n, p)), seeds.generator(9)
    optimizer = optimizer_of(w, 1.0)
    g = torch.randn(n, p, generator=generator)
    for k in range(12):
        g = torch.randn(n, p, generator=generator) if course == "random" else g
        w.grad = of_length(w, -g if course == "there and back" and k % 2 else g, 0.05 * math.sqrt(p))
        optimizer.step()
        state = optimizer.state[w]
        exact = w.detach().double() + state["lo"]
        assert orthogonality_error(exact) <= (state["wear"] + 0.05) * rounding_limit(p, w.dtype), k


def test_large_frames_are_seldom_measured_and_stay_frames(monkeypatch):
    counted = []
    monkeypatch.setattr("stiefelkit.optim.steps.measured", lambda *args: counted.append(1) or measured(*args))
    w, generator = frame((256, 256)), seeds.generator(8)
    optimizer = optimizer_of(w, 1.0)
    for _ in range(12):
        w.grad = of_length(w, torch.randn(256, 256, generator=generator), 0.8)
        optimizer.step()
        assert excess(w) <= PROMISED["exact"]
    assert len(counted) <= 8


@every_optimizer
@pytest.mark.parametrize(("size", "lr"), [(float("nan"), 0.1), (3e38, 0.1), (1e15, 1e30)])
def test_a_first_step_that_is_refused_leaves_no_half_of_a_state(name, size, lr):
    w = nn.Parameter(init.haar((6, 3), generator=seeds.generator(0)))
    optimizer, other = (OPTIMIZERS[name](sk.optim.frames([w]), lr=lr, **STATEFUL[name]) for _ in range(2))
    w.grad = torch.full_like(w, size)
    with contextlib.suppress(errors.StiefelkitError):
        optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    assert other.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
