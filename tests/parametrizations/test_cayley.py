"""The Cayley transform against closed forms and the papers' theorems."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.functional import cayley, cayley_inverse, pack_skew, skew_size, spread_band, unpack_skew
from stiefelkit.functional._cayley.quotient import inverse_of_accretive
from stiefelkit.functional._cayley.transform import _eliminate
from stiefelkit.metrics import orthogonality_error, permitted_error, permitted_return
from stiefelkit.testing import seeds

Cayley = sk.parametrizations.Cayley


def full_skew(v, n, p, is_complex):
    """The n x n skew matrix whose transform's first p columns are the frame."""
    a11, a21 = unpack_skew(v, n, p, is_complex)
    return torch.cat([torch.cat([a11, -a21.mH], dim=1), torch.cat([a21, a21.new_zeros(n - p, n - p)], dim=1)])


@pytest.mark.slow
@settings(max_examples=40)
@given(n=st.integers(1, 12), short=st.integers(0, 11), seed=st.integers(0, 99), is_complex=st.booleans())
def test_the_p_by_p_form_is_the_n_by_n_transform(n, short, seed, is_complex):
    p = max(1, n - short)
    seeds.reseed(seed)
    v = torch.randn(skew_size(n, p, is_complex), dtype=torch.float64)
    phase = torch.randn(p, dtype=torch.float64) if is_complex else None
    d = torch.ones(p, dtype=torch.float64) if phase is None else torch.exp(1j * phase)
    a = full_skew(v, n, p, is_complex)
    eye = torch.eye(n, dtype=a.dtype)
    expected = torch.linalg.solve(eye + a, eye - a)[:, :p] * d
    assert torch.allclose(cayley(v, n, p, phase=phase), expected, atol=1e-12)


def test_real_gradient_is_theorem_3_2_of_helfrich():
    # A = P - P^T with tied entries: dL/dA = V^T - V, V = (I + A)^-T G (D + W^T), in units of papers on full matrices.
    n, rho = 9, 4
    param = Cayley((n, n), dtype=torch.float64, negative=rho)
    v = torch.randn(skew_size(n, n, False), dtype=torch.float64, requires_grad=True)
    g = torch.randn(n, n, dtype=torch.float64)
    w = param(v)
    (ours,) = torch.autograd.grad(w, v, g)
    a, _ = unpack_skew(v.detach(), n, n, False)
    d = torch.diag(param.signs.double())
    theirs = torch.linalg.solve((torch.eye(n, dtype=torch.float64) + a).mT, g) @ (d + w.detach().mT)
    assert torch.allclose(ours, pack_skew(theirs.mT - theirs, a[:0]), atol=1e-13)


def test_complex_gradient_is_theorem_2_of_maduranga():
    # G = dL/dW is their unconjugated Wirtinger derivative, conj(torch's) / 2; DFA = C^T - conj(C).
    n = 7
    param = Cayley((n, n), dtype=torch.complex128)
    v = torch.randn(n * n, dtype=torch.float64, requires_grad=True)
    theta = torch.randn(n, dtype=torch.float64, requires_grad=True)
    g = torch.randn(n, n, dtype=torch.complex128)
    w = param(v, theta)
    table, phase = torch.autograd.grad(w, (v, theta), g)
    a, _ = unpack_skew(v.detach(), n, n, True)
    eye, d = torch.eye(n, dtype=torch.complex128), torch.exp(1j * theta.detach())
    wirtinger = g.conj() / 2
    c = torch.linalg.solve((eye + a).mT, wirtinger) @ (torch.diag(d) + w.detach().mT)
    dfa = c.mT - c.conj()
    expected = (2 * dfa.real).tril(-1) + (2 * dfa.imag).triu(1) + torch.diag(dfa.imag.diagonal())
    assert torch.allclose(table.view(n, n), expected, atol=1e-13)
    k = torch.linalg.solve(eye + a, eye - a)
    assert torch.allclose(phase, 2 * (1j * (wirtinger.mT @ k).diagonal() * d).real, atol=1e-13)


