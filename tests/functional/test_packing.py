"""Packed coordinates: what unpacking makes of them, to the bit, and indices that are kept for later calls."""

import pytest
import torch

from stiefelkit.functional import _packing as packing
from stiefelkit.functional import pack_skew, pack_trapezoid, skew_size, trapezoid_size, unpack_skew, unpack_trapezoid
from stiefelkit.testing import seeds


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("n", [1, 2, 7, 33])
def test_a_real_skew_matrix_is_its_lower_triangle_row_by_row_less_the_transpose(n, batch):
    v = torch.randn(*batch, skew_size(n, n, False), generator=seeds.generator(1))
    below = torch.zeros(*batch, n, n)
    i, j = torch.tril_indices(n, n, -1)
    below[..., i, j] = v
    a = unpack_skew(v, n, n, False)[0]
    assert torch.equal(a, below - below.mT)
    assert torch.equal(pack_skew(a), v)


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 7), (9, 4)])
def test_a_trapezoid_is_zero_above_its_diagonal_and_comes_back(n, k, batch):
    v = torch.randn(*batch, trapezoid_size(n, k, False), generator=seeds.generator(2))
    u = unpack_trapezoid(v, n, k, False)
    assert torch.equal(u, u.tril())
    assert torch.equal(pack_trapezoid(u), v)


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_a_shift_is_on_the_diagonal_alone(is_complex, shift):
    v = torch.randn(2, skew_size(5, 5, is_complex), generator=seeds.generator(3))
    a = unpack_skew(v, 5, 5, is_complex)[0]
    assert torch.equal(packing.unpack_square(v, 5, is_complex, shift) - a, shift * torch.eye(5).to(a).expand_as(a))


def test_indices_first_asked_for_inside_torch_func_serve_outside(monkeypatch):
    monkeypatch.setattr(packing, "_known", {})

    def length(v):
        return pack_skew(unpack_skew(v, 4, 4, False)[0]).square().sum()

    v = torch.randn(6, generator=seeds.generator(4))
    assert torch.equal(torch.func.grad(length)(v), 2 * v)
    v.requires_grad_()
    assert torch.equal(torch.autograd.grad(length(v), v)[0], 2 * v.detach())
