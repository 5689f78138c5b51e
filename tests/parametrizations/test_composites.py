"""Margin and Rebased: maps made of others."""

import itertools
from typing import Any

import pytest
import torch
from optimizers_at_hand import descend

import stiefelkit as sk
from stiefelkit import errors, init
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.parametrizations import Margin, Rebased
from stiefelkit.testing import seeds


def square(name: str, n: int = 6, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return sk.orthogonal(torch.nn.Linear(n, n, bias=False, dtype=dtype), "weight", name, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_singular_values_stay_within_the_margin(dtype):
    layer = square("margin", 24, dtype, margin=0.2)  # values that saturate at one end all: one draw in 2^23
    coordinate_list = layer.parametrizations["weight"]
    with torch.no_grad():
        for c in coordinate_list.coordinates.values():
            c.normal_(std=100.0)
    s = torch.linalg.svdvals(layer.weight.detach())
    assert s.max() <= 1.2 + 1e-5
    assert s.min() >= 0.8 - 1e-5
    assert s.max() - s.min() > 0.1


def test_the_spectrum_is_vorontsovs():
    layer = square("margin", margin=0.3)
    q = sk.coordinates(layer, "weight")["spectrum"]
    assert torch.equal(q, torch.zeros(6))
    with torch.no_grad():
        q.copy_(torch.linspace(-2, 2, 6))
    expected = 2 * 0.3 * (torch.sigmoid(q) - 0.5) + 1
    assert torch.allclose(torch.linalg.svdvals(layer.weight).flip(0), expected, atol=1e-6)


def test_a_weight_within_the_margin_is_kept_and_one_beyond_it_refused():
    u, v = init.haar((5, 3)), init.haar((3, 3))
    w = (u * torch.tensor([1.08, 1.0, 0.93])) @ v.mT
    layer = torch.nn.Linear(3, 5)
    with torch.no_grad():
        layer.weight.copy_(w)
    sk.orthogonal(layer, "weight", "margin", margin=0.1, u="householder", v="matrix_exp")
    assert torch.dist(layer.weight, w.float()) < 2e-6
    with pytest.raises(errors.NotAFrameError, match=r"within 0\.1 of 1"):
        layer.weight = 1.2 * w.float()
    sk.orthogonal(projected := torch.nn.Linear(3, 5), "weight", "margin", margin=0.1, init="project")
    assert (torch.linalg.svdvals(projected.weight.detach()) - 1).abs().max() <= 0.1 + 1e-5


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("margin", {"u": "fourier"}, errors.DtypeError, "complex"),
    ("margin", {"u": "margin"}, errors.OptionError, "frames"),
    ("rebased", {"inner": "cayley", "inner_options": {"negative": 2}}, errors.OptionError, "base"),
    ("rebased", {"inner": "fourier", "dtype": torch.complex64}, errors.OptionError, "identity"),
    ("margin", {"v_options": {"shape": (2, 2)}}, errors.OptionError, "no option"),
    ("rebased", {"inner_options": 3}, errors.OptionError, "mapping"),
]


@pytest.mark.parametrize(("name", "options", "error", "word"), REFUSED)
def test_parts_that_do_not_fit_are_refused(name, options, error, word):
    with pytest.raises(error, match=word):
        square(name, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("inner", ["matrix_exp", "cayley", "householder", "givens"])
def test_rebasing_keeps_the_weight_and_zeroes_the_way_to_it(inner, dtype):
    layer = square("rebased", dtype=dtype, inner=inner)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    target = torch.randn(6, 6, dtype=dtype)
    descend(optimizer, lambda: (layer.weight - target).abs().square().sum(), 3)
    before = layer.weight.detach().clone()
    sk.rebase_(layer, "weight", optimizer)
    kind = before.dtype if before.is_complex() else torch.float32
    assert torch.dist(layer.weight.to(kind), before.to(kind)) <= 8 * rounding_limit(6, dtype)
    coordinate_list = layer.parametrizations["weight"]
    assert torch.allclose(
        coordinate_list.param.inner(*coordinate_list.coordinates.values()), torch.eye(6).to(kind), atol=1e-5
    )
    assert not optimizer.state


def test_rebased_training_stays_on_the_manifold_and_goes_down():
    layer = square("rebased", n=16)
    target = init.haar((16, 16), generator=seeds.generator()).float()
    target[0] *= torch.linalg.det(target) * torch.linalg.det(layer.weight.detach())
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    first = (layer.weight - target).square().sum().item()
    for _ in range(15):
        losses = descend(optimizer, lambda: (layer.weight - target).square().sum(), 10)
        sk.rebase_(layer, "weight", optimizer)
    assert losses[-1] < 0.1 * first
    assert orthogonality_error(layer.weight).item() <= 1.2 * rounding_limit(16, torch.float32) + 1.2e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("shape", [(8, 8), (8, 4), (2, 6, 6)])
@pytest.mark.parametrize(
    ("inner", "options"),
    [
        ("matrix_exp", {}),
        ("householder", {"reflections": 1}),
        ("block_diagonal", {"blocks": 2, "inner": "matrix_exp"}),
        ("rebased", {"inner": "block_diagonal", "inner_options": {"blocks": 2}}),
    ],
)
def test_the_base_takes_every_frame_whatever_the_inner_map_reaches(inner, options, shape, dtype):
    w = init.haar(shape, working_dtype(dtype), seeds.generator())
    if shape[-1] == shape[-2] and not dtype.is_complex:
        w[..., 0] *= -torch.linalg.det(w).sign()[..., None]
    param = Rebased(shape, dtype=dtype, inner=inner, inner_options=options)
    with torch.no_grad():
        back = param(*param.right_inverse(w.to(dtype)))
        assert torch.linalg.matrix_norm(back - w.to(dtype)).max() <= param.return_bound
        base = param.base if not dtype.is_complex else torch.view_as_complex(param.base)
        assert orthogonality_error(base).max() <= 2 * rounding_limit(shape[-2], torch.float32)


def test_the_bound_of_a_margin_counts_its_parts():
    layer = square("margin", n=64, margin=0.0, u="householder", u_options={"precision": "fast"})
    param = layer.parametrizations["weight"].param
    coordinates = [torch.randn_like(c) for c in layer.parametrizations["weight"].coordinates.values()]
    assert orthogonality_error(param(*coordinates)).item() <= param.error_bound(*coordinates)


def test_whatever_forward_returns_can_be_rebased():
    layer = square("rebased", n=256, inner="householder", precision="fast")
    with torch.no_grad():
        sk.coordinates(layer, "weight")["reflectors"].fill_(1.0)
    before, coordinate_list = layer.weight.detach().clone(), layer.parametrizations["weight"]
    bound = coordinate_list.param.error_bound(*coordinate_list.coordinates.values())
    sk.rebase_(layer, "weight")
    assert torch.dist(layer.weight, before) <= bound
    assert orthogonality_error(coordinate_list.param.base) <= 2 * rounding_limit(256, torch.float32)


def test_rebasing_clears_what_lbfgs_remembers_and_needs_the_right_optimizer():
    layer = sk.orthogonal(torch.nn.Linear(6, 6), "weight", "rebased", inner="cayley")
    optimizer = torch.optim.LBFGS(layer.parameters())

    def closure():
        optimizer.zero_grad()
        loss = (layer.weight - torch.eye(6)).square().sum() + layer.bias.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    sk.rebase_(layer, "weight", optimizer)
    assert not optimizer.state
    for weight, wrong in ((layer, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])), (square("cayley"), None)):
        with pytest.raises(errors.OptionError):
            sk.rebase_(weight, "weight", wrong)


