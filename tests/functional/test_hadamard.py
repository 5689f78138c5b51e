"""Hadamard matrices of every order that is promised, and the transform that applies them without forming them."""

import functools

import pytest
import torch

import stiefelkit as sk
from stiefelkit import init
from stiefelkit.errors import OptionError, ShapeError
from stiefelkit.testing import seeds

KERNELS = "fast_hadamard_transform"
WIDTHS = [2048, 2560, 2304, 3072, 3584, 4096, 5120, 8192, 8960, 11008, 13824, 14336, 18944, 27648, 28672, 29568]
"""Hidden and inner widths of language models that people quantize."""


@pytest.mark.parametrize("n", [1, 2, 4, 12, 20, 28, 36, 44, 52, 76, 92, 100, 116, 148, 156, 172, 344, 368, 684])
def test_rows_are_orthogonal_and_entries_are_signs(n):
    h = functools.reduce(torch.kron, init.hadamard_factors(n))
    assert torch.equal(h.abs(), torch.ones(n, n, dtype=h.dtype))
    assert torch.equal(h @ h.mT, n * torch.eye(n, dtype=h.dtype))


def test_orders_of_two_are_sylvesters_and_most_multiples_of_four_are_there():
    assert torch.equal(init.hadamard(4, random=False) * 2, torch.kron(*[init.hadamard(2, random=False) * 2**0.5] * 2))
    known = [n for n in range(4, 401, 4) if _is_there(n)]
    assert len(known) >= 75
    assert all(map(_is_there, WIDTHS))


def _is_there(n):
    try:
        init.hadamard_factors(n)
    except ShapeError:
        return False
    return True


@pytest.mark.parametrize("n", [0, 6, 236, 13696])
def test_an_order_without_a_matrix_is_refused_with_the_nearest(n):
    for refused in (lambda: init.hadamard(n), lambda: sk.functional.hadamard_transform(torch.zeros(2, n))):
        with pytest.raises(ShapeError, match="near"):
            refused()


def test_random_signs_stand_on_columns_and_follow_the_generator():
    h, plain = init.hadamard(12, generator=torch.Generator().manual_seed(1)), init.hadamard(12, random=False)
    signs = (h / plain)[0]
    assert torch.equal(h, plain * signs)
    assert set(signs.tolist()) == {1.0, -1.0}
    assert torch.equal(h, init.hadamard(12, generator=torch.Generator().manual_seed(1)))
    assert init.hadamard(12, dtype=torch.complex64).dtype == torch.complex64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize(
    ("n", "options"),
    [*((n, {}) for n in (1, 2, 8, 12, 96, 160, 344, 368)), (214, {"block": 2}), (80, {"order": KERNELS})],
)
def test_the_transform_is_the_product_rounded_once(n, options, dtype):
    torch.manual_seed(seeds.seed(n))
    x = torch.randn(3, 2, n, dtype=dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    block = options.get("block", n)
    h = init.hadamard(block, random=False, dtype=wide, order=options.get("order"))
    h = torch.block_diag(*[h] * (n // block))
    for adjoint, m in ((False, h), (True, h.mT)):
        exact, y = x.to(wide) @ m.mT, sk.functional.hadamard_transform(x, adjoint=adjoint, **options)
        assert y.dtype == dtype
        assert (y.to(wide) - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max() * 16 / 15 + 1e-14
    back = sk.functional.hadamard_transform(x.to(wide), **options)
    assert torch.allclose(sk.functional.hadamard_transform(back, adjoint=True, **options), x.to(wide), atol=1e-13)


def test_orders_of_the_kernels_are_those_of_their_tables_times_sylvesters():
    rows = {12: "+-++++++++++ --+-+-+-+-+-", 20: "+----+----++--++-++- -+----+---+++---+-++"}
    rows[28] = "+------++----++-+--+-+--++-- -+-----+++-----+-+--+-+--++-"  # csrc/code_gen.py of Dao-AILab's library
    for k, first in rows.items():
        expected = torch.tensor([[1.0 if sign == "+" else -1.0 for sign in row] for row in first.split()]).double()
        h = init.hadamard(4 * k, random=False, order=KERNELS) * (4 * k) ** 0.5
        assert torch.allclose(h[[0, 4]], torch.kron(expected, torch.ones(1, 4).double()))
    assert torch.equal(init.hadamard(64, random=False, order=KERNELS), init.hadamard(64, random=False))
    with pytest.raises(ShapeError, match="28"):
        init.hadamard(44, order=KERNELS)
    with pytest.raises(OptionError, match="order"):
        sk.functional.hadamard_transform(torch.zeros(4), order="dyadic")
    with pytest.raises(ShapeError, match="divides"):
        sk.functional.hadamard_transform(torch.zeros(12), block=8)


def test_it_is_compiled_mapped_and_not_spoilt_by_inference_mode():
    init.hadamard_factors.cache_clear()
    x = torch.randn(4, 20)
    with torch.inference_mode():
        expected = sk.functional.hadamard_transform(x).clone()
    assert torch.equal(torch.vmap(sk.functional.hadamard_transform)(x), expected)
    assert torch.equal(torch.compile(sk.functional.hadamard_transform, fullgraph=True, backend="eager")(x), expected)
    y = x.clone().requires_grad_()
    sk.functional.hadamard_transform(y).sum().backward()
    assert y.grad is not None
