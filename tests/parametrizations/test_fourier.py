"""The restricted-capacity map against its factors."""

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.contract.param import load_chart_
from stiefelkit.testing import seeds

Fourier = sk.parametrizations.Fourier


def drawn(n):
    param = Fourier((n, n), dtype=torch.complex128)
    coordinates, chart = param.initial("arjovsky", seeds.generator())
    load_chart_(param, chart)
    return param, *coordinates


@pytest.mark.parametrize("n", [1, 2, 6, 9])
def test_w_is_the_product_of_its_factors(n):
    param, phase, reflectors = drawn(n)
    d1, d2, d3 = (torch.diag(torch.exp(1j * theta)) for theta in phase)
    k = torch.arange(n, dtype=torch.float64)
    f = torch.exp(-2j * torch.pi * k[:, None] * k / n) / n**0.5
    r1, r2 = (
        torch.eye(n) - 2 * v[:, None] * v.conj() / v.abs().square().sum()
        for v in (torch.complex(*packed.chunk(2)) for packed in reflectors)
    )
    p = torch.eye(n, dtype=torch.complex128)[param.permutation]
    expected = d3 @ r2 @ f.mH @ d2 @ p @ r1 @ f @ d1
    assert torch.allclose(param(phase, reflectors), expected, atol=1e-13)


def test_it_has_seven_coordinates_a_row():
    layer = sk.orthogonal(torch.nn.Linear(12, 12, dtype=torch.complex64), "weight", "fourier")
    assert sum(c.numel() for c in sk.coordinates(layer, "weight").values()) == 7 * 12


def test_a_frame_cannot_be_assigned_and_a_real_or_tall_weight_cannot_have_it():
    layer = sk.orthogonal(torch.nn.Linear(4, 4, dtype=torch.complex64), "weight", "fourier")
    with pytest.raises(errors.ImageError, match="inverse"):
        layer.weight = torch.eye(4, dtype=torch.complex64)
    for other in (torch.nn.Linear(4, 4), torch.nn.Linear(4, 6, dtype=torch.complex64)):
        with pytest.raises(errors.DtypeError, match="weight"):
            sk.orthogonal(other, "weight", "fourier")


def test_the_permutation_travels_with_the_weight_and_a_false_one_is_refused():
    a, b = (sk.orthogonal(torch.nn.Linear(6, 6, dtype=torch.complex64), "weight", "fourier") for _ in range(2))
    state = a.state_dict()
    b.load_state_dict(state)
    assert torch.equal(a.weight, b.weight)
    state["parametrizations.weight.0.permutation"] = torch.zeros(6, dtype=torch.int64)
    with pytest.raises(errors.CheckpointError, match="permutation"):
        b.load_state_dict(state)


@pytest.mark.parametrize("garbage", [[0, 2], [7, 7]])
def test_a_permutation_is_loaded_whatever_was_in_the_memory_before(garbage):
    """One that differs by 1 is not taken for what a mean of integers has rounded down."""
    a, b = (sk.orthogonal(torch.nn.Linear(2, 2, dtype=torch.complex64), "weight", "fourier") for _ in range(2))
    state = a.state_dict()
    state["parametrizations.weight.0.permutation"] = torch.tensor([0, 1])
    a.load_state_dict(state)
    b.to("meta").to_empty(device="cpu")
    b.get_buffer("parametrizations.weight.0.permutation").copy_(torch.tensor(garbage))
    b.load_state_dict(state)
    assert torch.equal(a.weight, b.weight)
    assert torch.equal(a(torch.ones(2, dtype=torch.complex64)), b(torch.ones(2, dtype=torch.complex64)))
