"""Maps whose rows or columns programs take one by one: in triton's interpreter against float64, and compiled."""

import pytest
import torch
from compiled_programs import built, is_exact, is_without_spills, machinery

import stiefelkit as sk
from benchmarks import launches
from stiefelkit.functional import hadamard_transform
from stiefelkit.functional._kernels import columns, launch
from stiefelkit.functional._kernels.launch import Interpreter
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing import seeds

pytest.importorskip("triton")

Givens, Hadamard, Householder = (getattr(sk.parametrizations, name) for name in ("Givens", "Hadamard", "Householder"))


@pytest.fixture
def counted(monkeypatch, _as_on_a_device):
    """Names of the programs that are started."""
    names, start = [], launch.start
    monkeypatch.setattr(columns, "start", lambda *args, **options: names.append(args[1]) or start(*args, **options))
    return names


def drawn(kind, shape, dtype, **options):
    """A map, coordinates, and a gradient by the frames."""
    param = kind(shape, dtype=dtype, **options)
    coordinates = [3 * seeds.normal(size, 1, torch.float32) for size in param.coordinates.values()]
    if not dtype.is_complex:
        param.signs.copy_(seeds.normal(param.signs.shape, 2, torch.float32).sign())
    return param, coordinates, seeds.normal(shape, 3, dtype)


CASES = [
    (Hadamard, (2, 2), torch.float32, {}),
    (Hadamard, (3, 8, 8), torch.float32, {}),
    (Hadamard, (3, 8, 8), torch.complex64, {}),
    (Householder, (1, 1), torch.float32, {}),
    (Householder, (3, 7, 7), torch.float32, {"precision": "fast"}),
    (Householder, (20, 17), torch.float32, {"reflections": 9}),
    (Householder, (3, 5, 5), torch.complex64, {}),
    (Givens, (3, 7, 7), torch.float32, {"precision": "fast"}),
    (Givens, (20, 17), torch.float32, {"layers": 9}),
    (Givens, (3, 6, 6), torch.complex64, {}),
]


@pytest.mark.parametrize(("kind", "shape", "dtype", "options"), CASES)
def test_frames_and_gradients_are_those_of_float64(kind, shape, dtype, options, counted):
    param, coordinates, g = drawn(kind, shape, dtype, **options)
    wide = kind(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64, **options)
    wide.load_state_dict(param.state_dict())
    leaves = [c.requires_grad_() for c in coordinates]
    doubled = [c.detach().double().requires_grad_() for c in coordinates]
    w = param(*leaves)
    ours = torch.autograd.grad(w, leaves, g)
    assert len(counted) == (4 if kind is Givens else 2)
    Interpreter.is_on = False
    exact = wide(*doubled)
    assert orthogonality_error(w).max() <= permitted_error(shape[-1], dtype)
    assert torch.allclose(w, exact.to(dtype), rtol=0, atol=2 * torch.finfo(dtype).eps)
    for a, b in zip(ours, torch.autograd.grad(exact, doubled, g.to(exact.dtype)), strict=True):
        assert torch.dist(a.double(), b) <= 1e-5 * b.norm()


@pytest.mark.usefixtures("_as_on_a_device")
@pytest.mark.parametrize("kind", [Hadamard, Householder, Givens])
def test_second_derivatives_tangents_and_vmap_are_those_of_many_launches(kind):
    param, (turn,), _ = drawn(kind, (4, 4), torch.float32)
    x = seeds.normal((3, 4), 4, torch.float32)

    def loss(turn, x=None):
        return ((param(turn) if x is None else param.linear(x, turn))[0] ** 3).sum()

    def found():
        yield torch.func.hessian(loss)(turn)
        yield torch.func.jvp(loss, (turn, x), (turn + 1, x - 1))[1]
        yield torch.vmap(torch.func.grad(loss))(torch.stack([turn, -turn]))
        yield from torch.vmap(torch.func.grad(loss, (0, 1)), (None, 0))(turn, torch.stack([x, 2 * x]))

    ours = list(found())
    Interpreter.is_on = False
    for a, b in zip(ours, found(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_rows_are_transformed_in_one_launch(dtype, counted):
    x = seeds.normal((3, 5, 32), 5, dtype)
    y = hadamard_transform(x)
    assert counted == ["rows_transform"]
    Interpreter.is_on = False
    assert torch.equal(y, hadamard_transform(x))


@pytest.mark.usefixtures("_as_on_a_device")
def test_nan_stays_where_it_is():
    for kind in (Hadamard, Householder, Givens):
        param, coordinates, _ = drawn(kind, (3, 4, 4), torch.float32)
        coordinates[0][1, 1] = float("nan")
        w = param(*coordinates)
        assert w[1].isnan().any()
        assert not w[[0, 2]].isnan().any()


@pytest.mark.parametrize(
    ("name", "size", "most"),
    [
        ("hadamard (exact)", "64x64", 8),
        ("hadamard (exact)", "512x512", 10),
        ("givens (exact)", "64x64", 14),
        ("givens (exact)", "512x512", 20),
        ("householder (exact)", "64x64", 14),
        ("householder (exact)", "512x512", 60),
    ],
)
def test_a_device_launches_few_operators_forward_and_backward(name, size, most):
    for dtype in ("float32", "complex64") if size == "64x64" and "givens" not in name else ("float32",):
        assert launches.counts_of(launches.of_map(launches.MAPS[name], size, dtype)) <= (most, 0)


TYPES = dict.fromkeys(["c", "d", "s", "scratch", "turns"], "*fp64") | {"signs": "*i8"}
TYPES |= dict.fromkeys(["rows", "matrix_stride", "row_stride", "line_stride", "n", "k", "p", "layers", "total"], "i32")


@pytest.mark.usefixtures("_for_gpus")
@pytest.mark.parametrize("capability", [90, *(pytest.param(each, marks=pytest.mark.slow) for each in (80, 120))])
@pytest.mark.parametrize(
    ("program", "fixed"),
    [
        ("rows_transform", columns._settings(4096, 9, 1, 2)),
        ("rows_forward", columns._settings(64, 64, 1, 1) | {"x": None}),
        ("rows_backward", columns._settings(1024, 9, 1, 2)),
        ("reflectors_forward", columns._tile(64, 64, 1, 1)),
        ("reflectors_backward", columns._tile(512, 512, 1, 1)),
        ("reflectors_backward", columns._tile(256, 256, 1, 2)),
        ("mesh_forward", columns._tile(512, 512, 1, 1, *columns._OF_MESHES)),
        ("mesh_backward", columns._tile(512, 512, 1, 1, *columns._OF_MESHES) | {"gx": None}),
        ("mesh_backward", columns._tile(256, 256, 1, 2, *columns._OF_MESHES)),
    ],
)
def test_programs_compile_without_spills_to_exact_products(program, fixed, capability, tmp_path):
    found = getattr(launch.programs(launch.PACKAGE, False), program)
    options = {key: fixed[key] for key in fixed if key not in found.arg_names}
    constants = {key: fixed[key] for key in fixed if key in found.arg_names}
    machine = machinery(built(found, constants, TYPES, capability, **options), tmp_path)
    assert is_without_spills(machine)
    assert machine.registers <= 255
    assert is_exact(machine)
