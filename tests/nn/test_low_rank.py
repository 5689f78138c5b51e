"""Adapters of low rank: the identity at first to the bit, one matrix of the rank that was asked for afterwards."""

import copy
from typing import Any, cast

import pytest
import torch
from moved_adapters import drawn
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.errors import NonFiniteError, OptimizerError, OptionError
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.nn import LowRankAdapter, PrincipalAdapter
from stiefelkit.weights.find import coordinate_manifolds

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "principal": (PrincipalAdapter, {}),
    "principal by reflectors": (PrincipalAdapter, {"inner": "householder", "reflections": 2}),
    "principal without diagonals": (PrincipalAdapter, {"diagonals": False}),
    "low_rank": (LowRankAdapter, {}),
    "low_rank by Cayley transforms": (LowRankAdapter, {"inner": "cayley"}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def adapter(kind: str, layer: nn.Module | None = None, rank: int = 4) -> Any:
    made, options = KINDS[kind]
    return made(nn.Linear(12, 20) if layer is None else layer, rank=rank, **options)


def trained(one: Any, steps: int = 4) -> Any:
    moves = sk.optim.CayleyAdam if coordinate_manifolds(one) else torch.optim.Adam
    optimizer = moves(sk.optim.parameter_groups(one, lr=0.05))
    dtype = next(one.layer.parameters(), torch.empty(0)).dtype
    for step in range(steps):
        optimizer.zero_grad()
        y = one(drawn(5, 12, key=step).to(dtype)).float()
        (y - drawn(5, 20, key=50)).square().mean().backward()
        optimizer.step()
    return one


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_at_first_the_layer_does_what_it_did_to_the_bit(kind: str, dtype: torch.dtype):
    layer = nn.Linear(12, 20, dtype=dtype)
    x = drawn(3, 12).to(dtype)
    before = layer(x)
    after = adapter(kind, layer)(x)
    assert after.dtype == dtype
    if "reflectors" in kind:  # whose product is the identity but for rounding
        torch.testing.assert_close(after.double(), before.double(), rtol=0, atol=8 * torch.finfo(dtype).eps)
    else:
        assert torch.equal(after, before)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_one_rounding_away_and_the_frozen_weight_keeps_its_bits(kind: str, dtype: torch.dtype):
    one = trained(adapter(kind, nn.Linear(12, 20, dtype=dtype))).eval()
    x, frozen = drawn(7, 12).to(dtype), one.layer.weight.clone()
    apart, keys = one(x), list(one.state_dict())
    assert torch.dist(apart, one.layer(x)) > 0.01 * apart.norm()
    one.merge()
    eps = torch.finfo(dtype).eps
    assert torch.dist(one(x).double(), apart.double()) <= 12 * eps * apart.double().norm()
    assert torch.equal(one.folded()(x), one(x))
    assert list(one.state_dict()) == keys
    one.unmerge()
    assert torch.equal(one(x), apart)
    assert torch.equal(one.layer.weight, frozen)


@every_kind
def test_the_change_has_the_rank_and_its_frames_stay_frames(kind: str):
    one = trained(adapter(kind), 20)
    difference = (one.weight - one.layer.weight).detach()
    s = torch.linalg.svdvals(difference)
    assert s[3] > 1e-4 * s[0]
    assert s[4] < 1e-5 * s[0]
    for name, drift in sk.drift(one).items():
        assert drift.error <= permitted_error(4, torch.float32), name
    if kind == "low_rank":
        assert torch.allclose(s[:4], one.spectrum.detach().abs().sort(descending=True).values, atol=1e-6)
    if kind == "principal without diagonals":
        expected = torch.linalg.svdvals(one.layer.weight)
        torch.testing.assert_close(torch.linalg.svdvals(one.weight), expected, rtol=0, atol=1e-5)
        assert orthogonality_error(one.rotation.weight) <= permitted_error(4, torch.float32)


def test_the_principal_part_is_that_of_the_singular_value_decomposition():
    layer = nn.Linear(12, 20, dtype=torch.float64)
    one = adapter("principal", layer)
    u, s, vh = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    torch.testing.assert_close(one.left @ one.right, u[:, :4] * s[:4] @ vh[:4])
    assert orthogonality_error(one.left) <= permitted_error(4, torch.float64) * 20
    names = {name for name, p in one.named_parameters() if p.requires_grad}
    assert names == {"after", "before", "rotation.parametrizations.weight.original0"}
    assert sum(p.numel() for p in one.parameters() if p.requires_grad) == 4 * 3 // 2 + 2 * 4


def test_frames_are_moved_by_optimizers_of_frames_alone():
    one = adapter("low_rank")
    one(drawn(2, 12)).sum().backward()
    with pytest.raises(OptimizerError, match="frame"):
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad]).step()
    free = adapter("low_rank by Cayley transforms")
    before = free.left.weight.detach().clone()
    optimizer = torch.optim.AdamW([p for p in free.parameters() if p.requires_grad], lr=0.05, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        free(drawn(2, 12)).square().sum().backward()
        optimizer.step()
    assert torch.dist(free.left.weight, before) > 0.01


@every_kind
def test_they_are_adapted_by_a_word_saved_loaded_exported_and_folded(kind: str):
    (made, options), word = KINDS[kind], kind.partition(" ")[0]
    layers = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4)).requires_grad_(False)
    model, other = (sk.nn.adapt(copy.deepcopy(layers), "0.weight", word, rank=4, **options) for _ in range(2))
    model, other = cast(Any, model), cast(Any, other)
    assert isinstance(model[0], made)
    trained(model[0])
    sk.nn.load_adapter_state(other, sk.nn.adapter_state(model))
    x = drawn(3, 12)
    assert torch.equal(other.eval()(x), model.eval()(x))
    with sk.nn.without_adapters(other):
        assert torch.equal(other[0](x), layers[0](x))
    exported: Any = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x), rtol=0, atol=1e-5)
    y = model(x)
    torch.testing.assert_close(sk.nn.fold(model)(x), y, rtol=0, atol=1e-5)
    assert type(model[0]) is nn.Linear