def frames_to_invert(dtype):
    """Frames of many kinds by name: those that elimination alone leaves above 1, and those whose pivots are 0."""
    generator = seeds.generator(1)

    def haar(*shape):
        return sk.init.haar(shape, dtype=dtype, generator=generator)

    def permutation(n):
        return torch.eye(n, dtype=dtype)[torch.randperm(n, generator=generator)] * torch.sgn(haar(n, 1)).mT

    def reflection(n):
        u = haar(n, 1)
        return torch.eye(n, dtype=dtype) - 2 * u @ u.mH

    frames = {f"haar {n}": haar(n, n) for n in (1, 2, 3, 5, 16, 33, 64, 128)}
    frames |= {f"tall {n} {p}": haar(n, p) for n, p in ((5, 1), (8, 2), (40, 12), (33, 32), (64, 63), (128, 64))}
    frames |= {f"reflection {n}": reflection(n) for n in (4, 9, 32)}
    frames |= {f"permutation {n}": permutation(n) for n in (2, 9, 32)} | {"cycle": torch.eye(6, dtype=dtype).roll(1, 0)}
    frames |= {
        "sum": permutation(32) @ torch.block_diag(*haar(8, 4, 4)) @ permutation(32),
        "minus": -haar(3, 3) @ haar(3, 3),
        "hadamard": sk.init.hadamard(64, random=False, dtype=dtype),
    }
    if dtype.is_complex:
        t = torch.pi + 1e-3 * torch.randn(24, dtype=torch.float64, generator=generator)
        v = haar(24, 24)
        for n in (3, 16, 64):
            k = torch.arange(n, dtype=torch.float64)
            frames[f"dft {n}"] = torch.exp(-2j * torch.pi / n * (k[:, None] * k % n)) / n**0.5
        frames["dft 64, tall"] = frames["dft 64"][:, :63]
        frames["dft 64, turned"] = permutation(64) @ frames["dft 64"] @ permutation(64)
        frames["near -I"] = (v * torch.exp(1j * t)) @ v.mH
    return frames


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_every_entry_of_a_is_at_most_one_for_the_chosen_d(dtype):
    alone = 0.0
    for name, q in frames_to_invert(dtype).items():
        n, p = q.shape
        v, d = cayley_inverse(q)
        a11, a21 = unpack_skew(v, n, p, dtype.is_complex)
        assert a11.abs().max() <= 1 + 2e-6, name
        assert torch.linalg.vector_norm(a21, dim=0).max() <= 1 + 2e-6, name
        back = cayley(v, n, p, phase=d.angle()) if dtype.is_complex else cayley(v, n, p, signs=d)
        assert torch.linalg.matrix_norm(back - q) <= permitted_return(q.shape, dtype), name
        left = cayley_inverse(q, _eliminate(q[None])[0])[0]
        alone = max(alone, unpack_skew(left, n, p, dtype.is_complex)[0].abs().max().item())
    assert alone > 1.3  # else elimination alone would do


def test_one_is_the_least_bound():
    swap = torch.eye(2, dtype=torch.complex128).flip(0)
    for angle in torch.linspace(-3, 3, 24, dtype=torch.float64):
        v, _ = cayley_inverse(swap, torch.exp(1j * torch.stack([angle, 0 * angle])))
        assert unpack_skew(v, 2, 2, True)[0][0, 1].abs() >= 1 - 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_chosen_d_is_that_of_the_frame_alone(dtype):
    by_shape = {}
    for q in frames_to_invert(dtype).values():
        by_shape.setdefault(q.shape, []).append(q)
    for shape, frames in by_shape.items():
        frames = torch.stack([*frames, *sk.init.haar((5, *shape), dtype=dtype, generator=seeds.generator(2))])
        d = torch.stack([cayley_inverse(q)[1] for q in frames])
        assert torch.allclose(cayley_inverse(frames)[1], d, atol=1e-9)
        assert torch.allclose(cayley_inverse(frames.flip(0))[1].flip(0), d, atol=1e-9)
        noise = 1 + 1e-15 * torch.randn(frames.shape, dtype=torch.float64)
        assert torch.allclose(cayley_inverse(frames * noise)[1], d, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(("n", "p"), [(1, 1), (3, 1), (64, 64), (64, 8), (255, 255), (1024, 64), (1024, 1024)])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_frames_are_exact_at_every_size(n, p, dtype, scale):
    param = Cayley((n, p), dtype=dtype)
    w = param(*(scale * torch.randn(shape) for shape in param.coordinates.values()))
    assert orthogonality_error(w).item() <= min(permitted_error(p, dtype), 1.2 * 3.6e-8 * p**0.5 + 1.2e-7)


def test_fixed_signs_fix_the_determinant_for_good():
    layer = sk.orthogonal(torch.nn.Linear(6, 6), "weight", "cayley", negative=3)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.5)
    for _ in range(20):
        layer.weight.trace().backward()
        optimizer.step()
    assert torch.linalg.det(layer.weight).item() == pytest.approx(-1, abs=1e-5)


