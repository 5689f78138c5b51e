"""Reflectors in trapezoidal form: as many, none zero, the same product."""

import pytest
import torch
from torch import Tensor

from stiefelkit.errors import NonFiniteError, RankError
from stiefelkit.functional._householder import trapezoidal_reflectors
from stiefelkit.testing import seeds


def product_of(u: Tensor) -> Tensor:
    r = torch.eye(len(u), dtype=torch.float64)
    for x in u.double().unbind(1):
        r = r - 2 * torch.outer(r @ x, x) / (x @ x)
    return r


def drawn(n: int, k: int, kind: str) -> Tensor:
    u = torch.randn(n, k, generator=seeds.generator(n + k))
    if kind in ("pairs", "near pairs"):
        u[:, 1::2] = u[:, : 2 * (k // 2) : 2]
    if kind == "near pairs":
        u[:, 1::2] += 1e-3 * torch.randn(n, k // 2, generator=seeds.generator(k))
    if kind == "all alike":
        u[:] = u[:, :1]
    if kind == "zeros at the top" and n > 2:
        u[:2] = 0
    return u


@pytest.mark.parametrize("kind", ["any", "pairs", "near pairs", "all alike", "zeros at the top"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (3, 2), (5, 4), (8, 3), (8, 8), (16, 7), (64, 8)])
def test_the_product_is_the_same_by_as_many_of_trapezoidal_form(n: int, k: int, kind: str):
    u = drawn(n, k, kind)
    v = trapezoidal_reflectors(u)
    assert v.shape == u.shape
    assert not v.triu(1).any()
    assert v.any(0).all()
    assert torch.dist(product_of(v), product_of(u)) <= 1e-7 * k  # axes moved by less are left
    assert torch.dist(product_of(v.float()), product_of(u)) <= 1e-6 * k


def test_trapezoidal_ones_keep_their_bits():
    u = drawn(8, 3, "any").tril()
    assert trapezoidal_reflectors(u) is u


def test_orthonormal_ones_reflect_the_space_that_they_span():
    u = drawn(9, 4, "any")
    q = torch.linalg.qr(u.double())[0]
    r = product_of(trapezoidal_reflectors(u, orthogonal=True))
    assert torch.dist(r, torch.eye(9) - 2 * q @ q.mT) <= 1e-12


def test_zero_and_dependent_ones_are_refused():
    with pytest.raises(NonFiniteError, match="zero"):
        trapezoidal_reflectors(torch.zeros(4, 2))
    with pytest.raises(RankError, match="independent"):
        trapezoidal_reflectors(torch.ones(4, 2), orthogonal=True)
