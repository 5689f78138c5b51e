"""Products of reflectors against the plain product and the oRNN paper."""

from typing import Any

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors, init
from stiefelkit.contract.param import load_chart_, rounded
from stiefelkit.functional import householder, householder_linear, pack_trapezoid, trapezoid_size, unpack_trapezoid
from stiefelkit.metrics import orthogonality_error, permitted_error, permitted_return, rounding_limit, working_dtype
from stiefelkit.testing import seeds

Householder = sk.parametrizations.Householder

DTYPES = [torch.float64, torch.complex128]


def product(u, p):
    """H(u_1) H(u_2) ... applied to the first p columns of the identity, last column of U first."""
    n, k = u.shape
    w = torch.eye(n, p, dtype=u.dtype)
    for j in reversed(range(k)):
        v = u[:, j : j + 1]
        w = w - 2 * v @ (v.mH @ w) / (v.mH @ v).real
    return w


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize(("n", "k", "p"), [(1, 1, 1), (6, 6, 6), (6, 2, 6), (9, 4, 4), (9, 3, 5)])
def test_compact_wy_is_the_product_of_reflectors(n, k, p, is_complex):
    v = torch.randn(trapezoid_size(n, k, is_complex), dtype=torch.float64)
    u = unpack_trapezoid(v, n, k, is_complex)
    assert torch.equal(u, u.tril())
    assert torch.allclose(householder(v, n, k, p, dtype=DTYPES[is_complex]), product(u, p), atol=1e-13)


def test_the_count_is_the_papers():
    # nk - k(k - 1)/2, Mhammedi et al. 2017: n = 128 with 16 reflections.
    layer = sk.orthogonal(torch.nn.Linear(128, 128), "weight", "householder", reflections=16)
    assert sk.coordinates(layer, "weight")["reflectors"].numel() == 128 * 16 - 16 * 15 // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_identity_trains_with_fewer_reflectors_too(dtype):
    layer = sk.orthogonal(torch.nn.Linear(6, 6, dtype=dtype), "weight", "householder", reflections=3, init="identity")
    assert torch.allclose(layer.weight, torch.eye(6, dtype=dtype), atol=1e-6)
    target = torch.randn(6, 6, dtype=dtype)
    (layer.weight * target).sum().abs().backward()
    gradient = sk.coordinates(layer, "weight")["reflectors"].grad
    assert gradient is not None
    assert gradient.abs().max() > 1e-3


def test_other_reflections_are_refused():
    with pytest.raises(errors.OptionError, match="reflections"):
        Householder((3, 3), reflections=4)
    few = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "householder", reflections=2)
    more = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "householder", reflections=3)
    with pytest.raises(errors.CheckpointError, match="options"):
        more.load_state_dict(few.state_dict())
    cayley = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "cayley")
    with pytest.raises(errors.CheckpointError, match="householder"):
        few.load_state_dict(cayley.state_dict())


def plain(v, n, k, p, dtype, d):
    """The product by unblocked compact WY in float64, which torch differentiates."""
    u = unpack_trapezoid(v.double(), n, k, dtype.is_complex)
    square = u.abs().square().sum(-2, keepdim=True)
    u = u / torch.where(square == 0, torch.inf, (square / 2).sqrt())
    first = torch.eye(n, p, dtype=u.dtype) * d.unsqueeze(-2)
    return first - u @ torch.linalg.solve_triangular(u.mH @ u, u.mH @ first, upper=True, unitriangular=True)


def drawn(shape, k, dtype, scale=1.0) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
    *batch, n, p = shape
    real = torch.float64 if dtype == working_dtype(dtype) else torch.float32
    v = torch.randn(*batch, trapezoid_size(n, k, dtype.is_complex), dtype=real).mul_(scale).requires_grad_()
    if not dtype.is_complex:
        signs = torch.randint(0, 2, (*batch, p)) * 2 - 1
        return v, {"signs": signs.to(torch.int8)}, signs.double()
    phase = torch.randn(*batch, p, dtype=real)
    return v, {"phase": phase}, torch.polar(torch.ones_like(phase), phase).to(torch.complex128)


