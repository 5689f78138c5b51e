"""Logarithms of the Stiefel manifold: every pair that has one is joined, and short geodesics are found again."""

import itertools
import math

import pytest
import torch

from stiefelkit import errors, init
from stiefelkit.functional import geodesic_logarithm
from stiefelkit.manifolds import Stiefel
from stiefelkit.testing.seeds import generator

REAL, COMPLEX = torch.float64, torch.complex128
SHAPES = [(2, 1), (3, 2), (4, 2), (5, 3), (10, 9), (30, 3)]
EUCLIDEAN = Stiefel("euclidean")
in_both_fields = pytest.mark.parametrize("dtype", [REAL, COMPLEX])


def haar_pairs(shape, dtype, number=0):
    g = generator(number)
    return init.haar(shape, dtype, g), init.haar(shape, dtype, g)


def directed(shape, dtype, length, kind="any", number=0, manifold=None):
    """Frames and tangent vectors of a length, of any kind or of the kinds that turn the fewest planes."""
    g, manifold = generator(number), manifold or Stiefel()
    w = init.haar(shape, dtype, g)
    s = torch.randn(shape, dtype=dtype, generator=g)
    if kind == "one column":
        s = s[..., :1] @ torch.randn(*shape[:-2], 1, shape[-1], dtype=dtype, generator=g)
    if kind == "along":
        s = w @ (w.mH @ s)
    if kind == "across":
        s = s - w @ (w.mH @ s)
    u = manifold.proju(w, s)
    return w, length * u / manifold.norm(w, u, keepdim=True)


def assert_ends_at(w, u, y, manifold=None):
    assert u.isfinite().all()
    tangency = w.mH @ u
    assert torch.linalg.matrix_norm(tangency + tangency.mH).max() <= 1e-12
    assert torch.linalg.matrix_norm((manifold or Stiefel()).expmap(w, u) - y).max() <= 3e-12


@in_both_fields
@pytest.mark.parametrize(
    ("count", "n", "p"), [(200, 2, 1), (100, 4, 2), (50, 5, 3), (20, 10, 9), (10, 100, 3), (4, 40, 20), (200, 5, 5)]
)
def test_every_pair_of_random_frames_in_one_component_is_joined(count, n, p, dtype):
    w, y = haar_pairs((count, n, p), dtype)
    if n == p and dtype == REAL:
        y[..., 0] *= (torch.linalg.det(w) * torch.linalg.det(y)).sign().unsqueeze(-1)
    assert_ends_at(w, Stiefel().logmap(w, y), y)


@pytest.mark.parametrize("kind", ["any", "one column", "along", "across"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "length"), [(REAL, 0.88 * math.pi), (COMPLEX, 0.62 * math.pi)])
def test_logmap_undoes_expmap_within_the_injectivity_radius(shape, dtype, length, kind):
    if kind == "along" and shape[-1] == 1 and dtype == REAL:
        pytest.skip("real tangent vectors of a sphere have no part along the point")
    for number, factor in enumerate((1.0, 0.9, 0.5)):
        w, u = directed((8, *shape), dtype, factor * length, kind, number)
        found = Stiefel().logmap(w, Stiefel().expmap(w, u))
        assert torch.linalg.matrix_norm(found - u).max() <= 1e-9


@in_both_fields
@pytest.mark.parametrize("shape", [(2, 1), (4, 2), (5, 3), (6, 3)])
@pytest.mark.parametrize("away", [0.0, 1e-9, 1e-2])
def test_the_far_side_is_joined(shape, dtype, away):
    w, u = directed((3, *shape), dtype, away)
    y = Stiefel().expmap(-w, -u)
    assert_ends_at(w, Stiefel().logmap(w, y), y)


@in_both_fields
@pytest.mark.parametrize(("n", "p"), [(3, 1), (3, 2), (4, 2), (5, 3)])
def test_frames_of_signed_units_are_joined(n, p, dtype):
    units = torch.eye(n, dtype=dtype)
    columns = itertools.islice(itertools.permutations(range(n), p), 0, None, 3)
    signs = torch.tensor([1.0, -1.0, -1.0])[:p]
    y = torch.stack([units[:, list(each)] * signs for each in columns])
    w = units[:, :p].expand_as(y)
    assert_ends_at(w, Stiefel().logmap(w, y), y)


@pytest.mark.parametrize(("manifold", "dtype"), [(Stiefel(), REAL), (EUCLIDEAN, REAL), (EUCLIDEAN, COMPLEX)])
def test_distance_on_spheres_is_the_angle(manifold, dtype):
    w, y = haar_pairs((200, 4, 1), dtype)
    torch.testing.assert_close(manifold.dist(w, y), (w.mH @ y).real.flatten().arccos())
    u = manifold.logmap(w, -w)
    assert_ends_at(w, u, -w, manifold)
    torch.testing.assert_close(manifold.norm(w, u), torch.full((200,), math.pi, dtype=REAL))


@in_both_fields
@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize("short", [0.0, 1e-9, 1e-7, 1e-3, 1.0])
def test_points_of_spheres_are_joined_up_to_the_opposite_pole(n, dtype, short):
    w, u = directed((5, n, 1), dtype, 1.0, manifold=EUCLIDEAN)
    u = (math.pi - short) * u / EUCLIDEAN.norm(w, u, keepdim=True)
    y = EUCLIDEAN.expmap(w, u)
    found = EUCLIDEAN.logmap(w, y)
    torch.testing.assert_close(EUCLIDEAN.norm(w, found), torch.full((5,), math.pi - short, dtype=REAL))
    assert torch.linalg.matrix_norm(EUCLIDEAN.expmap(w, found) - y).max() <= 3e-12
    if short >= 1e-3:  # Nearer to the pole the rounding of Y decides on the direction.
        assert torch.linalg.matrix_norm(found - u).max() <= 1e-10