def test_negative_takes_a_count_or_signs():
    signs = Cayley((3, 3), dtype=torch.float32, negative=2).signs
    assert torch.equal(signs, Cayley((3, 3), dtype=torch.float32, negative=[1, -1, -1]).signs)
    with pytest.raises(sk.errors.OptionError, match="negative"):
        Cayley((3, 3), dtype=torch.float32, negative=4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_an_arc_spreads_the_eigenvalues_of_helfrich_as_far(dtype):
    whole = Cayley((400, 400), dtype=dtype, arc=2 * torch.pi)
    skew = whole.initial("helfrich", seeds.generator(1))[0][0]
    quarter = Cayley((400, 400), dtype=dtype).initial("helfrich", seeds.generator(1))[0][0]
    assert torch.allclose(4 * quarter.atan(), skew.atan() % torch.pi)  # tan(t/2), t four times as large
    layer = sk.orthogonal(torch.nn.Linear(9, 9), "weight", "cayley", init="helfrich", negative=2, arc=0.01)
    assert torch.linalg.norm(layer.weight - torch.diag(torch.tensor([1.0] * 7 + [-1.0] * 2))) < 0.05
    with pytest.raises(errors.OptionError, match="arc"):
        Cayley((4, 4), arc=7.0)


def test_the_index_cache_survives_inference_mode():
    with torch.inference_mode():
        Cayley((23, 23), dtype=torch.float32)(torch.zeros(253))
    v = torch.zeros(253, requires_grad=True)
    Cayley((23, 23), dtype=torch.float32)(v).sum().backward()
    assert v.grad is not None
    assert torch.isfinite(v.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("n", [63, 131, 256])
def test_single_precision_gradients_are_those_of_double(n, precision, dtype):
    double = torch.promote_types(dtype, torch.float64)
    map, twin = Cayley((n, n), dtype=dtype, precision=precision), Cayley((n, n), dtype=double)
    phase = () if dtype == torch.float32 else (torch.rand(n),)
    g = torch.randn(n, n, dtype=dtype)
    for scale, tolerance in ((n**-0.5, 1e-5), (1.0, 1e-5), (100.0, 1e-5), (1e4, 1e-3)):
        v = (torch.randn(map.coordinates["skew"]) * scale).requires_grad_()
        exact = v.detach().double().requires_grad_()
        (ours,) = torch.autograd.grad(map(v, *phase), v, g)
        (theirs,) = torch.autograd.grad(twin(exact, *phase), exact, g.to(double))
        assert torch.dist(ours.double(), theirs) <= tolerance * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("size", [0.1, 1.0, 1e2, 1e4])
def test_the_block_inverse_is_the_inverse(dtype, size):
    a = torch.randn(2, 150, 150, dtype=dtype) * size
    m = torch.eye(150, dtype=dtype) + a - a.mH
    exact = torch.linalg.inv(m.to(torch.promote_types(dtype, torch.float64)))
    bound = 1e-5 if dtype in (torch.float32, torch.complex64) else 1e-9
    assert torch.dist(inverse_of_accretive(m).to(exact.dtype), exact) <= bound * exact.norm()


def test_fast_frames_keep_their_bound():
    for n in (128, 201, 400):
        map = Cayley((n, n), dtype=torch.float32, precision="fast")
        for scale in (1e-3, 0.05, 0.3, 10.0, 1e4):
            v = torch.randn(map.coordinates["skew"]) * scale
            assert orthogonality_error(map(v)).item() <= map.error_bound(v)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(("n", "p", "bandwidth"), [(7, 7, 2), (6, 6, 5), (6, 3, 1)])
def test_a_bandwidth_keeps_a_band_of_a(n, p, bandwidth, dtype):
    map = Cayley((n, p), dtype=dtype, bandwidth=bandwidth)
    v = torch.randn(map.coordinates["skew"], dtype=torch.float64)
    a11, a21 = unpack_skew(spread_band(v, n, p, dtype.is_complex, bandwidth), n, p, dtype.is_complex)
    a = torch.cat([a11, a21])
    far = (torch.arange(n)[:, None] - torch.arange(p)).abs() > bandwidth
    assert (a[far] == 0).all()
    assert (a.real.tril(-1)[~far & (torch.arange(n)[:, None] > torch.arange(p))] != 0).all()
    phase = (torch.rand(p, dtype=torch.float64),) if dtype.is_complex else ()
    whole = Cayley((n, p), dtype=dtype)
    assert torch.equal(map(v, *phase), whole(spread_band(v, n, p, dtype.is_complex, bandwidth), *phase))


def test_a_band_has_its_own_count_and_refuses_other_frames():
    layer = sk.orthogonal(torch.nn.Linear(20, 20), "weight", "cayley", bandwidth=3)
    assert sk.coordinates(layer, "weight")["skew"].numel() == 3 * 20 - 3 * 4 // 2
    with pytest.raises(errors.ImageError, match="bandwidth=3"):
        layer.weight = sk.init.haar((20, 20)).float()
    with pytest.raises(errors.OptionError, match="bandwidth"):
        sk.orthogonal(torch.nn.Linear(20, 20), "weight", "cayley", bandwidth=20)
    other = sk.orthogonal(torch.nn.Linear(20, 20), "weight", "cayley", bandwidth=4)
    with pytest.raises(errors.CheckpointError, match="bandwidth"):
        other.load_state_dict(layer.state_dict())


def test_a_bounded_map_has_second_derivatives_where_it_starts():
    map = sk.parametrizations.Cayley((4, 4), dtype=torch.float64, bound=0.5)
    g = torch.randn(4, 4, dtype=torch.float64, generator=seeds.generator())
    for start in (torch.zeros(6, dtype=torch.float64), torch.full((6,), 0.01, dtype=torch.float64)):
        h = torch.autograd.functional.hessian(lambda s: (map(s) * g).sum(), start)
        plain = sk.parametrizations.Cayley((4, 4), dtype=torch.float64)
        expected = torch.autograd.functional.hessian(lambda s, plain=plain: (plain(s) * g).sum(), start)
        assert torch.dist(torch.as_tensor(h), torch.as_tensor(expected)) < 1e-12


@pytest.mark.parametrize("map", [sk.functional.cayley, sk.functional.matrix_exp])
@pytest.mark.parametrize("p", [256, 130])
def test_large_matrices_have_transforms_and_second_derivatives_as_small_ones(map, p):
    size = sk.functional.skew_size(256, p, False)
    v = 0.01 * torch.randn(size, dtype=torch.float64, generator=seeds.generator())
    more = [] if map is sk.functional.cayley else [False]

    def loss(v):
        return map(v, 256, p, *more).pow(3).sum()

    plain = v.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(plain), plain, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), plain)
    assert h.isfinite().all()
    assert torch.dist(torch.func.grad(loss)(v), g) <= 1e-12 * g.norm()
    two = torch.stack([v, v]).requires_grad_()
    torch.vmap(loss)(two).sum().backward()
    assert two.grad is not None
    assert torch.dist(two.grad[1], g) <= 1e-12 * g.norm()