PANELS = [((512, 512), 512), ((513, 40), 40), ((150, 100), 70), ((2, 3, 70, 68), 66)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32, torch.complex64])
@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize(("shape", "k"), PANELS)
def test_panels_equal_the_product_in_one_piece(shape, k, precision, dtype):
    if dtype.is_complex and shape == (512, 512):
        shape, k = (256, 256), 256
    v, diagonal, d = drawn(shape, k, dtype)
    n, p = shape[-2:]
    w, expected = householder(v, n, k, p, dtype=dtype, precision=precision, **diagonal), plain(v, n, k, p, dtype, d)
    is_double = dtype == working_dtype(dtype)
    limits = p if is_double else 1 if precision == "exact" else 25
    assert (torch.linalg.matrix_norm(w - expected) <= limits * rounding_limit(p, dtype)).all()
    if precision == "exact":
        assert (orthogonality_error(w) <= permitted_error(p, dtype)).all()
    g = torch.randn_like(w)
    (ours,), (exact,) = torch.autograd.grad(w, v, g), torch.autograd.grad(expected, v, g.to(expected.dtype))
    assert (ours - exact).norm() <= (1e-13 if is_double else 1e-5) * exact.norm()


@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e30])
@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_gradients_of_panels_are_safe_at_any_scale(scale, precision):
    v, diagonal, d = drawn((160, 160), 160, torch.float32, scale)
    w, expected = (
        householder(v, 160, 160, 160, dtype=torch.float32, precision=precision, **diagonal),
        plain(v, 160, 160, 160, torch.float32, d),
    )
    assert torch.allclose(w.double(), expected, atol=1e-5)
    g = torch.randn_like(w)
    (a,), (b,) = torch.autograd.grad(w, v, g), torch.autograd.grad(expected, v, g.double())
    assert (a.double() * scale - b.double() * scale).norm() <= 1e-5 * (b.double() * scale).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("n", [1, 6, 160])
def test_a_reflector_of_one_entry_has_gradient_zero_however_short(n, dtype):
    v = torch.randn(trapezoid_size(n, n, dtype.is_complex), generator=seeds.generator(n))
    u = unpack_trapezoid(v, n, n, dtype.is_complex)
    u[-1, -1] *= 1e-4
    v = pack_trapezoid(u).requires_grad_()
    g = torch.randn(n, n, dtype=dtype, generator=seeds.generator(1))
    for precision in ("exact", "fast"):
        (gv,) = torch.autograd.grad(householder(v, n, n, n, dtype=dtype, precision=precision), v, g)
        assert unpack_trapezoid(gv, n, n, dtype.is_complex)[-1, -1] == 0


