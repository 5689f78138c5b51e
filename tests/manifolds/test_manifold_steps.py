"""Steps along the manifold: their derivatives in either mode, any length, and many at once."""

import pytest
import torch
from drawn_frames import ALL, DTYPES, drawn

import stiefelkit as sk
from stiefelkit import errors, init
from stiefelkit.manifolds import RETRACTIONS, Stiefel
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.testing import seeds


@pytest.mark.parametrize("manifold", ALL, ids=repr)
def test_gradients_at_rest_are_projections_and_what_is_off_by_rounding_is_not_kept(manifold):
    w, g = init.haar((9, 2)), torch.randn(9, 2, dtype=torch.float64)
    for method in (manifold.retr, manifold.expmap):
        u = torch.zeros_like(w, requires_grad=True)
        method(w, u).backward(g)
        torch.testing.assert_close(u.grad, manifold.proju(w, g))
    loose = w.float() * (1 + 1e-5)
    moved = manifold.retr(loose, torch.zeros_like(loose))
    assert orthogonality_error(moved) <= 1.2 * rounding_limit(2, torch.float32) + torch.finfo(torch.float32).eps


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64])
@pytest.mark.parametrize("retraction", ["cayley", "polar", "qr"])
@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
def test_vectors_of_any_size_end_at_a_frame_or_in_a_sentence_and_their_projections_are_finite(
    metric, retraction, dtype
):
    manifold = sk.manifolds.Stiefel(metric, retraction)
    for shape in ((4, 3), (3, 3), (3, 1)):
        x, y = (sk.init.haar(shape, dtype, seeds.generator(seed)) for seed in (0, 1))
        for exponent in (-320, -200, 0, 4, 150, 200, 300) if dtype == torch.float64 else (-44, -22, 0, 4, 19, 37):
            u = torch.randn(shape, dtype=sk.metrics.working_dtype(dtype), generator=seeds.generator(2))
            u = (u / u.abs().max() * 10.0**exponent).to(dtype)
            for step in (manifold.retr, manifold.expmap):
                try:
                    moved = step(x, u)
                except errors.StiefelkitError:
                    assert exponent > 0
                    continue
                assert sk.metrics.orthogonality_error(moved) <= sk.metrics.frame_tolerance(shape[-1], dtype)
            for part in (manifold.proju(x, u), manifold.egrad2rgrad(x, u), manifold.transp(x, y, u)):
                assert torch.isfinite(part).all()


# Both results of these two are what the other methods return, one each.
STEPS = [("retr_transp", retraction) for retraction in RETRACTIONS] + [("expmap_transp", "cayley")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(3, 3), (4, 3), (7, 2), (2, 5, 2)])
@pytest.mark.parametrize(("name", "retraction"), STEPS)
@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
def test_forward_derivatives_of_steps_equal_central_differences(metric, name, retraction, shape, dtype):
    manifold, g = Stiefel(metric, retraction), seeds.generator()
    w = init.haar(shape, dtype, g)
    u, v, dw, du, dv = (torch.randn(shape, dtype=dtype, generator=g) / shape[-1] for _ in range(5))
    dw = manifold.proju(w, dw)

    def step(w, u, v):
        return getattr(manifold, name)(w, u, v)

    h, tangents = 2.0**-13, (dw, du, dv)
    _, found = torch.func.jvp(step, (w, u, v), tangents)  # type: ignore[misc]
    ends = []
    for t in (h, -h):
        moved = manifold.expmap(w, t * dw), u + t * du, v + t * dv
        ends.append(step(*moved))
    for slope, after, before in zip(found, *ends, strict=True):
        # The third derivative over 6 times h^2 = 1.5e-8, and rounding of some 100 units over h.
        assert (slope - (after - before) / (2 * h)).norm() <= 1e-6 * (1 + slope.norm())
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(*pair) for pair in zip((w, u, v), tangents, strict=True)]
        for dual, slope in zip(step(*duals), found, strict=True):
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, slope)