def test_weights_at_the_edge_of_the_margin_come_back():
    layer = square("margin", n=16, dtype=torch.float64, margin=0.3)
    with torch.no_grad():
        sk.coordinates(layer, "weight")["spectrum"].fill_(1e4)
    kept = layer.weight.detach().clone()
    layer.weight = kept
    assert torch.dist(layer.weight, kept) < 1e-13


MAPS = ("cayley", "householder", "givens", "stiefel")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (2, 5, 3)])
@pytest.mark.parametrize(("u", "v"), [*itertools.product(MAPS, [*MAPS, "matrix_exp"]), ("matrix_exp", "cayley")])
def test_a_near_orthogonal_weight_of_any_two_maps_comes_back(u, v, shape, dtype):
    map = Margin(shape, dtype=dtype, margin=0.1, u=u, v=v)
    working, p = working_dtype(dtype), shape[-1]
    left = init.haar(shape, working, seeds.generator(0))
    right = init.haar((*shape[:-2], p, p), working, seeds.generator(1))
    s = 1 + 0.18 * (torch.rand(*shape[:-2], p, dtype=torch.float64, generator=seeds.generator(2)) - 0.5)
    for w in (left * s.unsqueeze(-2) @ right.mH, left):
        w = w.to(dtype)
        with torch.no_grad():
            back = map(*map.right_inverse(w))
        bound = 100 if dtype == torch.complex128 else 16
        assert torch.linalg.matrix_norm((back - w).to(torch.complex128)).max() <= bound * rounding_limit(p, dtype)
