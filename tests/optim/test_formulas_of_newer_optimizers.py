"""Muon, SPEL, Kong's momentum and Landing make the steps that their papers say, where double precision shows it."""

import math

import pytest
import torch
from optimizers_at_hand import excess, frame, gradient, group, run
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.metrics import orthogonality_error

FIELDS = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
METRICS = ["canonical", "euclidean"]


def cayley(a):
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    return torch.linalg.solve(eye + a / 2, eye - a / 2)


@FIELDS
@pytest.mark.parametrize("shape", [(16, 4), (5, 4)], ids=str)
def test_manifold_muon_of_a_tall_frame_takes_the_best_tangent_vector(shape, dtype):
    """By its optimality conditions: tangent, of norm 1, and no duality gap."""
    w = frame(shape, dtype)
    start, g, lr = w.detach().clone(), gradient(shape, dtype), 0.05
    run(sk.optim.ManifoldMuon(group(w), lr=lr, momentum=0.0, iterations=100), w, [g])
    _, multiplier = sk.functional.spectral_direction(start, g, iterations=100)
    # W' = (W - lr A) H with A tangent, so I = sym(H^-1 W'^H W): its inverse solves a Lyapunov equation.
    z = w.detach().mH @ start
    eye = torch.eye(shape[1], dtype=dtype)
    system = torch.kron(eye, z.mT.contiguous()) + torch.kron(z.mH.contiguous(), eye)
    inverse = torch.linalg.solve(system, 2 * eye.reshape(-1)).reshape(shape[1], shape[1])
    a = (start - w.detach() @ inverse) / lr
    along = start.mH @ a
    assert torch.linalg.matrix_norm(along + along.mH) < 1e-11
    assert abs(torch.linalg.matrix_norm(a, 2).item() - 1) < 1e-6
    best = torch.linalg.svdvals(g + 2 * start @ multiplier).sum().item()
    assert abs((g.conj() * a).real.sum().item() - best) <= 1e-6 * best


def kong(w, y, v, g, lr, momentum, metric, isometric=True):
    """One step of the split scheme; W moves against W Y + V."""
    p = w.shape[-1]
    s = w.mH @ g
    y = momentum * y + (s - s.mH) * (1 if metric == "canonical" else 0.5)
    v = momentum * v + g - w @ s
    turn = cayley(lr * y)
    if metric == "euclidean":
        v = v @ turn.mH
    first, m = w @ turn, v.mH @ v
    values, vectors = torch.linalg.eigh(torch.eye(p, dtype=w.dtype) + lr**2 * m)
    shrink = (vectors * values.rsqrt()) @ vectors.mH
    after = (first - lr * v) @ shrink
    v = v + lr * first @ m
    return after, y, v @ shrink if isometric else v


@FIELDS
def test_the_momentum_keeps_its_length_which_is_that_of_the_paper_to_first_order(dtype):
    def apart(lr):
        ends = []
        for isometric in (True, False):
            w = frame((9, 4), dtype).detach()
            y, v = torch.zeros(4, 4, dtype=dtype), torch.zeros(9, 4, dtype=dtype)
            for seed in range(1, 4):
                w, y, v = kong(w, y, v, gradient((9, 4), dtype, seed), lr, 0.9, "canonical", isometric)
            ends.append(w)
        return torch.dist(*ends).item()

    assert apart(0.01) / apart(0.005) == pytest.approx(8, rel=0.05)


@FIELDS
@pytest.mark.parametrize("metric", METRICS)
def test_without_gradients_stiefel_sgd_goes_along_a_geodesic(dtype, metric):
    def off(steps):
        w, g = frame((8, 3), dtype), gradient((8, 3), dtype)
        start = w.detach().clone()
        optimizer = sk.optim.StiefelSGD(group(w, metric=metric), lr=1 / steps, momentum=1.0)
        run(optimizer, w, [g, *[torch.zeros_like(g)] * (steps - 1)])
        along = -sk.functional.riemannian_gradient(start, g, metric).vector(start)
        return torch.dist(w, sk.functional.geodesic(start, along, metric=metric)[0]).item()

    assert off(16) <= 0.08
    assert off(8) / off(16) == pytest.approx(2, rel=0.2)


