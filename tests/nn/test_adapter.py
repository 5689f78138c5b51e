"""Adapters: what was there at first, a rotation of it after training, and one matrix for inference."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing import seeds

KINDS: dict[str, dict[str, Any]] = {
    "blocks": {"block_size": 4},
    "reflectors": {"parametrization": "householder", "reflections": 4},
    "blocks of reflectors": {"blocks": 3, "inner": "householder"},
    "one Cayley transform": {"parametrization": "cayley"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
both_sides = pytest.mark.parametrize("side", ["in", "out"])


def adapter(kind="blocks", side="in", dtype=torch.float32, **options) -> sk.nn.OrthogonalAdapter:
    return sk.nn.OrthogonalAdapter(nn.Linear(12, 24, dtype=dtype), side=side, **KINDS[kind], **options)


def train(one: nn.Module, steps: int = 3, lr: float = 0.05) -> Any:
    trained = [p for p in one.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        one(torch.randn(5, 12).to(next(one.parameters()).dtype)).float().pow(4).mean().backward()
        optimizer.step()
    return one


@every_kind
@both_sides
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_at_first_the_layer_does_what_it_did(kind, side, dtype):
    layer = nn.Linear(12, 24, dtype=dtype)
    x = torch.randn(3, 12, dtype=dtype)
    before = layer(x)
    after = sk.nn.OrthogonalAdapter(layer, side=side, **KINDS[kind])(x)
    assert after.dtype == before.dtype
    assert torch.dist(after.double(), before.double()) <= 4 * torch.finfo(dtype).eps * before.double().norm()


@every_kind
@both_sides
def test_only_the_rotation_is_trained_and_it_stays_one(kind, side):
    one = adapter(kind, side)
    frozen = copy.deepcopy(one.layer.state_dict())
    train(one)
    assert all(torch.equal(value, frozen[key]) for key, value in one.layer.state_dict().items())
    r = one.rotation.weight.detach()
    assert torch.dist(r, torch.eye(len(r))) > 0.05
    assert orthogonality_error(r).item() <= permitted_error(len(r), torch.float32)
    assert list(sk.drift(one)) == ["rotation.weight"]
    svdvals = torch.linalg.svdvals
    assert torch.allclose(svdvals(one.weight.detach()), svdvals(one.layer.weight), atol=1e-5)


@every_kind
@both_sides
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_one_rounding_away_and_unmerging_restores_every_bit(kind, side, dtype):
    one = train(adapter(kind, side, dtype)).eval()
    x, frozen = torch.randn(7, 12, dtype=dtype), one.layer.weight.clone()
    apart, keys = one(x), list(one.state_dict())
    w, r = frozen.double(), one.rotation.weight.detach().double()
    one.merge()
    assert torch.equal(one.merged, ((w @ r) if side == "in" else (r @ w)).to(dtype))
    eps = torch.finfo(dtype).eps
    assert torch.dist(one(x).double(), apart.double()) <= 6 * eps * apart.double().norm()
    assert list(one.state_dict()) == keys
    assert torch.equal(one.folded()(x), one(x))
    one.unmerge()
    assert torch.equal(one.layer.weight, frozen)
    assert torch.equal(one(x), apart)


def test_a_merged_adapter_that_loads_others_reads_theirs_and_cannot_be_trained():
    one, other = train(adapter()), train(adapter())
    one.merge()
    one.load_state_dict(other.state_dict())
    assert torch.equal(one.merged, other.weight)
    with pytest.raises(errors.OptionError, match=r"unmerge\(\)"):
        one(torch.zeros(1, 12))
    with torch.no_grad():
        assert torch.allclose(one(torch.zeros(1, 12)), other(torch.zeros(1, 12)))


def test_reflectors_that_start_in_pairs_are_the_identity_and_learn_along_other_axes_than_the_first():
    one = adapter("reflectors")
    r = one.rotation.weight
    assert torch.dist(r, torch.eye(12)) < 1e-6
    target = torch.randn(12, 12, generator=seeds.generator())
    (r * (target - target.mT)).sum().backward()
    reflectors = sk.coordinates(one.rotation, "weight")["reflectors"]
    optimizer = torch.optim.SGD([reflectors], lr=1e-2)
    optimizer.step()
    moved = one.rotation.weight.detach() - torch.eye(12)
    assert moved[4:, 4:].norm() > 0.2 * moved.norm()


def test_a_models_layers_are_adapted_by_pattern_and_folded_again():
    net = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3)))
    net.requires_grad_(False)
    x, before = torch.randn(2, 12), [module for module in net.modules() if isinstance(module, nn.Linear)]
    y = net(x)
    sk.nn.adapt(net, ["0.weight", "2.0.*"], block_size=4)
    assert list(sk.nn.adapters(net)) == ["0", "2.0"]
    assert torch.allclose(net(x), y, atol=1e-5)
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == 2 * 3 * 6
    train(net)
    kept = {key: value for key, value in net.state_dict().items() if ".rotation." in key}
    other = sk.nn.adapt(
        nn.Sequential(*(copy.deepcopy(m) for m in (before[0], nn.ReLU(), nn.Sequential(*before[1:])))),
        ["0.weight", "2.0.*"],
        block_size=4,
    )
    other.load_state_dict(kept, strict=False)
    assert torch.equal(other(x), net(x))
    y = net(x)
    sk.nn.fold(net)
    assert not sk.nn.adapters(net)
    assert torch.allclose(net(x), y, atol=1e-5)
    with pytest.raises(errors.UnknownNameError, match="fold"):
        sk.nn.fold(net)


def test_what_reads_the_weight_itself_is_adapted_too():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 4, 8)
    before = attention(x, x, x)[0]
    sk.nn.adapt(attention, "out_proj.weight", block_size=4)
    rotation: Any = attention.out_proj.rotation
    assert torch.allclose(attention(x, x, x)[0], before, atol=1e-6)
    attention(x, x, x)[0].pow(4).sum().backward()
    assert sk.coordinates(rotation, "weight")["skew"].grad is not None


@pytest.mark.parametrize("kind", ["blocks", "reflectors"])
def test_neither_kind_forms_its_rotation(kind):
    one = sk.nn.OrthogonalAdapter(nn.Linear(128, 4), **KINDS[kind])
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        one(torch.randn(2, 128)).sum().backward()
    assert max(sizes) < 128 * 128


def test_it_compiles_exports_and_copies():
    one = train(adapter()).eval()
    x = torch.randn(3, 12)
    exported: Any = torch.export.export(one, (x,)).module()
    assert torch.allclose(exported(x), one(x), atol=1e-6)
    assert torch.equal(copy.deepcopy(one)(x), one(x))


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 5},
        {"block_size": 4, "blocks": 3},
        {"parametrization": "cayley", "block_size": 4},
        {"side": "left"},
        {"blcks": 3},
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(options):
    net = nn.Sequential(nn.Linear(12, 12))
    with pytest.raises(errors.OptionError):
        sk.nn.adapt(net, "*", **options)
    assert isinstance(net[0], nn.Linear)
    assert all(p.requires_grad for p in net.parameters())


def test_only_layers_with_features_are_adapted():
    with pytest.raises(errors.UnknownNameError, match="in_features"):
        sk.nn.adapt(nn.Sequential(nn.Bilinear(2, 2, 3)), "*.weight")
    for layer, word in ((nn.Linear(2, 2, dtype=torch.complex64), "real dtype"), (nn.LayerNorm(3), "LayerNorm")):
        with pytest.raises(errors.DtypeError, match=word):
            sk.nn.OrthogonalAdapter(layer)


def test_an_adapter_that_would_train_nothing_is_refused():
    net = nn.Sequential(nn.Linear(37, 4)).requires_grad_(False)
    with pytest.raises(errors.OptionError, match="block_size"):
        sk.nn.adapt(net, "*.weight")
    for options in ({"block_size": 37}, {"parametrization": "householder"}):
        adapted = sk.nn.adapt(copy.deepcopy(net), "*.weight", **options)  # type: ignore[arg-type]
        assert any(p.requires_grad for p in adapted.parameters())


def test_a_lazy_layer_is_refused_with_the_remedy():
    with pytest.raises(errors.DtypeError, match="call the model"):
        sk.nn.adapt(nn.Sequential(nn.LazyLinear(8)), "*weight")
