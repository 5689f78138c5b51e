"""Every optimizer of frames makes the steps that its paper says, where double precision shows it."""

import itertools
from typing import Any

import pytest
import torch
from optimizers_at_hand import frame, gradient, group, run

import stiefelkit as sk
from benchmarks.fuzz.steps import OF_FRAMES
from stiefelkit.metrics import orthogonality_error, rounding_limit

METRICS = ["canonical", "euclidean"]


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
@pytest.mark.parametrize("name", OF_FRAMES)
def test_steps_are_those_of_the_formulas(name, metric):
    """With states that the formulas lead to, on all settings that the class gives as examples."""
    cls: Any = getattr(sk.optim, name)
    shapes = [(6, 6), (7, 3), (4, 1), (1, 1), (2, 4, 3)]
    for shape, options, lr in itertools.product(shapes, cls.examples, (0.01, 0.5, 3.0)):
        dtype = torch.complex128 if (shape[-1] + len(options)) % 2 else torch.float64
        w, states = frame(shape, dtype), dict[str, Any]()
        expected = w.detach().clone()
        optimizer = cls(group(w, metric=metric), lr=lr, **options)
        settings = {**optimizer.param_groups[0], "eps of the frame": torch.finfo(dtype).eps}
        for k in range(1, 5):
            run(optimizer, w, [gradient(shape, dtype, k)])
            expected, states = OF_FRAMES[name](expected, gradient(shape, dtype, k), states, settings)
            states["step"] = k
        assert (w.detach() - expected).norm() < 1e-10


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


@pytest.mark.parametrize("length", [1e-3, 0.1, 1.0])
def test_a_fast_pogo_is_off_by_the_fourth_power_of_its_step_at_most(length):
    w = frame((24, 24))
    optimizer = sk.optim.POGO(group(w), lr=length, precision="fast")
    for seed in range(30):
        run(optimizer, w, [gradient((24, 24), seed=seed % 5)])
        assert orthogonality_error(w) <= 0.2 + rounding_limit(24, w.dtype)