@FIELDS
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("shape", [(6, 6), (9, 4)], ids=str)
@pytest.mark.parametrize("lr", [0.05, 2.0])
def test_landing_is_its_field_and_its_safe_step_and_lands_on_time(shape, dtype, metric, lr):
    w, pull = frame(shape, dtype), 0.8
    expected, eye = w.detach().clone(), torch.eye(shape[-1], dtype=dtype)
    optimizer = sk.optim.Landing(group(w, metric=metric), lr=lr, attraction=pull, every=5)
    for seed in range(1, 5):
        g = gradient(shape, dtype, seed)
        run(optimizer, w, [g])
        e = expected.mH @ expected - eye
        s = expected.mH @ g
        field = g @ (eye + e) - expected @ s.mH + pull * expected @ e
        if metric == "euclidean":
            field = field - expected @ (s - s.mH) / 2
        d, f = (torch.linalg.matrix_norm(t).item() for t in (e, field))
        b = pull * d * (1 - d)
        step = min(lr, (b + math.sqrt(b * b + f * f * (0.5 - d))) / f**2, 1 / (2 * pull))
        expected = expected - step * field
        assert torch.dist(w, expected) < 1e-12
        assert orthogonality_error(w) <= 0.5 + 1e-9
    assert orthogonality_error(w) > 1e-6
    run(optimizer, w, [gradient(shape, dtype, 9)])
    assert excess(w) <= 20


def test_landing_on_every_step_is_pogo_without_its_moments():
    for shape in [(6, 6), (9, 4)]:
        ws = [frame(shape, torch.float64) for _ in range(2)]
        gs = [gradient(shape, torch.float64, seed) for seed in range(4)]
        run(sk.optim.Landing(group(ws[0]), lr=0.1), ws[0], gs)
        run(sk.optim.POGO(group(ws[1]), lr=0.1, betas=(0.0, 0.999)), ws[1], gs)
        assert torch.dist(ws[0], ws[1]) < 1e-12


def test_a_frame_that_landing_finds_far_off_was_changed_by_something_else():
    w = nn.Parameter(frame((6, 6)).detach().clone())
    optimizer = sk.optim.Landing(group(w), lr=0.1, every=3)
    w.data *= 1.5
    with pytest.raises(errors.NotAFrameError, match="changed from outside"):
        run(optimizer, w, [gradient((6, 6))])


@pytest.mark.parametrize("name", ["ManifoldMuon", "SPEL", "StiefelAdam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_a_gradient_that_is_normal_to_the_manifold_moves_nothing(name, dtype):
    """Its tangent part is rounding, which would come out at full length."""
    for shape in [(6, 6), (9, 4), (5, 1)]:
        w = frame(shape, dtype)
        start, h = w.detach().clone(), gradient((shape[1], shape[1]), dtype)
        run(getattr(sk.optim, name)(group(w), lr=0.1), w, [start @ (h + h.mH)])
        assert torch.dist(w, start) <= 1e-5


@pytest.mark.parametrize("capturable", [False, True])
def test_frames_that_are_moved_together_land_each_by_its_own_count(capturable):
    def after(together):
        ws = [frame((5, 3)), frame((5, 3))]
        made = [[ws[0], ws[1]]] if together else [[ws[0]], [ws[1]]]
        optimizers = [sk.optim.Landing(sk.optim.frames(each), lr=0.1, every=2, capturable=capturable) for each in made]
        for step in range(7):  # the second frame has a gradient in every other step: four of them
            ws[0].grad = gradient((5, 3), seed=step)
            ws[1].grad = gradient((5, 3), seed=9 + step) if step % 2 == 0 else None
            for optimizer in optimizers:
                optimizer.step()
        return ws

    for w, alone in zip(after(True), after(False), strict=True):
        assert torch.dist(w, alone) < 1e-5
    assert orthogonality_error(after(True)[0]) > 1e-3
    assert excess(after(True)[1]) <= 1


def test_a_state_of_steps_that_read_nothing_goes_on_with_steps_that_do_and_is_saved():
    for name in ("CayleyAdam", "StiefelAdam"):
        w = frame((5, 3))
        optimizer = getattr(sk.optim, name)(sk.optim.frames(w), capturable=True)
        run(optimizer, w, [gradient((5, 3))])
        optimizer.param_groups[0]["capturable"] = False
        run(optimizer, w, [gradient((5, 3), seed=1)])
        assert optimizer.state[w]["step"] == 2
        optimizer.load_state_dict(optimizer.state_dict())
