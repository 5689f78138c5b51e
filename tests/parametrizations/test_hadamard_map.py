"""The map between Hadamard matrices and diagonals, against its factors."""

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.contract.param import load_chart_
from stiefelkit.metrics import orthogonality_error
from stiefelkit.testing import seeds

Hadamard = sk.parametrizations.Hadamard


def drawn(n, dtype, scheme="uniform"):
    param = Hadamard((n, n), dtype=dtype)
    (turn,), chart = param.initial(scheme, seeds.generator())
    load_chart_(param, chart)
    return param, turn


def rotation(t):
    """Rotates the rows i and i + n // 2."""
    c, s = torch.diag(t.cos()), torch.diag(t.sin())
    return torch.cat([torch.cat([c, -s], 1), torch.cat([s, c], 1)])


@pytest.mark.parametrize("n", [1, 2, 8, 12, 24])
def test_a_complex_w_is_the_product_of_its_factors_and_flat(n):
    param, phase = drawn(n, torch.complex128)
    d1, d2 = (torch.diag(torch.exp(1j * theta)) for theta in phase)
    h = sk.init.hadamard(n, random=False)
    w = param(phase)
    assert torch.allclose(w, d2 @ h.to(w.dtype) @ d1, atol=1e-14)
    assert torch.allclose(w.abs(), torch.full((n, n), n**-0.5, dtype=torch.float64))


@pytest.mark.parametrize("n", [2, 8, 12, 24])
def test_a_real_w_is_the_product_of_its_factors(n):
    param, angle = drawn(n, torch.float64)
    s1, s2 = (torch.diag(signs.double()) for signs in param.signs)
    r1, r2 = map(rotation, angle)
    assert torch.allclose(param(angle), s2 @ r2 @ sk.init.hadamard(n, random=False) @ r1 @ s1, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_it_begins_as_a_hadamard_matrix_with_random_signs(dtype):
    param, turn = drawn(20, dtype, "hadamard")
    signs = param(turn) * sk.init.hadamard(20, random=False) * 20
    assert torch.allclose(signs.real.abs(), torch.ones(20, 20, dtype=torch.float64))
    assert torch.linalg.matrix_rank(signs) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_hadamard_matrix_with_any_signs_is_kept_and_another_frame_refused(dtype):
    signs = sk.init.hadamard(24, generator=seeds.generator(1))[0].sign()
    w = (signs[:, None] * sk.init.hadamard(24, generator=seeds.generator())).to(dtype)
    layer = torch.nn.Linear(24, 24, dtype=dtype)
    layer.weight.data = w.clone()
    sk.orthogonal(layer, "weight", "hadamard")
    assert torch.allclose(layer.weight, w, atol=1e-6)
    with pytest.raises(errors.ImageError, match="D2"):
        layer.weight = sk.init.haar((24, 24), dtype)
    assert torch.allclose(layer.weight, w, atol=1e-6)


def test_a_real_frame_of_an_order_without_a_factor_two_is_drawn_and_not_assigned():
    layer = sk.orthogonal(torch.nn.Linear(12, 12), "weight", "hadamard")
    assert sk.drift(layer)["weight"].error <= sk.drift(layer)["weight"].limit * 1.2 + 1e-7
    with pytest.raises(errors.ImageError, match="cayley"):
        layer.weight = sk.init.hadamard(12).float()


@pytest.mark.parametrize(("shape", "match"), [((6, 6), "order"), ((8, 4), "square")])
def test_other_orders_and_tall_weights_are_refused(shape, match):
    with pytest.raises(errors.ShapeError, match=match):
        Hadamard(shape)
    with pytest.raises(errors.DtypeError, match=match):
        sk.orthogonal(torch.nn.Linear(shape[1], shape[0]), "weight", "hadamard")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["hadamard", "uniform"])
def test_entries_that_round_alike_stay_within_the_bound(scheme, dtype):
    errors = []
    for n in (12, 200, 620, 908):
        param, turn = drawn(n, dtype, scheme)
        errors.append(orthogonality_error(param(turn.float())).item() / param.error_bound(turn))
    assert max(errors) <= 1
