"""The logarithm of tall frames in the Euclidean metric: short geodesics are found again, and failures are told."""

import math

import pytest
import torch

from stiefelkit import errors, init
from stiefelkit.functional import skew_logarithm
from stiefelkit.manifolds import Stiefel
from stiefelkit.testing.seeds import generator

REAL, COMPLEX = torch.float64, torch.complex128
DIRECTIONS = [((3, 2), kind) for kind in ("one column", "along", "across")]
DIRECTIONS += [(shape, "any") for shape in ((2, 1), (3, 2), (9, 2), (5, 4))]
MANIFOLD = Stiefel("euclidean")


def directed(shape, dtype, length, kind="any", number=0):
    """Frames and tangent vectors of a Euclidean length, of any kind or of the kinds that turn the fewest planes."""
    g = generator(number)
    w = init.haar(shape, dtype, g)
    s = torch.randn(shape, dtype=dtype, generator=g)
    if kind == "one column":
        s = s[..., :1] @ torch.randn(*shape[:-2], 1, shape[-1], dtype=dtype, generator=g)
    if kind == "along":
        s = w @ (w.mH @ s)
    if kind == "across":
        s = s - w @ (w.mH @ s)
    u = MANIFOLD.proju(w, s)
    return w, length * u / MANIFOLD.norm(w, u, keepdim=True)


def assert_ends_at(w, u, y):
    tangency = w.mH @ u
    assert torch.linalg.matrix_norm(tangency + tangency.mH).max() <= 1e-12
    assert torch.linalg.matrix_norm(MANIFOLD.expmap(w, u) - y).max() <= 3e-12


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "kind"), DIRECTIONS)
@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
def test_logmap_undoes_expmap_within_the_injectivity_radius(shape, dtype, kind):
    length = torch.tensor([0.97 * math.pi, 0.97 * math.pi, 1.0, 1e-6, 0.0], dtype=REAL)
    w, u = directed((5, *shape), dtype, length[:, None, None], kind)
    y = MANIFOLD.expmap(w, u)
    found = MANIFOLD.logmap(w, y)
    assert_ends_at(w, found, y)
    assert torch.linalg.matrix_norm(found - u).max() <= 1e-9
    torch.testing.assert_close(MANIFOLD.dist(w, y), length, atol=1e-9, rtol=0)


def test_logmap_of_large_frames_undoes_expmap():
    for shape in ((100, 3), (40, 12)):
        w, u = directed(shape, REAL, 2.5)
        y = MANIFOLD.expmap(w, u)
        assert (MANIFOLD.logmap(w, y) - u).norm() <= 1e-9


@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
@pytest.mark.parametrize(("n", "p"), [(3, 2), (5, 3)])
def test_random_frames_are_joined_or_nan(n, p, dtype):
    g = generator()
    w, y = init.haar((10, n, p), dtype, g), init.haar((10, n, p), dtype, g)
    u = MANIFOLD.logmap(w, y, missing="nan")
    joined = u.isfinite().all(-1).all(-1)
    assert joined.any()
    assert_ends_at(w[joined], u[joined], y[joined])
    assert (MANIFOLD.norm(w, u)[joined] >= torch.linalg.matrix_norm(w - y)[joined]).all()


def test_the_distance_is_no_less_than_the_canonical_one_and_no_more_than_the_square_root_of_two_times_it():
    for dtype in (REAL, COMPLEX):
        w, u = directed((20, 5, 3), dtype, 0.6 * math.pi)
        y = MANIFOLD.expmap(w, u)
        euclidean, canonical = MANIFOLD.dist(w, y), Stiefel().dist(w, y)
        assert (canonical <= euclidean + 1e-9).all()
        assert (euclidean <= math.sqrt(2) * canonical + 1e-9).all()


def test_distance_on_spheres_is_the_angle():
    for dtype in (REAL, COMPLEX):
        g = generator()
        w, y = init.haar((20, 4, 1), dtype, g), init.haar((20, 4, 1), dtype, g)
        torch.testing.assert_close(MANIFOLD.dist(w, y), (w.mH @ y).real.flatten().arccos())


@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
def test_poles_of_spheres_are_half_a_great_circle_apart(dtype):
    w = init.haar((5, 4, 1), dtype, generator())
    u = MANIFOLD.logmap(w, -w)
    torch.testing.assert_close(MANIFOLD.norm(w, u), torch.full((5,), math.pi, dtype=REAL))
    assert torch.linalg.matrix_norm(MANIFOLD.expmap(w, u) + w).max() <= 3e-12


