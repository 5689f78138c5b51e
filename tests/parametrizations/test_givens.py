"""Rotation meshes against the plain product of rotations, the papers' counts and the Haar measure."""

import math

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.contract.param import load_chart_
from stiefelkit.functional import (
    brickwall,
    brickwall_inverse,
    butterfly,
    butterfly_inverse,
    mesh_size,
    rotate_butterfly,
)
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing import seeds
from stiefelkit.testing.cases import Case, special_frames

Givens = sk.parametrizations.Givens
FIELDS = [torch.float64, torch.complex128]


def rotation(n, q, r, t, f):
    """The rotation of the rows q, r, phase on its second input."""
    w = torch.eye(n, dtype=torch.complex128)
    c, s, e = math.cos(t), math.sin(t), complex(math.cos(f), math.sin(f))
    w[[q, q, r, r], [q, r, q, r]] = torch.tensor([c, -e * s, s, e * c], dtype=torch.complex128)
    return w


def brick_pairs(n, layers):
    return [(q, q + 1) for layer in range(layers) for q in range(layer % 2, n - 1, 2)]


def fourier_pairs(n):
    """The pairs (2 d b + r, 2 d b + r + d) of EURNN, b fastest."""
    distances = [n >> i for i in range(1, n.bit_length())]
    return [(2 * d * b + r, 2 * d * b + r + d) for d in distances for r in range(d) for b in range(n // (2 * d))]


def mesh(n, pairs, angle, phase):
    w = torch.eye(n, dtype=torch.complex128)
    for (q, r), t, f in zip(pairs, angle.tolist(), phase.tolist(), strict=True):
        w = rotation(n, q, r, t, f) @ w
    return w


def drawn(size, dtype):
    angle = torch.randn(size, dtype=torch.float64)
    return angle, torch.randn(size, dtype=torch.float64) if dtype.is_complex else None


def layer_by_layer(x, angle, phase, layers):
    """The brick wall by autograd, a few operations a layer."""
    n, start = x.shape[-2], 0
    for layer in range(layers):
        a, pairs = layer % 2, (n - layer % 2) // 2
        own = slice(start, start + pairs)
        start += pairs
        c, s = angle[..., own, None].cos(), angle[..., own, None].sin()
        p, q = x[..., a : a + 2 * pairs : 2, :], x[..., a + 1 : a + 2 * pairs : 2, :]
        q = q if phase is None else q * torch.exp(1j * phase[..., own, None])
        turned = torch.stack([c * p - s * q, s * p + c * q], dim=-2).flatten(-3, -2)
        x = torch.cat([x[..., :a, :], turned, x[..., a + 2 * pairs :, :]], dim=-2)
    return x


@pytest.mark.parametrize("dtype", FIELDS)
@pytest.mark.parametrize(("n", "layers"), [(1, 1), (2, 5), (6, 6), (7, 4), (9, 14), (33, 33)])
def test_a_brick_wall_is_the_product_of_its_rotations(n, layers, dtype):
    pairs = brick_pairs(n, layers)
    assert len(pairs) == mesh_size(n, layers)
    angle, phase = drawn(len(pairs), dtype)
    expected = mesh(n, pairs, angle, torch.zeros_like(angle) if phase is None else phase)
    w = brickwall(torch.eye(n, dtype=dtype), angle, phase, layers=layers)
    assert torch.allclose(w.to(expected.dtype), expected, atol=1e-13)


@pytest.mark.parametrize("dtype", FIELDS)
@pytest.mark.parametrize("n", [1, 2, 8, 32])
def test_the_fourier_mesh_is_the_product_of_its_rotations(n, dtype):
    pairs = fourier_pairs(n)
    angle, phase = drawn(len(pairs), dtype)
    expected = mesh(n, pairs, angle, torch.zeros_like(angle) if phase is None else phase)
    w = butterfly(angle, torch.ones(n), phase, n=n)
    assert torch.allclose(w.to(expected.dtype), expected, atol=1e-13)
    x = torch.randn(3, n, dtype=dtype)
    assert torch.allclose(rotate_butterfly(x, angle, phase), x @ w.mT, atol=1e-13)


def test_the_phase_is_on_the_second_input_and_the_diagonal_comes_last():
    map = Givens((2, 2), dtype=torch.complex128)
    t, f, w1, w2 = 0.3, 0.5, 0.7, 1.1
    w = map(torch.tensor([t], dtype=torch.float64), torch.tensor([f, w1, w2], dtype=torch.float64))
    expected = torch.diag(torch.exp(1j * torch.tensor([w1, w2], dtype=torch.float64))) @ rotation(2, 0, 1, t, f)
    assert torch.allclose(w, expected, atol=1e-15)


@pytest.mark.parametrize("dtype", FIELDS)
@pytest.mark.parametrize(
    ("n", "layers", "p", "batch"), [(40, 40, 40, (6,)), (40, 40, 7, ()), (65, 20, 3, (2, 1)), (64, 5, 64, ())]
)
def test_gradients_are_those_of_autograd_layer_by_layer(n, layers, p, batch, dtype):
    angle = torch.randn(*batch, mesh_size(n, layers), dtype=torch.float64, requires_grad=True)
    phase = torch.randn_like(angle).requires_grad_() if dtype.is_complex else None
    x = torch.randn(*batch, n, p, dtype=dtype, requires_grad=True)
    leaves = [x, angle] if phase is None else [x, angle, phase]
    y, expected = brickwall(x, angle, phase, layers=layers), layer_by_layer(x, angle, phase, layers)
    assert torch.allclose(y, expected, atol=1e-12)
    g = torch.randn_like(y)
    for ours, theirs in zip(torch.autograd.grad(y, leaves, g), torch.autograd.grad(expected, leaves, g), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-11)


def test_second_derivatives_are_right_where_sines_are_zero():
    # Entries below eps^2 are put to zero, but what they would become is not.
    angle = torch.zeros(mesh_size(16, 16), dtype=torch.float64, requires_grad=True)

    def first(angle):
        w = brickwall(torch.eye(16, dtype=torch.float64), angle, layers=16)
        weights = torch.arange(256, dtype=torch.float64).view(16, 16).cos()
        return torch.autograd.grad((w * weights).sum(), angle, create_graph=True)[0]

    along = torch.randn(len(angle), dtype=torch.float64, generator=seeds.generator())
    (ours,) = torch.autograd.grad(first(angle) @ along, angle)
    step = 1e-6
    difference = (first(angle + step * along) - first(angle - step * along)) / (2 * step)
    assert torch.allclose(ours, difference.detach(), atol=1e-6)


def test_the_counts_are_the_papers():
    # Jing et al. 2017, n = 512: tunable with L = 2 and Fourier, each with its diagonal; n^2 and n(n - 1)/2 at L = n.
    def count(shape, dtype, **options):
        return sum(math.prod(size) for size in Givens(shape, dtype=dtype, **options).coordinates.values())

    assert count((512, 512), torch.complex64, layers=2) == 1534
    assert count((512, 512), torch.complex64, layout="fft") == 5120
    assert count((64, 64), torch.complex64) == 64**2
    assert count((64, 64), torch.float32, layers=6) == 3 * 63
    for n in (6, 7):
        assert count((n, n), torch.float32) == n * (n - 1) // 2
        assert count((n, n), torch.complex64) == n * n


@pytest.mark.parametrize("dtype", FIELDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 12, 31])
def test_any_matrix_is_a_brick_wall_times_a_diagonal(n, dtype):
    for name, w in special_frames(Case(Givens, (n, n), dtype)):
        angle, phase, d = brickwall_inverse(w)
        back = d.unsqueeze(-1) * brickwall(torch.eye(n, dtype=dtype), angle, phase, layers=n)
        assert torch.linalg.matrix_norm(back - w) <= 1e-14 * n, name


@pytest.mark.parametrize("dtype", FIELDS)
@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_a_fourier_mesh_is_read_off_its_matrix(n, dtype):
    w = torch.eye(n, dtype=dtype)
    for options in (torch.zeros, torch.randn, torch.ones):
        angle = options(n // 2 * (n.bit_length() - 1), dtype=torch.float64) * math.pi / 2
        w = butterfly(angle, torch.ones(n), angle if dtype.is_complex else None, n=n)
        back, phase, d = butterfly_inverse(w)
        assert (phase is not None) == dtype.is_complex
        assert torch.allclose(butterfly(back, d, phase, n=n), w, atol=1e-13)


@pytest.mark.parametrize("options", [{"layers": 2}, {"layout": "fft"}])
def test_fewer_rotations_refuse_a_frame_outside_their_image(options):
    layer = sk.orthogonal(torch.nn.Linear(8, 8), "weight", "givens", **options)
    with pytest.raises(errors.ImageError, match=r"layers=8|brickwall"):
        layer.weight = sk.init.haar((8, 8)).float()
    for scheme in ("identity", "henaff", "unit_circle"):
        w = sk.init.draw(scheme, (8, 8)).float()
        layer.weight = w
        assert torch.allclose(layer.weight, w, atol=1e-6)


@pytest.mark.parametrize(("n", "layers"), [(4, None), (5, None), (3, 6)])  # the last beyond full capacity
@pytest.mark.parametrize("dtype", FIELDS)
def test_haar_angles_make_haar_matrices(n, layers, dtype):
    count = 20_000
    map = Givens((count, n, n), dtype=dtype, layers=layers)
    coordinates, chart = map.initial("haar", seeds.generator())
    load_chart_(map, chart)
    w = map(*coordinates)
    # E|w_ij|^4 is 3 / (n (n + 2)) in O(n), 2 / (n (n + 1)) in U(n); E|tr W^k|^2 = k in U(n), k + [k even] in O(n).
    fourth = 2 / (n * (n + 1)) if dtype.is_complex else 3 / (n * (n + 2))
    assert torch.allclose(w.abs().pow(4).mean(0), torch.tensor(fourth, dtype=torch.float64), rtol=0.06)
    for k in (1, 2, 3):
        trace = torch.linalg.matrix_power(w, k).diagonal(dim1=-2, dim2=-1).sum(-1)
        expected = k if dtype.is_complex or k % 2 else k + 1
        assert abs(trace.abs().square().mean().item() - expected) <= 0.06 * expected
        assert abs(trace.mean().item() - (0 if dtype.is_complex or k % 2 else 1)) <= 0.05


def test_uniform_angles_are_eurnns():
    map = Givens((32, 32), dtype=torch.complex64)
    (angle, phase), _ = map.initial("uniform", seeds.generator())
    for drawn in (angle, phase):
        assert drawn.abs().max() <= math.pi
        assert abs(drawn.var().item() - math.pi**2 / 3) <= 0.5


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_memory_does_not_grow_with_the_layers(dtype, precision):
    n = 64
    sizes = []
    for layers in (n, 4 * n):
        map = Givens((n, n), dtype=dtype, layers=layers, precision=precision)
        coordinates, _ = map.initial("uniform", seeds.generator())
        leaves = [c.float().requires_grad_() for c in coordinates]
        saved = {}

        def keep(t, saved=saved):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            w = map(*leaves)
        assert w.requires_grad
        own = sum(c.numel() * c.element_size() for c in leaves)
        sizes.append(sum(saved.values()) - own)
    assert max(sizes) <= 2 * n * n * torch.empty(0, dtype=dtype).element_size()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("fill", [0.3, math.pi / 4, 1e4])
def test_aligned_rounding_errors_stay_within_bounds(fill, dtype):
    # Equal angles make the rounding errors of all rotations equal.
    for precision in ("exact", "fast"):
        map = Givens((96, 96), dtype=dtype, precision=precision)
        coordinates = [torch.full(size, fill) for size in map.coordinates.values()]
        w = map(*coordinates)
        bound = map.error_bound(*coordinates)
        assert orthogonality_error(w) <= bound
        assert precision == "fast" or bound == permitted_error(96, dtype)


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("options", [{"layers": 2}, {"layers": 20}, {}, {"layout": "fft"}])
def test_linear_agrees_whichever_road_it_takes(options, precision):
    map = Givens((64, 50), dtype=torch.float32, precision=precision, **options)
    (angle,), chart = map.initial("uniform", seeds.generator())
    load_chart_(map, chart)
    angle = angle.float().requires_grad_()
    for rows in (1, 8, 500):
        x = torch.randn(rows, 50, requires_grad=True)
        y, expected = map.linear(x, angle), x @ map(angle).mT
        tolerance = 1e-6 if precision == "exact" else 1e-5
        assert torch.linalg.vector_norm(y - expected) <= tolerance * torch.linalg.vector_norm(expected)
        g = torch.randn_like(y)
        ours, theirs = torch.autograd.grad(y, (angle, x), g), torch.autograd.grad(expected, (angle, x), g)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.linalg.vector_norm(a - b) <= 10 * tolerance * torch.linalg.vector_norm(b)


def test_unfit_layouts_are_refused():
    with pytest.raises(errors.OptionError, match="layout"):
        Givens((4, 4), layout="ring")
    with pytest.raises(errors.ShapeError, match="power of two"):
        Givens((6, 6), layout="fft")
    with pytest.raises(errors.OptionError, match="brickwall"):
        Givens((4, 4), layout="fft", layers=2)