def test_a_change_that_is_not_finite_is_not_merged():
    one = adapter("low_rank")
    with torch.no_grad():
        one.spectrum.fill_(torch.inf)
    with pytest.raises(NonFiniteError, match="finite"):
        one.merge()


@pytest.mark.parametrize("made", [PrincipalAdapter, LowRankAdapter])
@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (nn.Linear(8, 4), {"rank": 5}),
        (nn.Conv2d(8, 4, 3), {}),
        (nn.Embedding(8, 4), {}),
        (nn.Linear(8, 4), {"rank": 2, "rnk": 3}),
    ],
)
def test_what_does_not_fit_is_refused(made: type, layer: nn.Module, options: Any):
    with pytest.raises(OptionError):
        made(layer, **options)
    assert all(p.requires_grad for p in layer.parameters())


def test_principal_vectors_need_a_finite_weight():
    layer = nn.Linear(6, 6)
    with torch.no_grad():
        layer.weight[1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="finite"):
        sk.nn.adapt(nn.Sequential(layer), "0", "principal", rank=2)
    assert layer.weight.requires_grad


def test_principal_vectors_need_a_weight_and_frames_none():
    class Packed(nn.Module):
        in_features, out_features, bias = 12, 20, None
        weight = torch.zeros(2, 3, dtype=torch.int8)

        def forward(self, x: Tensor) -> Tensor:
            return x.repeat(1, 2)[:, :20]

    with pytest.raises(OptionError, match="Packed"):
        adapter("principal", Packed())
    x = drawn(2, 12)
    one = adapter("low_rank", Packed())
    assert torch.equal(one(x), Packed()(x))
    assert trained(one).spectrum.abs().min() > 0
