"""Lowered products are lowered on every machine, in every thread that asks, and nowhere else."""

import threading
from typing import Any

import pytest
import torch

from stiefelkit.functional import product
from stiefelkit.testing import lowered_products

FLAGS: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


pytestmark = pytest.mark.skipif(torch.get_float32_matmul_precision() == "medium", reason="all is lowered already")


@pytest.fixture(autouse=True)
def _in_full_precision():
    before = FLAGS.fp32_precision
    FLAGS.fp32_precision = "ieee"
    yield
    FLAGS.fp32_precision = before


@torch.library.custom_op("stiefelkit_tests::multiply", mutates_args=())
def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@multiply.register_fake
def _(a, b):
    return a @ b


def inferred(a, b):
    with torch.inference_mode():
        return a @ b


def gradient(a, b):
    leaf = a.clone().requires_grad_()
    (y,) = torch.autograd.grad((leaf * b).exp() @ b, leaf, b)
    return y


def compiled(backend):
    def run(a, b):
        torch._dynamo.reset()
        return torch.compile(lambda a, b: torch.relu(a @ b), fullgraph=True, backend=backend)(a, b)

    return run


PRODUCTS = {
    "mm": torch.mm,
    "in place": lambda a, b: a.clone().addmm_(a, b),
    "baddbmm": lambda a, b: torch.baddbmm(a, a.expand(2, -1, -1), b.expand(2, -1, -1)),
    "complex": lambda a, b: torch.complex(a, b) @ torch.complex(b, a).mH,
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "linear": lambda a, b: torch.nn.functional.linear(a, b, b[0]),
    "matrix_exp": lambda a, b: torch.matrix_exp((a - b) / 8),
    "custom op": multiply,
    "inference": inferred,
    "vmap": lambda a, b: torch.vmap(torch.mv)(a.expand(32, -1, -1), b),
    "backward": gradient,
    "aot_eager": compiled("aot_eager"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_lowered_inside_and_the_same_bits_outside(name):
    a, b = torch.randn(2, 32, 32)
    before = PRODUCTS[name](a, b)
    with lowered_products():
        inside = PRODUCTS[name](a, b)
    assert 1e-5 < (inside - before).norm() / before.norm() < 0.05
    assert torch.equal(PRODUCTS[name](a, b), before)


def test_float64_and_what_takes_the_flag_back_are_let_alone():
    a, b = torch.randn(2, 32, 32)
    plain, exact = a @ b, a.double() @ b.double()
    with lowered_products():
        assert torch.equal(a.double() @ b.double(), exact)
        assert torch.equal(product(a, b), plain)
        FLAGS.fp32_precision = "ieee"
        assert torch.equal(a @ b, plain)


def test_rounding_keeps_ten_bits_infinities_and_nan():
    from stiefelkit.testing.lowered import _to_ten_bits

    below = 1 + 2**-11 - 2**-20
    a = torch.tensor([1 + 2**-10, below, 1 + 2**-11, 1 + 3 * 2**-11, -below, 0.0, torch.inf, -torch.inf, torch.nan])
    expected = torch.tensor([1 + 2**-10, 1, 1, 1 + 2**-9, -1, 0, torch.inf, -torch.inf, torch.nan])
    assert torch.equal(_to_ten_bits(a).nan_to_num(7.0), expected.nan_to_num(7.0))
    z = torch.complex(a[:6], a[:6]).conj()
    assert torch.equal(_to_ten_bits(z), torch.complex(expected[:6], -expected[:6]))


def test_a_flag_that_follows_a_wider_one_follows_it_afterwards():
    backends: Any = torch.backends
    FLAGS.fp32_precision = "none"
    try:
        backends.fp32_precision = "tf32"
        with lowered_products():
            pass
        backends.fp32_precision = "ieee"
        assert FLAGS.fp32_precision == "ieee"
    finally:
        backends.fp32_precision = "none"


def test_threads_that_enter_overlap_and_the_last_one_out_sets_the_flags_back():
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    a, b = torch.randn(2, 32, 32)
    plain, before = a @ b, FLAGS.fp32_precision
    barrier, found = threading.Barrier(4), []

    def work(k):
        with lowered_products():
            barrier.wait()
            found.extend(not torch.equal(a @ b, plain) for _ in range(5))
            for _ in range(k):
                torch.randn(100, 100).sort()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    work(3)
    for thread in threads:
        thread.join()
    assert found == [True] * 20
    assert FLAGS.fp32_precision == before
    assert not is_in_torch_dispatch_mode()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.equal(a @ b, plain)


@torch.library.custom_op("stiefelkit_tests::skew_part", mutates_args=())
def skew_part(a: torch.Tensor) -> torch.Tensor:
    return a - a.mH


def test_conjugates_inside_operators_are_let_alone():
    a = torch.randn(4, 4, dtype=torch.complex128)
    with lowered_products():
        assert torch.equal(skew_part(a), a - a.mH)
