"""Small maps and steps in one launch: in triton's interpreter against float64, and compiled, without a GPU."""

import pytest
import torch
from compiled_programs import built, is_without_spills, machinery

import stiefelkit as sk
from stiefelkit.functional import cayley, matrix_exp, skew_size
from stiefelkit.functional._kernels import launch
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing import check_parametrization, seeds

triton = pytest.importorskip("triton")

EDGES = [1, 2, 16, 17, 32, 33, 64, 65, 128, 129]
"""Sizes that fill 16, 32, 64 or 128 rows, that leave most of them, and one that takes many launches."""
BATCHES = {2: 5, 16: 3}
"""Others take one matrix: the interpreter is slow."""


def random(*shape, number=0, dtype=torch.float32):
    return seeds.normal(shape, number, dtype)


def drawn(n, is_complex, scale):
    """Coordinates and phases of some frames, and the gradient by them."""
    batch = BATCHES.get(n, 1)
    v = random(batch, skew_size(n, n, is_complex)) * scale
    phase = random(batch, n, number=1) if is_complex else None
    return v, phase, random(batch, n, n, number=2, dtype=torch.complex64 if is_complex else torch.float32)


def exponential(v, n, p, phase=None):
    return matrix_exp(v if phase is None else v + 0 * phase.sum(), n, p, phase is not None)


of_both_maps = pytest.mark.parametrize("map", [cayley, exponential], ids=["cayley", "matrix_exp"])


@pytest.mark.slow
@of_both_maps
@pytest.mark.parametrize(("n", "is_complex"), [(n, False) for n in EDGES] + [(n, True) for n in (1, 2, 17, 33, 64)])
@pytest.mark.usefixtures("_as_on_a_device")
def test_frames_and_gradients_are_those_of_float64(map, n, is_complex):
    for scale in (1.0, 1e4) if n in (2, 17) else (1.0,):
        v, phase, g = drawn(n, is_complex, scale)
        leaves = [v.requires_grad_()] + ([] if phase is None else [phase.requires_grad_()])
        w = map(v, n, n, phase=phase)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        exact = map(wide[0], n, n, phase=wide[1] if is_complex else None)
        assert w.dtype == g.dtype
        assert orthogonality_error(w).max() <= permitted_error(n, w.dtype)
        assert torch.allclose(w, exact.to(w.dtype), rtol=0, atol=2 * torch.finfo(w.dtype).eps)
        ours = torch.autograd.grad(w, leaves, g)
        for a, b in zip(ours, torch.autograd.grad(exact, wide, g.to(exact.dtype)), strict=True):
            assert torch.dist(a.double(), b) <= 1e-5 * b.norm()


@pytest.mark.parametrize(("n", "p"), [(2, 1), (5, 3), (64, 1)])
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.usefixtures("_as_on_a_device")
def test_tall_frames_are_columns_of_square_ones(n, p, is_complex):
    n = min(n, 32) if is_complex else n
    v = (100 * random(2, skew_size(n, p, is_complex))).requires_grad_()
    other = random(2, p, number=1)
    signs, phase = (None, other) if is_complex else (other.sign(), None)
    w, exact = (cayley(c, n, p, signs=signs, phase=phase) for c in (v, v.double()))
    assert torch.allclose(w, exact.to(w.dtype), rtol=0, atol=2 * torch.finfo(w.dtype).eps)
    ours, theirs = (torch.autograd.grad(f, v, torch.ones_like(f))[0] for f in (w, exact))
    assert torch.dist(ours, theirs) <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("cls", [sk.parametrizations.Cayley, sk.parametrizations.MatrixExp])
@pytest.mark.usefixtures("_as_on_a_device")
def test_the_laws_hold(cls):
    check_parametrization(cls, ["frames", "pure", "gradients"], only=f"{cls.__name__}-2x2-float32")


