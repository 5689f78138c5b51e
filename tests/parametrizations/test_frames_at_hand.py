"""A weight that is a frame already is kept or refused with the remedy, never drawn anew unless `init=` says so."""

from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.contract.param import load_chart_
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.parametrizations import Cayley
from stiefelkit.testing.seeds import generator


def linear(w) -> Any:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
    layer.weight.data = w.clone()
    return layer


def haar(n, p, number, dtype=torch.float64):
    return sk.init.haar((n, p), torch.complex128 if dtype.is_complex else torch.float64, generator(number)).to(dtype)


def distance(a, b):
    return torch.linalg.matrix_norm((a - b).detach().double()).item()


def test_tall_float64_frames_fit_fixed_signs():
    for number in range(100):
        w = haar(64, 32, number)
        layer = sk.orthogonal(linear(w), "weight", "cayley", negative=16)
        assert distance(layer.weight, w) <= 100 * rounding_limit(32, w.dtype) + orthogonality_error(w).item()


@pytest.mark.parametrize(
    ("n", "p", "count", "dtype"),
    [
        (64, 64, 40, torch.float32),
        (64, 64, 40, torch.float64),
        (190, 190, 8, torch.float64),
        (65, 64, 40, torch.float32),
        (5, 4, 40, torch.float32),
    ],
)
def test_what_fixed_signs_draw_they_take_back(n, p, count, dtype):
    for number in range(count):
        donor = nn.Linear(p, n, bias=False, dtype=dtype)
        own = sk.orthogonal(donor, "weight", "cayley", negative=p // 2, generator=generator(number)).weight.detach()
        layer: Any = sk.orthogonal(linear(own), "weight", "cayley", negative=p // 2)
        bound = layer.parametrizations.weight.param.return_bound + orthogonality_error(own).item()
        assert distance(layer.weight, own) <= bound


def test_a_drawn_frame_with_fixed_signs_keeps_away_from_where_the_transform_ends():
    n, near = 40, 0
    for number in range(60):
        param = Cayley((n, n), dtype=torch.float64, negative=13)
        (skew,), chart = param.initial("haar", generator(number))
        load_chart_(param, chart)
        w = param(skew) * param.signs
        angles = torch.linalg.eigvals(w).angle().abs()
        assert angles.max() <= torch.pi - 2 * torch.atan(torch.tensor(1 / 32)) + 1e-9
        near += int((angles > torch.pi * 0.9).sum())
    # Haar eigenvalues are uniform on the circle: a tenth of them, give or take.
    assert 0.07 <= near / (60 * n) <= 0.13


def turned(angle, n=6):
    """A rotation of one plane, that of no axes, by nearly half a turn."""
    c, s = torch.cos(torch.tensor(angle, dtype=torch.float64)), torch.sin(torch.tensor(angle, dtype=torch.float64))
    w = torch.eye(n, dtype=torch.float64)
    w[0, 0], w[0, 1], w[1, 0], w[1, 1] = c, -s, s, c
    q = haar(n, n, 1)
    return q @ w @ q.mT


@pytest.mark.parametrize(
    ("w", "name", "options"),
    [
        (-torch.eye(3), "matrix_exp", {}),
        (haar(6, 6, 3) * torch.tensor([-1.0] + 5 * [1.0]).sign(), "householder", {"reflections": 2}),
        (turned(torch.pi).float(), "cayley", {"negative": 0}),
        (haar(6, 6, 4), "cayley", {"bandwidth": 1}),
        (haar(6, 6, 6, torch.complex64), "fourier", {}),
        (haar(6, 6, 6).float(), "givens", {"layers": 2}),
    ],
)
def test_a_frame_that_the_map_cannot_take_is_refused_with_the_remedy(w, name, options):
    layer = linear(w)
    with pytest.raises(errors.ImageError, match="init="):
        sk.orthogonal(layer, "weight", name, **options)
    assert torch.equal(layer.weight, w)
    assert type(layer) is nn.Linear
    default = sk.available()[name](tuple(w.shape), dtype=w.dtype, **options).schemes[0]
    sk.orthogonal(layer, "weight", name, init=default, **options)
    assert sk.drift(layer)["weight"].bits_lost < 6


def test_coordinates_too_large_to_come_back_are_refused():
    w = turned(torch.pi - 1e-6, 64).float()
    with pytest.raises(errors.ImageError, match="init="):
        sk.orthogonal(linear(w), "weight", "cayley", negative=0)
    frame = linear(turned(torch.pi - 1e-2).float())
    before = frame.weight.detach().clone()
    sk.orthogonal(frame, "weight", "cayley", negative=0)
    assert distance(frame.weight, before) < 1e-5
