"""The steepest tangent vector in the spectral norm: feasible after any iteration, and proved nearly the best."""

import pytest
import torch

from stiefelkit import errors, init
from stiefelkit.functional import msign, polar_increment, spectral_direction, tangent_part
from stiefelkit.functional._stiefel.spectral import split
from stiefelkit.testing.seeds import generator

FIELDS = (torch.float64, torch.complex128)


def problem(n, p, dtype, seed=0):
    w = init.haar((n, p), dtype, generator(seed))
    return w, torch.randn(n, p, dtype=dtype, generator=generator(seed + 1))


def nuclear(x):
    return torch.linalg.svdvals(x).sum().item()


def certified_gap(w, g, a, multiplier) -> float:
    """What the best A could gain at most, over what this one does; A is asserted to be tangent and no longer than 1."""
    along = w.mH @ a
    assert torch.linalg.matrix_norm(along + along.mH) <= 1e-13 * w.shape[0]
    assert torch.linalg.matrix_norm(a, 2) <= 1 + 1e-12
    assert torch.allclose(multiplier, multiplier.mH, atol=1e-12)
    value = (g.conj() * a).real.sum().item()
    gap = nuclear(g + 2 * w @ multiplier) - value
    assert gap >= -1e-12 * abs(value)
    return gap / value


@pytest.mark.parametrize("dtype", FIELDS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 5, 6, 21])
def test_a_square_frame_has_the_best_direction_at_once(n, dtype):
    if n == 1 and not dtype.is_complex:
        return  # nowhere to go
    w, g = problem(n, n, dtype)
    a, multiplier = spectral_direction(w, g)
    assert certified_gap(w, g, a, multiplier) <= 1e-11
    s = w.mH @ g
    half = nuclear(s - s.mH) / 2
    assert abs((g.conj() * a).real.sum().item() - half) <= 1e-11 * half


@pytest.mark.parametrize("dtype", FIELDS, ids=str)
@pytest.mark.parametrize(
    ("shape", "bounds"),
    [
        ((48, 8), (5e-3, 4e-4, 1e-6, 1e-9)),
        ((16, 8), (1e-1, 4e-2, 2e-2, 7e-3)),
        ((12, 8), (1e-1, 4e-2, 2e-2, 7e-3)),
        ((9, 8), (1e-1, 4e-2, 2e-2, 7e-3)),
        ((5, 1), (1e-12, 1e-12, 1e-12, 1e-12)),
    ],
)
def test_iterations_close_the_gap_of_a_tall_one_as_the_table_says(shape, dtype, bounds):
    w, g = problem(shape[0], shape[1], dtype)
    for iterations, bound in zip((5, 10, 20, 40), bounds, strict=True):
        a, multiplier = spectral_direction(w, g, iterations=iterations)
        assert certified_gap(w, g, a, multiplier) <= bound


@pytest.mark.parametrize("dtype", FIELDS, ids=str)
@pytest.mark.parametrize("shape", [(9, 3), (5, 4), (6, 6)], ids=str)
def test_many_iterations_prove_the_best_whatever_the_size_of_the_gradient(shape, dtype):
    w, g = problem(shape[0], shape[1], dtype, 4)
    a, multiplier = spectral_direction(w, g, iterations=100)
    assert certified_gap(w, g, a, multiplier) <= 1e-6
    small, _ = spectral_direction(w, 1e-20 * g, iterations=100)
    assert torch.dist(a, small) <= 1e-8
    zero, multiplier = spectral_direction(w, torch.zeros_like(g))
    assert torch.equal(zero, torch.zeros_like(zero))
    assert torch.allclose(multiplier, torch.zeros_like(multiplier))
    a, multiplier = spectral_direction(w, g + 3 * w, iterations=100)
    assert certified_gap(w, g + 3 * w, a, multiplier) <= 1e-6


@pytest.mark.parametrize(("rows", "columns", "iterations"), [(3, 5, 10), (5, 2, 10), (5, 3, 0)])
def test_what_makes_no_sense_is_refused(rows, columns, iterations):
    w, _ = problem(max(rows, columns), 3, torch.float64)
    g = torch.ones(rows, columns, dtype=torch.float64)
    with pytest.raises((errors.ShapeError, errors.OptionError)):
        spectral_direction(w if rows > columns else w.mH, g, iterations=iterations)


def test_the_linear_oracle_gains_less_than_the_best_and_is_not_tangent():
    w, g = problem(20, 10, torch.float64)
    r = tangent_part(w, g)
    oracle = msign(r)
    best, _ = spectral_direction(w, g, iterations=100)
    # Of the oracle counts what of it is a step: its tangent part.
    gained, most = ((r * a).sum().item() for a in (tangent_part(w, oracle), best))
    scaled = gained / max(1.0, torch.linalg.matrix_norm(tangent_part(w, oracle), 2).item())
    assert 0.85 * most < scaled < most < gained
    assert torch.linalg.matrix_norm(w.mT @ oracle + oracle.mT @ w) > 0.05


@pytest.mark.parametrize("dtype", FIELDS, ids=str)
def test_batches_are_their_loop(dtype):
    w = init.haar((3, 7, 4), dtype, generator(0))
    g = torch.randn(3, 7, 4, dtype=dtype, generator=generator(1)) * torch.tensor([1.0, 0.0, 1e9])[:, None, None]
    found, _ = spectral_direction(w, g)
    assert torch.dist(found, torch.stack([spectral_direction(a, b)[0] for a, b in zip(w, g, strict=True)])) <= 1e-10


@pytest.mark.parametrize("dtype", FIELDS, ids=str)
@pytest.mark.parametrize("step", [1e-8, 1e-3, 0.1, 0.9, 1.0, 30.0])
@pytest.mark.parametrize("is_tangent", [True, False])
def test_the_polar_increment_leads_to_the_nearest_frame(dtype, step, is_tangent):
    w, g = problem(9, 4, dtype, 2)
    u = spectral_direction(w, g)[0] if is_tangent else msign(tangent_part(w, g))
    increment = polar_increment(w, split(w, u, is_tangent=is_tangent), step)
    left, _, right = torch.linalg.svd(w - step * u, full_matrices=False)
    assert torch.dist(w + increment, left @ right) <= 3e-14 * max(1, step)
    assert torch.linalg.matrix_norm(increment) <= 2 * min(step * 2, 4)
