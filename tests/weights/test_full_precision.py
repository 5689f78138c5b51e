"""Lowered products stay outside: of gradients of loops too, and while threads come and go."""

import threading
from typing import Any

import pytest
import torch

import stiefelkit as sk
from stiefelkit.functional._arithmetic.product import FullPrecision, is_lowered
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.testing import lowered_products

CPU = torch.device("cpu")
NETS: dict[str, Any] = {
    "cell": lambda: sk.nn.OrthogonalRNNCell(40, 64),
    "complex cell": lambda: sk.nn.OrthogonalRNNCell(40, 64, field="complex"),
    "rnn": lambda: sk.nn.OrthogonalRNN(40, 64, bidirectional=True),
    "complex rnn": lambda: sk.nn.OrthogonalRNN(40, 64, field="complex"),
    "goru": lambda: sk.nn.GORU(40, 64),
    "linear transition": lambda: sk.nn.LinearTransitionRNN(40, 64),
}


def results(net, x):
    out = net(x)
    out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out.abs().square().sum(), list(net.parameters()))]


def require_same(net, x):
    exact = results(net, x)
    with lowered_products():
        found = results(net, x)
    for a, b in zip(found, exact, strict=True):
        assert torch.dist(a, b) <= 1e-5 * b.norm()


@pytest.mark.parametrize(
    ("kind", "steps"), [(kind, steps) for kind in NETS for steps in (1, 7, 9) if "cell" not in kind or steps == 1]
)
def test_lowered_products_do_not_reach_the_gradients_of_recurrent_nets(kind, steps):
    net = NETS[kind]()
    require_same(net, torch.randn(32, 40) if "cell" in kind else torch.randn(steps, 32, 40))


@pytest.mark.parametrize("name", ["givens", "cayley", "householder"])
def test_threads_that_come_and_go_do_not_lower_each_others_products(name):
    layer = sk.orthogonal(torch.nn.Linear(160, 160), "weight", name)
    expected, off = layer.weight.detach().clone(), []

    def work():
        with lowered_products():
            for _ in range(10):
                w = layer.weight
                if not torch.equal(w, expected):
                    off.append(orthogonality_error(w).item() / rounding_limit(160, w.dtype))

    with lowered_products():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]
    assert not off, f"{len(off)} of 40 weights differ, the worst is {max(off):.3g} limits off"


def test_a_setting_outlives_contexts_that_overlap_and_is_told_inside():
    flags: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = flags.fp32_precision
    first, second = FullPrecision(CPU), FullPrecision(CPU)
    try:
        flags.fp32_precision = "bf16"
        first.__enter__()
        second.__enter__()
        assert flags.fp32_precision == "ieee"
        assert is_lowered(CPU)
        first.__exit__()
        assert flags.fp32_precision == "ieee"
        second.__exit__()
        assert flags.fp32_precision == "bf16"
        with FullPrecision(CPU):
            flags.fp32_precision = "tf32"  # somebody else sets it meanwhile
        assert flags.fp32_precision == "tf32"
    finally:
        flags.fp32_precision = before
    assert not is_lowered(CPU)
