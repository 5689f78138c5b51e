"""Where float64 is slow, polishes, steps and reflectors keep their laws by float32 products; forced here, on a CPU."""

from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit._torch import TorchDispatchMode
from stiefelkit.errors import OptionError
from stiefelkit.functional._arithmetic import devices
from stiefelkit.functional._arithmetic.devices import float64_is_weak, splits, without_reads
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.optim import CayleySGD
from stiefelkit.testing import check_optimizer, check_parametrization, seeds

CPU = torch.device("cpu")
WIDE = (torch.float64, torch.complex128)
HEAVY = {"mm", "bmm", "addmm", "baddbmm"} | {
    f"linalg_{name}" for name in ("inv_ex", "qr", "solve_triangular", "lu_factor_ex")
}


@pytest.fixture(name="weak")
def _weak(monkeypatch):
    monkeypatch.setattr(devices, "declared_weak", True)


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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("householder", {}),
        ("householder", {"reflections": 7}),
        ("givens", {}),
    ],
)
@pytest.mark.usefixtures("weak")
def test_maps_by_float32_products_stay_exact(name, options):
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
        (sk.parametrizations.Cayley, "Cayley-9x4-complex64"),
        (sk.parametrizations.Householder, "Householder-9x4-float32"),
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
    large = torch.empty(0, devices.SMALLEST, device="meta")
    assert not splits(large)
    for declared in (True, False):
        monkeypatch.setattr(devices, "declared_weak", declared)
        assert splits(large) is declared


def test_the_environment_declares_devices_weak_or_strong(monkeypatch):
    for word, expected in (("weak", True), ("strong", False), ("", None)):
        monkeypatch.setenv("STIEFELKIT_FLOAT64", word)
        assert devices.is_weak_by_environment() is expected
    monkeypatch.setenv("STIEFELKIT_FLOAT64", "slow")
    with pytest.raises(OptionError, match="slow"):
        devices.is_weak_by_environment()
