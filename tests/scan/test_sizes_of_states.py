"""Complex modReLU at every size of its states: no square overflows or vanishes, in any backend."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stiefelkit.functional import modrelu
from stiefelkit.scan import find_activation, scan
from stiefelkit.scan.activations.modrelu import ComplexModReLU

DOUBLE = torch.float64


def run(arguments: dict[str, Tensor], backend: str) -> tuple[Any, Tensor]:
    given = dict(arguments)
    return scan(given.pop("x"), given.pop("w"), given.pop("h0"), **given, backend=backend)  # type: ignore[arg-type]


def gradients(arguments: dict[str, Tensor], g: Tensor, backend: str) -> dict[str, Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in arguments.items()}
    found = torch.autograd.grad(run(leaves, backend)[0], list(leaves.values()), g)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("ratio", [-1.5, -0.5, 0.0, 0.5, 1e6])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(name, dtype) for name in ("inplace", "careful") for dtype in (torch.complex64, torch.complex128)]
    + [("triton", torch.complex64)],
)
def test_complex_modrelu_and_its_gradients_scale_with_the_states_in_every_backend(dtype, backend, ratio, monkeypatch):
    if backend == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    if backend == "careful":  # what stands in for `loop` where a ratio was cut off, and on GPUs
        monkeypatch.setattr(ComplexModReLU, "loop", ComplexModReLU.careful)
        backend = "inplace"
    # By powers of two nothing is rounded anew, from the least normal numbers to the largest.
    info = torch.finfo(dtype)
    least, most = math.frexp(info.tiny)[1] + 4, math.frexp(info.max)[1] - 24
    exponents = torch.linspace(least, most, 40, dtype=DOUBLE).round()
    angles = torch.linspace(0.1, 6, 40, dtype=DOUBLE)
    one = torch.polar(torch.ones(40, dtype=DOUBLE), angles)
    scale = exponents.exp2()

    def values(size: Tensor, backend: str, dtype: torch.dtype) -> list[Tensor]:
        arguments = {
            "x": (one * size).to(dtype).reshape(1, 1, -1),
            "w": torch.eye(len(one), dtype=dtype),
            "h0": torch.zeros(1, len(one), dtype=dtype),
            "activation_bias": (ratio * size).to(dtype.to_real()),
        }
        cotangent = torch.full_like(arguments["h0"], 0.6 - 0.8j)
        found = gradients(arguments, cotangent.unsqueeze(0), backend)
        return [run(arguments, backend)[1].flatten(), found["x"].flatten(), found["activation_bias"]]

    h, *others = values(scale, backend, dtype)
    expected, *rest = values(torch.ones_like(scale), "reference", torch.complex128)
    assert h.isfinite().all()
    own, close = 16 * info.eps, torch.testing.assert_close
    close(h.to(expected.dtype) / scale, expected, rtol=own, atol=own)
    for found, there in zip(others, rest, strict=True):
        close(found.to(there.dtype), there, rtol=own, atol=own * (1 + abs(ratio)))


@pytest.mark.parametrize("bias", [0.0, 1e-38, 1e-24, 0.5, -0.5])
def test_complex_states_below_the_normal_numbers_count_as_zero_in_every_backend(bias):
    arguments = {
        "x": torch.tensor([[[1e-45 + 0j, 1e-40j, 3e-39 + 4e-39j]]]),
        "w": torch.eye(3, dtype=torch.complex64),
        "h0": torch.zeros(1, 3, dtype=torch.complex64),
        "activation_bias": torch.full((3,), bias),
    }
    for backend in ("inplace", "reference"):
        out, last = run(arguments, backend)
        found = gradients(arguments, torch.ones_like(out), backend)
        assert not any(t.any() for t in (last, found["x"], found["activation_bias"]))


@pytest.mark.parametrize("name", ["modrelu", "modrelu_epsilon"])
def test_complex_modrelu_of_rows_is_that_of_numbers_at_every_size(name):
    modulus = torch.cat([torch.zeros(1), torch.logspace(-44, 38, 83)])
    z = torch.polar(modulus, torch.linspace(0.1, 6, len(modulus)))
    activation: Any = find_activation(name, True)
    for bias in (-0.5, 0.0, 0.5, 1e-30, -1e30):
        b = torch.full_like(modulus, bias)
        found = torch.complex(*activation.of_rows(torch.cat([z.real, z.imag]), b).chunk(2))
        torch.testing.assert_close(found, modrelu(z, b, activation.slope), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bias", [-0.5, 0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("backend", ["reference", "inplace"])
def test_modrelu_with_an_epsilon_is_right_for_states_of_every_size(backend, dtype, bias):
    exponents = torch.linspace(-120, 120, 49, dtype=DOUBLE)
    sizes = exponents.exp2() * (torch.polar(torch.ones(49, dtype=DOUBLE), exponents) if dtype.is_complex else 1)

    def values(backend: str, dtype: torch.dtype) -> list[Tensor]:
        arguments = {
            "x": sizes.to(dtype).reshape(1, 1, -1),
            "w": torch.eye(49, dtype=dtype),
            "h0": torch.zeros(1, 49, dtype=dtype),
            "activation_bias": torch.full((49,), bias, dtype=dtype.to_real()),
        }
        leaves = {name: t.requires_grad_() for name, t in arguments.items()}
        given: dict[str, Any] = {**leaves, "activation": "modrelu_epsilon", "backend": backend}
        out = scan(given.pop("x"), given.pop("w"), given.pop("h0"), **given)[1]
        g = torch.full_like(out, 0.6 - 0.8j if dtype.is_complex else 0.6)
        return [out.detach(), *torch.autograd.grad(out, [leaves["x"], leaves["activation_bias"]], g)]

    fine = torch.complex128 if dtype.is_complex else DOUBLE
    for own, expected in zip(values(backend, dtype), values("reference", fine), strict=True):
        torch.testing.assert_close(own.to(expected.dtype), expected, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("bias", [-0.1, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64])
def test_modrelu_takes_every_epsilon(dtype, bias):
    z = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    out = modrelu(z, torch.full((3,), bias), 1e-100)
    assert not out.detach().abs().any()
    assert torch.isfinite(torch.autograd.grad(out.abs().sum(), z)[0].abs()).all()