@pytest.mark.parametrize(("n", "dead"), [(4, [1]), (140, [0, 5, 95, 96, 100, 139])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64])
def test_zero_reflectors_are_the_identity_with_gradient_zero(dtype, n, dead):
    u = torch.randn(n, n, dtype=dtype).tril()
    u[:, dead] = 0
    v = pack_trapezoid(u).requires_grad_()
    for precision in ("exact", "fast"):
        w = householder(v, n, n, n, dtype=dtype, precision=precision)
        kept = u.to(working_dtype(dtype))[:, [j for j in range(n) if j not in dead]]
        assert torch.allclose(w.to(kept.dtype), product(kept, n), atol=1e-13 if dtype == torch.float64 else 1e-5)
        (g,) = torch.autograd.grad(w.abs().sum(), v)
        assert torch.isfinite(g).all()
        assert (unpack_trapezoid(g, n, n, dtype.is_complex)[:, dead] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(("n", "p", "k"), [(6, 6, 6), (9, 5, 3), (7, 1, 1)])
def test_operators_are_as_they_are_traced(n, p, k, dtype):
    operators, wide = torch.ops.stiefelkit, working_dtype(dtype)
    v = torch.randn(2, trapezoid_size(n, k, dtype.is_complex))
    d, w, rows = torch.ones(2, p, dtype=wide), torch.randn(2, n, p, dtype=dtype), torch.randn(2, 5, n, dtype=dtype)
    _, *kept = operators.form_panel(v, d, n, k, p, wide, dtype)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (operators.form_panel, (v, d, n, k, p, wide, dtype)),
        (operators.form_panel_gradient, (*kept, d.to(dtype), w, v.shape[-1])),
        (operators.form_columns, (v, d, n, k, p, wide, 2)),
        (operators.form_columns_gradient, (v, d.to(dtype), w, w, n, k, 2)),
        (operators.reflect_rows, (v, rows, k, wide, 2)),
        (operators.reflect_rows_gradient, (v, rows, rows, k, 2)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_linear_has_the_gradients_of_the_product_with_w(dtype):
    n, k, p = 180, 130, 150
    v, diagonal, d = drawn((n, p), k, dtype)
    x = torch.randn(7, p, dtype=dtype, requires_grad=True)
    y, expected = householder_linear(x, v, n, k, **diagonal), x.to(d.dtype) @ plain(v, n, k, p, dtype, d).mT
    g = torch.randn_like(y)
    ours, exact = torch.autograd.grad(y, (x, v), g), torch.autograd.grad(expected, (x, v), g.to(expected.dtype))
    for a, b in zip(ours, exact, strict=True):
        assert (a - b).norm() <= (1e-5 if dtype == torch.float32 else 1e-13) * b.norm()


@pytest.mark.parametrize("fill", ["random", "equal", "nearly equal", "decaying"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 64), (256, 256), (512, 16)])
def test_fast_frames_keep_their_bound(n, k, fill):
    layer = Householder((n, k), dtype=torch.float32, precision="fast")
    assert not layer.traits.exact
    u = {
        "random": torch.randn(n, k),
        "equal": torch.ones(n, k),
        "nearly equal": torch.randn(n, 1) + 1e-3 * torch.randn(n, k),
        "decaying": torch.randn(n, k) * torch.logspace(0, -6, n)[:, None],
    }[fill]
    v = pack_trapezoid(u.tril())
    error = orthogonality_error(layer(v)).item()
    assert error <= layer.error_bound(v)
    if fill == "random":
        assert error <= 30 * rounding_limit(k, torch.float32) + torch.finfo(torch.float32).eps


def test_fast_is_exact_in_float64():
    fast, exact = (Householder((9, 9), dtype=torch.float64, precision=each) for each in ("fast", "exact"))
    v = torch.randn(fast.coordinates["reflectors"], dtype=torch.float64)
    assert torch.equal(fast(v), exact(v))
    assert fast.error_bound(v) == permitted_error(9, torch.float64)


TRUNCATED = [((6, 6), 1), ((8, 8), 3), ((9, 5), 2), ((2, 7, 4), 3), ((72, 12), 2), ((100, 100), 40)]


def inside(map, number=0):
    coordinates, chart = map.initial("haar", seeds.generator(number))
    load_chart_(map, chart)
    with torch.no_grad():
        return map(*rounded(map, coordinates))


@pytest.mark.parametrize(("shape", "k"), TRUNCATED)
@pytest.mark.parametrize("off", [1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_a_truncated_product_takes_comes_back(dtype, off, shape, k):
    map = Householder(shape, dtype=dtype, reflections=k)
    for number in range(4):
        w = inside(map, number).to(working_dtype(dtype))
        a = torch.randn(*w.shape[:-2], w.shape[-2], w.shape[-2], dtype=w.dtype, generator=seeds.generator(number + 9))
        # A turn by `off` out of the image.
        a = off * (a - a.mT) / torch.linalg.matrix_norm(a - a.mT)[..., None, None]
        w = (torch.linalg.matrix_exp(a) @ w).to(dtype)
        try:
            found = map.right_inverse(w)
        except errors.ImageError:
            assert off > 0 or dtype != torch.float64
            continue
        with torch.no_grad():
            back = map(*found)
        gap = torch.linalg.matrix_norm(back.double() - w.double())
        w = w.double()
        defect = torch.linalg.matrix_norm(w.mT @ w - torch.eye(shape[-1], dtype=torch.float64))
        assert (gap <= permitted_return(map.shape, map.dtype) + defect).all()


@pytest.mark.parametrize(("shape", "k"), TRUNCATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128], ids=str)
def test_what_is_outside_of_truncated_products_is_refused(dtype, shape, k):
    map = Householder(shape, dtype=dtype, reflections=k)
    w = init.haar(shape, working_dtype(dtype), seeds.generator(3)).to(dtype)
    with pytest.raises(errors.ImageError, match="reflections="):
        map.right_inverse(w)