def test_distance_on_complex_spheres_is_the_least_over_all_phases():
    # exp(L) in U(2) has the eigenvalues e^{i(s + o)} and e^{i(s - o)} with cos o = |a| cos(s - arg a), a = w^H y.
    w, y = haar_pairs((50, 3, 1), COMPLEX)
    a = (w.mH @ y).view(-1, 1)
    s = torch.linspace(-math.pi, math.pi, 20001, dtype=REAL)
    squares = s.square() + (a.abs() * (s - a.angle()).cos()).clamp(-1, 1).arccos().square()
    expected = squares.amin(-1).sqrt()
    assert (Stiefel().dist(w, y) - expected).abs().max() <= 1e-6


@in_both_fields
@pytest.mark.parametrize("shape", [(3, 2), (4, 2), (6, 3)])
def test_distance_is_symmetric_and_invariant(shape, dtype):
    w, u = directed((3, *shape), dtype, (0.85 if dtype == REAL else 0.48) * math.pi)
    y = Stiefel().expmap(w, u)
    left = init.haar((shape[0], shape[0]), dtype, generator(1))
    right = init.haar((shape[1], shape[1]), dtype, generator(2))
    found = Stiefel().dist(w, y)
    for moved in (Stiefel().dist(y, w), Stiefel().dist(left @ w @ right, left @ y @ right)):
        torch.testing.assert_close(moved, found, atol=1e-9, rtol=0)


def test_one_frame_is_joined_with_many_and_none_with_none():
    w, y = haar_pairs((4, 5, 2), REAL)
    assert Stiefel().logmap(w[0], y).shape == y.shape
    assert Stiefel().logmap(w[:0], y[:0]).shape == (0, 5, 2)
    assert Stiefel().dist(w[:0, :2], y[:0, :2]).shape == (0,)


def test_the_error_counts_the_members_without_a_logarithm():
    w = init.haar((2, 3, 4, 4), REAL, generator())
    y = w.clone()
    y[1, 2, :, 0] *= -1
    y[0, 1, :, 0] *= -1
    with pytest.raises(errors.ImageError, match="2 of 6"):
        Stiefel("euclidean").logmap(w, y)
    y[..., 0] = -w[..., 0]
    with pytest.raises(errors.ImageError, match="determinants"):
        Stiefel().logmap(w[0, 0], y[0, 0])
    many = w[:1].expand(4, 3, 4, 4)
    with pytest.raises(errors.ImageError, match="of 12"):
        Stiefel().dist(many, y[:1].expand(4, 3, 4, 4))


def test_tall_frames_of_several_columns_have_no_euclidean_logarithm_and_the_error_names_the_remedy():
    w, y = haar_pairs((5, 2), REAL)
    with pytest.raises(NotImplementedError, match="canonical"):
        EUCLIDEAN.logmap(w, y)


@pytest.mark.parametrize(("shape", "manifold"), [((5, 2), Stiefel()), ((4, 4), EUCLIDEAN)], ids=str)
@pytest.mark.parametrize("wrong", [math.nan, 1.5])
def test_what_is_no_frame_has_no_logarithm_and_spoils_no_other(shape, wrong, manifold):
    w, u = directed((3, *shape), COMPLEX, 1.0, manifold=manifold)
    y = manifold.expmap(w, u)
    y[1, 0] = wrong
    with pytest.raises(errors.ImageError, match="1 of 3"):
        manifold.logmap(w, y)
    found, joined = geodesic_logarithm(w, y, manifold.metric)
    assert joined.tolist() == [True, False, True]
    assert found[1].isnan().all()
    assert torch.linalg.matrix_norm(found - u)[[0, 2]].max() <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, REAL])
@pytest.mark.parametrize(("shape", "manifold"), [((3, 1), EUCLIDEAN), ((64, 16), Stiefel()), ((12, 12), Stiefel())])
def test_every_point_that_the_manifold_takes_for_a_frame_has_a_logarithm(shape, dtype, manifold):
    # As far off a frame as `check_point_on_manifold` permits, which what float32 leaves of a U V^H is not by far.
    p = shape[-1]
    w, u = directed((4, *shape), COMPLEX if dtype.is_complex else REAL, 1.0)
    y = manifold.expmap(w, u)
    s = torch.randn(4, p, p, dtype=w.dtype, generator=generator(1))
    s = s + s.mH
    s = s / torch.linalg.matrix_norm(s, keepdim=True) * 0.98e-5 * (1 + p**0.5)
    eye = torch.eye(p, dtype=w.dtype)
    x, y = (w @ (eye + s / 2)).to(dtype), (y @ (eye - s / 2)).to(dtype)
    manifold.assert_check_point_on_manifold(x)
    manifold.assert_check_point_on_manifold(y)
    found = manifold.logmap(x, y)
    # A point and the frame that it stands for are half its defect apart; u moves with both.
    off = 4e-5 * (1 + p**0.5)
    assert torch.linalg.matrix_norm(found.to(u.dtype) - u).max() <= off
    assert (manifold.dist(x, y) - manifold.norm(w, u)).abs().max() <= off
    assert torch.linalg.matrix_norm(manifold.expmap(x, found) - y).max() <= off


@pytest.mark.parametrize(("shape", "manifold"), [((2, 1), EUCLIDEAN), ((5, 2), Stiefel()), ((3, 3), EUCLIDEAN)])
def test_logmap_has_no_derivative_rather_than_a_wrong_one(shape, manifold):
    w, u = directed(shape, REAL, 1.0, manifold=manifold)
    y = manifold.expmap(w, u).requires_grad_()
    with pytest.raises(NotImplementedError, match="derivative"):
        manifold.dist(w, y).backward()