@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize("short", [0.0, 1e-9, 1e-7, 1e-3, 1.0])
def test_points_of_spheres_are_joined_up_to_the_opposite_pole(n, dtype, short):
    w, u = directed((5, n, 1), dtype, 1.0)
    u = (math.pi - short) * u / MANIFOLD.norm(w, u, keepdim=True)
    y = MANIFOLD.expmap(w, u)
    found = MANIFOLD.logmap(w, y)
    torch.testing.assert_close(MANIFOLD.norm(w, found), torch.full((5,), math.pi - short, dtype=REAL))
    assert torch.linalg.matrix_norm(MANIFOLD.expmap(w, found) - y).max() <= 3e-12
    if short >= 1e-3:  # Nearer to the pole the rounding of Y decides on the direction.
        assert torch.linalg.matrix_norm(found - u).max() <= 1e-10


def test_opposite_frames_are_joined_or_nan():
    w = init.haar((2, 5, 2), COMPLEX, generator())
    u = MANIFOLD.logmap(w, -w, missing="nan")
    assert u.isnan().all() or torch.linalg.matrix_norm(MANIFOLD.expmap(w, u) + w).max() <= 3e-12


def test_frames_of_one_plane_are_as_far_apart_as_square_ones():
    # Frames [Q; 0] with Q square stay so along their geodesics, W exp(t log Q).
    q = Stiefel().random(10, 3, 3, dtype=REAL, generator=generator(), det=1)
    y = torch.cat([q, torch.zeros(10, 2, 3, dtype=REAL)], dim=-2)
    a, _ = skew_logarithm(q)
    a = a / torch.linalg.matrix_norm(a, keepdim=True)
    y[:, :3] = torch.linalg.matrix_exp(2.5 * a)
    w = torch.eye(5, 3, dtype=REAL).expand_as(y)
    torch.testing.assert_close(MANIFOLD.dist(w, y), torch.full((10,), 2.5, dtype=REAL), atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
def test_distance_is_symmetric_and_invariant(dtype):
    w, u = directed((3, 4, 2), dtype, 0.9 * math.pi)
    y = MANIFOLD.expmap(w, u)
    left, right = init.haar((4, 4), dtype, generator(1)), init.haar((2, 2), dtype, generator(2))
    found = MANIFOLD.dist(w, y)
    for moved in (MANIFOLD.dist(y, w), MANIFOLD.dist(left @ w @ right, left @ y @ right)):
        torch.testing.assert_close(moved, found, atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
def test_members_of_a_batch_do_not_depend_on_each_other(dtype):
    w, u = directed((2, 2, 5, 2), dtype, torch.tensor([[0.1, 3.0], [1.0, 2.0]])[..., None, None])
    y = MANIFOLD.expmap(w, u)
    together = MANIFOLD.logmap(w, y)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        torch.testing.assert_close(together[i, j], MANIFOLD.logmap(w[i, j], y[i, j]), atol=1e-9, rtol=0)


@pytest.mark.parametrize("wrong", [math.nan, 1.5])
def test_what_is_no_frame_has_no_logarithm_and_spoils_no_other(wrong):
    w, u = directed((3, 5, 2), COMPLEX, 1.0)
    y = MANIFOLD.expmap(w, u)
    y[1, 0] = wrong
    with pytest.raises(errors.ImageError, match=r"got none for \(1,\) of the batch \(3,\).*projx"):
        MANIFOLD.logmap(w, y)
    found = MANIFOLD.logmap(w, y, missing="nan")
    assert found[1].isnan().all()
    assert torch.linalg.matrix_norm(found - u)[[0, 2]].max() <= 1e-10


def test_frames_that_shooting_does_not_join_are_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(
        "stiefelkit.functional._stiefel.geodesics._shoot", lambda y, alpha: torch.full_like(y, torch.nan)
    )
    w, u = directed((2, 5, 2), REAL, 1.0)
    with pytest.raises(errors.ImageError, match=r'got none for \(0,\), \(1,\).*; metric="canonical" joins all'):
        MANIFOLD.logmap(w, MANIFOLD.expmap(w, u))


def test_logmap_has_no_derivative_rather_than_a_wrong_one():
    w, u = directed((5, 2), REAL, 1.0)
    y = MANIFOLD.expmap(w, u).requires_grad_()
    with pytest.raises(NotImplementedError, match="derivative"):
        MANIFOLD.dist(w, y).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_frames_are_joined(dtype):
    wide = REAL if dtype == torch.float32 else COMPLEX
    w, u = directed((6, 9, 4), wide, 2.5)
    w, y = w.to(dtype), MANIFOLD.expmap(w, u).to(dtype)
    found = MANIFOLD.logmap(w, y)
    assert found.dtype == dtype
    assert torch.linalg.matrix_norm(MANIFOLD.expmap(w, found) - y).max() <= 1e-5
