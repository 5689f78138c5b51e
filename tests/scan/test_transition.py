"""The programs of a whole linear transition, interpreted, give what operators of torch give in float64."""

import copy
import math
from typing import Any

import pytest
import torch
from compiled_programs import built, is_without_spills, machinery

import stiefelkit as sk
from stiefelkit.functional._kernels.launch import programs
from stiefelkit.scan import transition
from stiefelkit.scan.engines.triton import PACKAGE
from stiefelkit.testing import seeds

pytest.importorskip("triton")

CASES: list[tuple[Any, dict[str, Any]]] = [
    (sk.nn.RotationRNN, {"heads": 2, "bidirectional": True}),
    (sk.nn.RotationRNN, {"decay": None, "bias": False, "num_layers": 2}),
    (sk.nn.RotationRNN, {"parametrization": None, "heads": 4, "normalize": False}),
    (sk.nn.LRU, {"bias": True, "bidirectional": True}),
]


def drawn(kind: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """A layer that programs run, and its twin in float64."""
    seeds.reseed()
    rnn = kind(3, 8, backend="triton", **options)
    twin = copy.deepcopy(rnn).double()
    twin.backend = "reference"
    return rnn, twin


def results(rnn: Any, x: torch.Tensor, only: int | None = None) -> list[torch.Tensor]:
    """States, and gradients of a loss of all of them, or of the last or all the others."""
    x = x.to(next(rnn.parameters()).dtype).requires_grad_()
    found = rnn(x)
    loss = torch.stack([t.square().mean() for i, t in enumerate(found) if i != only]).sum()
    return [*found, *torch.autograd.grad(loss, [x, *rnn.parameters()])]


@pytest.mark.parametrize("only", [None, 0, 1])
@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.usefixtures("_interpreter")
def test_states_and_gradients_are_those_of_operators(kind, options, only, monkeypatch):
    rnn, twin = drawn(kind, options)
    monkeypatch.setattr(transition, "BLOCK", 16)  # several for a head
    x, calls, run = torch.randn(70, 2, 3), [], transition.transition_forward
    monkeypatch.setattr(transition, "transition_forward", lambda *args: calls.append(1) or run(*args))
    for one, exact in zip(results(rnn, x, only), results(twin, x, only), strict=True):
        assert (one - exact).norm() <= 1e-5 * exact.norm()
    assert len(calls) == len(rnn._suffixes)


@pytest.mark.parametrize(("rate", "floor"), [(-1000.0, 1e-37), (-30.0, 0), (-20.0, 0), (90.0, 0)])
@pytest.mark.parametrize("angle", [1e-30, 3.0, -1.5, 1e5, 1e9])
@pytest.mark.usefixtures("_interpreter")
def test_rates_and_angles_of_every_size_are_those_of_operators(rate, floor, angle):
    rnn, twin = drawn(sk.nn.RotationRNN, {"bias": False, "parametrization": None})
    for net in (rnn, twin):
        torch.nn.init.constant_(net.log_rate_l0, rate)
        torch.nn.init.constant_(net.angle_l0, angle)
    x = torch.randn(9, 2, 3)
    for one, exact in zip(results(rnn, x), results(twin, x), strict=True):
        assert one.isfinite().all()
        assert (one - exact).norm() <= 1e-5 * exact.norm() + floor


@pytest.mark.usefixtures("_interpreter")
def test_derivatives_of_second_order_are_those_of_operators_and_nan_goes_through():
    rnn, twin = drawn(sk.nn.RotationRNN, {"heads": 2})
    found = []
    for net in (rnn, twin):
        x = torch.linspace(-1, 1, 60).view(10, 2, 3).to(net.weight_ih_l0.dtype).requires_grad_()
        (g,) = torch.autograd.grad(net(x)[0].pow(3).mean(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), [x, *net.parameters()]))
    for one, exact in zip(*found, strict=True):
        assert (one - exact).norm() <= 1e-4 * exact.norm()
    x = torch.zeros(10, 2, 3)
    x[4, 1, 0] = math.nan
    out = rnn(x)[0]
    assert out[:, 0].isfinite().all()
    assert out[:4].isfinite().all()
    assert out[4:, 1].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("name", ["prepare", "prepare_back"])
@pytest.mark.parametrize("is_log", [False, True])
def test_programs_of_weights_compile_without_spills(name, is_log, capability, tmp_path):
    program = getattr(programs(PACKAGE, False), name)
    fixed: dict[str, Any] = {"NORMALIZE": not is_log, "LOGARITHMS": is_log, "BLOCK": transition.BLOCK}
    fixed |= {} if is_log else {"scales": None, "g_scales": None}
    types = dict.fromkeys(["width", "stride", "planes", "of_row", "of_column"], "i32")
    types |= dict.fromkeys(["factor", "pull"], "*fp64")
    assert is_without_spills(machinery(built(program, fixed, types, capability, num_warps=8), tmp_path))