@of_both_maps
@pytest.mark.usefixtures("_as_on_a_device")
def test_second_derivatives_and_vmap_are_those_of_many_launches(map):
    v = random(3, skew_size(5, 5, False))

    def loss(v):
        return (map(v, 5, 5)[..., 0, :] ** 3).sum()

    found = [torch.func.hessian(loss)(v[0]), torch.vmap(torch.func.grad(loss))(v)]
    launch.Interpreter.is_on = False
    expected = [torch.func.hessian(loss)(v[0]), torch.vmap(torch.func.grad(loss))(v)]
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@of_both_maps
@pytest.mark.usefixtures("_as_on_a_device")
def test_larger_matrices_keep_nan_and_second_derivatives(map):
    v = (random(skew_size(130, 130, False)) / 10).requires_grad_()
    found = []
    for launch.Interpreter.is_on in (False, True):
        (g,) = torch.autograd.grad((map(v, 130, 130)[:9] ** 3).sum(), v, create_graph=True)
        found.append(torch.autograd.grad((g * v.detach()).sum(), v)[0])
    assert torch.dist(*found) <= 1e-4 * found[0].norm()
    assert map(torch.where(torch.arange(len(v)) == 4, torch.nan, v), 130, 130).isnan().any()


@of_both_maps
@pytest.mark.usefixtures("_as_on_a_device")
def test_nan_stays_where_it_is(map):
    v = random(3, skew_size(20, 20, False))
    v[1, 4] = float("nan")
    w = map(v, 20, 20)
    assert w[1].isnan().any()
    assert not w[[0, 2]].isnan().any()


def test_a_cpu_and_large_matrices_take_many_launches(monkeypatch):
    assert not launch.takes(torch.ones(2, 2), 2, 1)
    monkeypatch.setattr(launch.Interpreter, "is_on", True)
    assert launch.takes(torch.ones(2, 2), launch.LARGEST, 1)
    assert not launch.takes(torch.ones(2, 2), launch.LARGEST + 1, 1)
    assert not launch.takes(torch.ones(2, 2), launch.LARGEST // 2 + 1, 2)
    assert not launch.takes(torch.ones(0), 1, 1)
    assert not launch.takes(torch.ones(2, 2, device="meta"), 2, 1)


def compiled(name, n, parts, capability, is_double):
    """A program for a GPU that need not be there."""
    program = getattr(launch.programs(launch.PACKAGE, False), name)
    tile = launch.HALF_TILE if "exponential" in name else launch.TILE
    fixed = launch.settings(n, parts, is_double and capability < 120, tile)
    fixed = {"E": launch.ENTRIES, "num_warps": 4, "num_stages": 3, "maxnreg": 255} if "skew" in name else fixed
    options = {key: fixed.pop(key) for key in ("num_warps", "num_stages", "maxnreg")}
    frames = "*fp64" if is_double else "*fp32"
    types = {"d": "*fp64" if parts == 2 else "*i8"} | dict.fromkeys(("apart", "n", "batch"), "i32")
    types |= dict.fromkeys(("table", "scratch"), "*fp64")
    types |= {"a": "*fp64", "shift": "fp32", "scale": "fp32"}
    types |= {"run_forward": {"w": frames}, "run_backward": {"w": frames, "scratch": frames}}.get(name, {})
    return built(program, fixed, types, capability, **options)


SHARED = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program may have."""


@pytest.mark.usefixtures("_for_gpus")
@pytest.mark.parametrize(
    ("name", "n", "parts", "capability", "is_double"),
    [
        ("run_forward", 64, 1, 120, True),
        ("run_forward", 32, 1, 80, True),
        ("run_backward", 128, 1, 90, False),
        ("run_backward", 33, 2, 80, True),
        ("run_skew", 512, 1, 80, True),
        ("run_skew_back", 512, 1, 120, True),
        ("run_exponential", 64, 1, 120, True),
        ("run_exponential_back", 32, 1, 120, True),
        ("run_exponential_back", 128, 1, 80, True),
        ("run_exponential_back", 64, 2, 90, True),
    ],
)
def test_programs_compile_without_spills_to_exact_products(name, n, parts, capability, is_double, tmp_path):
    kernel = compiled(name, n, parts, capability, is_double)
    found = machinery(kernel, tmp_path)
    assert "tf32" not in kernel.asm["ptx"]
    assert found.shared <= SHARED[capability]
    assert is_without_spills(found)
