"""Where float64 is slow, exact maps and steps keep their laws by float32 products; forced here, on a CPU."""

from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit._torch import TorchDispatchMode
from stiefelkit.errors import OptionError
from stiefelkit.functional._arithmetic import float64
from stiefelkit.functional._arithmetic.float64 import float64_is_weak, splits
from stiefelkit.functional._arithmetic.reads import without_reads
from stiefelkit.functional._arithmetic.split_products import (
    BITS,
    BITS_OF_RESIDUALS,
    BITS_OF_TALL,
    fine_inverse,
    fine_product,
    settled,
    slices_for,
)
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.optim import CayleySGD
from stiefelkit.testing import check_optimizer, check_parametrization, lowered_products, seeds

CPU = torch.device("cpu")
WIDE = (torch.float64, torch.complex128)
HEAVY = {"mm", "bmm", "addmm", "baddbmm"} | {
    f"linalg_{name}" for name in ("inv_ex", "qr", "solve_triangular", "lu_factor_ex")
}


@pytest.fixture(name="weak")
def _weak(monkeypatch):
    monkeypatch.setattr(float64, "declared_weak", True)


class Counter(TorchDispatchMode):
    """Counts what takes n^3 operations in float64."""

    def __init__(self):
        super().__init__()
        self.heavy: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        matrices = [a for a in args if isinstance(a, torch.Tensor) and a.dim() >= 2]
        if name in HEAVY and any(a.dtype in WIDE and min(a.shape[-2:]) > 4 for a in matrices):
            self.heavy.append(name)
        return func(*args, **(kwargs or {}))


def wide(*shape, number=0, dtype=torch.float64):
    return seeds.normal(shape, number, dtype)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 33, 5), (40, 300, 20)])
def test_a_product_of_slices_has_forty_bits_lowered_or_not(shape, dtype):
    m, k, n = shape
    # Rows and columns of all sizes, and some of zeros.
    a = wide(2, m, k, dtype=dtype) * 10.0 ** wide(m, 1, number=1)
    b = wide(k, n, number=2, dtype=dtype) * 10.0 ** wide(1, n, number=3)
    b[:, 0] = 0
    bound = a.abs().amax(-1, keepdim=True) * b.abs().amax(-2, keepdim=True) * (k * 2.0**-BITS)
    found = fine_product(a, b)
    assert bool(((found - a @ b).abs() <= bound).all())
    with lowered_products():
        assert torch.equal(fine_product(a, b), found)


def test_slices_are_exact_in_float32():
    for k in (1, 2, 15, 64, 512, 4096):
        count, width = slices_for(k, BITS)
        assert count * width >= BITS
        assert k * count * 4**width <= 2**24


def test_what_is_no_number_stays_where_it_is():
    a = wide(3, 4, 4)
    a[1, 2, 2] = torch.nan
    found = fine_product(a, wide(4, 4, number=1))
    assert found.isnan().flatten(1).any(1).tolist() == [False, True, False]


def test_derivatives_are_those_of_a_product():
    a, b = wide(3, 4).requires_grad_(), wide(4, 2, number=1).requires_grad_()
    assert torch.autograd.gradcheck(fine_product, (a, b), atol=1e-6)
    assert torch.autograd.gradgradcheck(fine_product, (a, b), atol=1e-5)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("size", [1.0, 1e3, 1e5])
def test_an_inverse_has_the_digits_that_its_norm_leaves(dtype, size):
    x = wide(2, 21, 21, dtype=dtype)
    a = (x - x.mH) * (size / torch.linalg.matrix_norm(x - x.mH, 2, keepdim=True))
    m = torch.eye(21, dtype=dtype) + a
    exact = torch.linalg.inv(m)
    for bits in (BITS_OF_RESIDUALS, BITS_OF_TALL):
        assert torch.dist(fine_inverse(m, bits), exact) <= 10 * size * 2.0**-bits * exact.norm()


@pytest.mark.parametrize("dtype", WIDE)
def test_what_is_settled_is_at_the_limit(dtype):
    single = torch.complex64 if dtype.is_complex else torch.float32
    w = torch.linalg.qr(wide(2, 50, 30, dtype=dtype))[0] + 1e-6 * wide(2, 50, 30, number=1, dtype=dtype)
    assert orthogonality_error(settled(w).to(single)).max() <= permitted_error(30, single)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cayley", {}),
        ("cayley", {"size": (40, 9)}),
        ("householder", {}),
        ("householder", {"reflections": 7}),
        ("matrix_exp", {}),
        ("givens", {}),
        ("rebased", {}),
    ],
)
@pytest.mark.usefixtures("weak")
def test_no_exact_map_multiplies_in_float64(name, options):
    n, p = options.pop("size", (40, 40))
    layer: Any = sk.orthogonal(nn.Linear(p, n, bias=False), "weight", name, **options)
    g = torch.randn(n, p)
    with without_reads(), Counter() as counter:
        w = layer.weight
        torch.autograd.grad(w, list(layer.parameters()), g)
    assert counter.heavy == []
    assert orthogonality_error(w) <= permitted_error(p, torch.float32)


@pytest.mark.parametrize("shape", [(20, 20), (30, 8)])
@pytest.mark.usefixtures("weak")
def test_no_step_multiplies_in_float64(shape):
    w = nn.Parameter(sk.init.haar(shape).float())
    optimizer = CayleySGD([{"params": [w], "manifold": "stiefel:canonical"}], lr=0.05, capturable=True)
    for number in range(3):
        w.grad = seeds.normal(shape, number, torch.float32)
        with without_reads(), Counter() as counter:
            optimizer.step()
        assert counter.heavy == []
        assert orthogonality_error(w) <= 2 * permitted_error(shape[-1], torch.float32)


@pytest.mark.parametrize(
    ("cls", "case"),
    [
        (sk.parametrizations.Cayley, "Cayley-7x7-float32"),
        (sk.parametrizations.Cayley, "Cayley-9x4-complex64"),
        (sk.parametrizations.BlockDiagonal, "BlockDiagonal-5x3-float32"),
        (sk.parametrizations.Householder, "Householder-9x4-float32"),
        (sk.parametrizations.MatrixExp, "MatrixExp-2x2-complex64"),
    ],
)
@pytest.mark.usefixtures("weak")
def test_the_laws_of_maps_hold(cls, case):
    check_parametrization(cls, ["frames", "gradients"], only=case)


@pytest.mark.usefixtures("weak")
def test_the_laws_of_steps_hold():
    check_optimizer(CayleySGD, ["frames"], only="CayleySGD-float32")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), False), ((8, 6), True), ((8, 9), True), ((9, 0), False), ((10, 0), False), ((12, 0), True)],
)
def test_devices_are_weak_by_their_capability(capability, expected, monkeypatch):
    major, minor = capability
    properties = type("Properties", (), {"major": major, "minor": minor})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert float64_is_weak(torch.device("cuda")) == expected
    assert float64_is_weak(torch.device("mps"))
    assert not float64_is_weak(CPU)
    large = torch.empty(0, float64.SMALLEST, device="meta")
    assert not splits(large)
    for declared in (True, False):
        monkeypatch.setattr(float64, "declared_weak", declared)
        assert splits(large) is declared


def test_the_environment_declares_devices_weak_or_strong(monkeypatch):
    for word, expected in (("weak", True), ("strong", False), ("", None)):
        monkeypatch.setenv("STIEFELKIT_FLOAT64", word)
        assert float64.is_weak_by_environment() is expected
    monkeypatch.setenv("STIEFELKIT_FLOAT64", "slow")
    with pytest.raises(OptionError, match="slow"):
        float64.is_weak_by_environment()
