"""Adapters: what was there at first, a rotation or a change of low rank after training, one matrix for inference."""

import copy
from typing import Any

import pytest
import torch
from moved_adapters import drawn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stiefelkit as sk
from stiefelkit.errors import DtypeError, NonFiniteError, OptimizerError, OptionError, StiefelkitError, UnknownNameError
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.nn import LowRankAdapter, OrthogonalAdapter, PrincipalAdapter
from stiefelkit.testing import seeds
from stiefelkit.weights.find import coordinate_manifolds

ROTATIONS: dict[str, dict[str, Any]] = {
    "blocks": {"block_size": 4},
    "reflectors": {"parametrization": "householder", "reflections": 4},
    "blocks of reflectors": {"blocks": 3, "inner": "householder"},
    "one Cayley transform": {"parametrization": "cayley"},
}
BUTTERFLIES: dict[str, dict[str, Any]] = {
    f"butterfly of {m}": {"parametrization": "butterfly", "block_size": 2, "factors": m} for m in (1, 2)
}
LOW_RANK: dict[str, dict[str, Any]] = {
    "principal": {"parametrization": "principal", "rank": 4},
    "principal by reflectors": {"parametrization": "principal", "rank": 4, "inner": "householder", "reflections": 2},
    "principal without diagonals": {"parametrization": "principal", "rank": 4, "diagonals": False},
    "low_rank": {"parametrization": "low_rank", "rank": 4},
    "low_rank by Cayley transforms": {"parametrization": "low_rank", "rank": 4, "inner": "cayley"},
}
KINDS = ROTATIONS | BUTTERFLIES | LOW_RANK
CASES = [(kind, {}) for kind in KINDS] + [(kind, {"side": "out"}) for kind in ROTATIONS]
every_case = pytest.mark.parametrize(("kind", "more"), CASES, ids=lambda part: part if isinstance(part, str) else "")
every_rank = pytest.mark.parametrize("kind", LOW_RANK)


def adapter(kind: str, layer: nn.Module | None = None, **more: Any) -> Any:
    model: Any = nn.Sequential(nn.Linear(12, 24) if layer is None else layer)
    return sk.nn.adapt(model, "0", **KINDS[kind], **more)[0]  # type: ignore[index]


def trained(one: Any, steps: int = 4) -> Any:
    """Trains what is free by Adam, frames by an optimizer of frames."""
    moves = sk.optim.CayleyAdam if coordinate_manifolds(one) else torch.optim.Adam
    optimizer = moves(sk.optim.parameter_groups(one, lr=0.05))
    dtype = next(one.layer.parameters(), torch.empty(0)).dtype
    for step in range(steps):
        optimizer.zero_grad()
        y = one(drawn(5, 12, key=step).to(dtype)).float()
        (y - drawn(5, 24, key=50)).square().mean().backward()
        optimizer.step()
    return one


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_at_first_the_layer_does_what_it_did(kind: str, more: Any, dtype: torch.dtype):
    layer = nn.Linear(12, 24, dtype=dtype)
    x = drawn(3, 12).to(dtype)
    before = layer(x)
    after = adapter(kind, layer, **more)(x)
    assert after.dtype == before.dtype
    if kind in LOW_RANK and "reflectors" not in kind:  # whose product is the identity but for rounding
        assert torch.equal(after, before)
    assert torch.dist(after.double(), before.double()) <= 8 * torch.finfo(dtype).eps * before.double().norm()


@every_case
def test_only_the_adapter_is_trained_and_its_frames_stay_frames(kind: str, more: Any):
    one = adapter(kind, **more)
    frozen = copy.deepcopy(one.layer.state_dict())
    trained(one)
    assert all(p.requires_grad == (not name.startswith("layer.")) for name, p in one.named_parameters())
    assert all(p.grad is not None and p.grad.any() for p in one.parameters() if p.requires_grad)
    assert all(torch.equal(value, frozen[key]) for key, value in one.layer.state_dict().items())
    assert all(drift.bits_lost < 1 for drift in sk.drift(one).values())
    if kind in ROTATIONS:
        assert torch.dist(one.rotation.matrix, torch.eye(24 if more else 12)) > 0.05
        s, before = (torch.linalg.svdvals(w.detach()) for w in (one.weight, one.layer.weight))
        assert torch.allclose(s, before, atol=1e-5)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_one_rounding_away_and_unmerging_restores_every_bit(kind: str, more: Any, dtype: torch.dtype):
    one = trained(adapter(kind, nn.Linear(12, 24, dtype=dtype), **more)).eval()
    x, frozen = drawn(7, 12).to(dtype), one.layer.weight.clone()
    apart, keys = one(x), list(one.state_dict())
    assert torch.dist(apart, one.layer(x)) > 0.01 * apart.norm()
    one.merge()
    if kind in ROTATIONS:
        w, r = frozen.double(), one.rotation.weight.detach().double()
        assert torch.equal(one.merged, ((r @ w) if more else (w @ r)).to(dtype))
    assert torch.dist(one(x).double(), apart.double()) <= 12 * torch.finfo(dtype).eps * apart.double().norm()
    assert torch.equal(one.folded()(x), one(x))
    assert list(one.state_dict()) == keys
    one.unmerge()
    assert torch.equal(one(x), apart)
    assert torch.equal(one.layer.weight, frozen)


@every_case
def test_adapters_are_saved_loaded_and_folded(kind: str, more: Any):
    layers = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4)).requires_grad_(False)
    model, other = (sk.nn.adapt(copy.deepcopy(layers), "0.weight", **KINDS[kind], **more) for _ in range(2))
    trained(model[0])  # type: ignore[index]
    sk.nn.load_adapter_state(other, sk.nn.adapter_state(model))
    x = drawn(3, 12)
    y = model.eval()(x)
    assert torch.equal(other.eval()(x), y)
    with sk.nn.without_adapters(other):
        assert torch.equal(other(x), layers(x))
    torch.testing.assert_close(sk.nn.fold(model)(x), y, rtol=0, atol=1e-5)
    assert [type(layer) for layer in model.children()] == [nn.Linear, nn.ReLU, nn.Linear]


def test_a_merged_adapter_that_loads_others_reads_theirs_and_cannot_be_trained():
    one, other = trained(adapter("blocks")), trained(adapter("blocks"))
    one.merge()
    one.load_state_dict(other.state_dict())
    assert torch.equal(one.merged, other.weight)
    with pytest.raises(OptionError, match=r"unmerge\(\)"):
        one(torch.zeros(1, 12))
    with torch.no_grad():
        assert torch.allclose(one(torch.zeros(1, 12)), other(torch.zeros(1, 12)))


def test_reflectors_that_start_in_pairs_are_the_identity_and_learn_along_other_axes_than_the_first():
    one = adapter("reflectors")
    r = one.rotation.weight
    assert torch.dist(r, torch.eye(12)) < 1e-6
    target = torch.randn(12, 12, generator=seeds.generator())
    (r * (target - target.mT)).sum().backward()
    torch.optim.SGD([sk.coordinates(one.rotation, "weight")["reflectors"]], lr=1e-2).step()
    moved = one.rotation.weight.detach() - torch.eye(12)
    assert moved[4:, 4:].norm() > 0.2 * moved.norm()


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
def test_neither_kind_forms_its_rotation(kind: str):
    one = OrthogonalAdapter(nn.Linear(128, 4), **ROTATIONS[kind])
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        one(torch.randn(2, 128)).sum().backward()
    assert max(sizes) < 128 * 128


REFUSED: list[tuple[nn.Module, dict[str, Any], type[StiefelkitError]]] = [
    (nn.Linear(12, 12), {"block_size": 5}, OptionError),
    (nn.Linear(12, 12), {"block_size": 4, "blocks": 3}, OptionError),
    (nn.Linear(12, 12), {"parametrization": "cayley", "block_size": 4}, OptionError),
    (nn.Linear(12, 12), {"side": "left"}, OptionError),
    *((nn.Linear(12, 12), {"name": name}, OptionError) for name in ("", 3, ["a"])),
    (nn.Linear(12, 12), {"blcks": 3}, OptionError),
    (nn.Linear(37, 4), {}, OptionError),  # would train nothing
    (nn.Linear(12, 12), {"shared": True, "parametrization": "cayley"}, OptionError),
    (nn.Linear(12, 12), {"shared": True, "blocks": 5}, OptionError),
    (nn.Linear(12, 12), {"bound": 0.0}, OptionError),
    (nn.Linear(12, 12), {"bound": 0.1, "inner": "householder"}, OptionError),
    (nn.Linear(12, 12), {"dropout": 1.5}, OptionError),
    (nn.Embedding(5, 8), {"side": "in", "block_size": 4}, OptionError),
    (nn.Linear(8, 8), {"side": "patches", "block_size": 4}, OptionError),
    (nn.ConvTranspose2d(8, 8, 3), {"side": "patches", "block_size": 4}, OptionError),
    (nn.Conv2d(8, 8, 3, groups=2), {"side": "patches", "block_size": 4}, OptionError),
    (nn.Linear(16, 4), {"parametrization": "butterfly", "factors": 4}, OptionError),
    (nn.Linear(16, 4), {"parametrization": "butterfly", "factors": 2, "block_size": 1}, OptionError),
    (nn.Linear(16, 4), {"parametrization": "butterfly", "block_size": 3}, OptionError),
    (nn.Linear(16, 4), {"parametrization": "butterfly", "side": "out"}, OptionError),
    (nn.Linear(16, 4), {"parametrization": "butterfly", "foo": 1}, OptionError),
    *(
        case
        for word in ("principal", "low_rank")
        for case in (
            (nn.Linear(8, 4), {"parametrization": word, "rank": 5}, OptionError),
            (nn.Conv2d(8, 4, 3), {"parametrization": word}, OptionError),
            (nn.Embedding(8, 4), {"parametrization": word}, OptionError),
            (nn.Linear(8, 4), {"parametrization": word, "rank": 2, "rnk": 3}, OptionError),
        )
    ),
    (nn.Bilinear(2, 2, 3), {}, UnknownNameError),
    (nn.Linear(2, 2, dtype=torch.complex64), {}, DtypeError),
    (nn.LazyLinear(8), {}, DtypeError),
]


@pytest.mark.parametrize(("layer", "options", "error"), REFUSED, ids=lambda part: str(part)[:60])
def test_what_does_not_fit_is_refused_and_changes_nothing(layer: nn.Module, options: Any, error: Any):
    net = nn.Sequential(layer)
    with pytest.raises(error):
        sk.nn.adapt(net, "*weight", **options)
    assert net[0] is layer
    assert all(p.requires_grad for p in net.parameters())


def test_features_without_a_divisor_are_rotated_as_a_whole_or_by_reflectors():
    for options in ({"block_size": 37}, {"parametrization": "householder"}):
        adapted = sk.nn.adapt(nn.Sequential(nn.Linear(37, 4)).requires_grad_(False), "*", **options)  # type: ignore[arg-type]
        assert any(p.requires_grad for p in adapted.parameters())


# Butterflies


def butterfly(factors: int, side: str = "in", is_moved: bool = True, **options: Any) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(seeds.seed())
    layer = nn.Linear(16, 6) if side == "in" else nn.Conv2d(4, 6, 2)
    x = drawn(5, 16) if side == "in" else drawn(3, 4, 5, 5)
    one = sk.nn.ButterflyAdapter(copy.deepcopy(layer), block_size=4, factors=factors, side=side, **options)
    with torch.no_grad():
        for key, p in enumerate(one.parameters()):
            if p.requires_grad and is_moved:
                p.add_(0.3 * drawn(*p.shape, key=key + 1))
    return layer, one, x


@pytest.mark.parametrize("factors", [1, 2, 3])
@pytest.mark.parametrize("side", ["in", "patches"])
@pytest.mark.parametrize("scaled", [True, False])
def test_one_matrix_does_what_the_factors_do_and_is_loaded_on_meta(factors: int, side: str, scaled: bool):
    options: Any = {"factors": factors, "side": side, "scaled": scaled}
    layer, fresh, x = butterfly(**options, is_moved=False)
    torch.testing.assert_close(fresh(x), layer(x), rtol=0, atol=2e-6)
    layer, one, x = butterfly(**options)
    assert torch.dist(one(x), layer(x)) > 0.1 * layer(x).norm()
    r = one.rotation.matrix.double()
    assert torch.dist(r.mT @ r, torch.eye(16).double()) <= 2e-6
    assert ((r.abs() > 0).sum(1) == 2 ** (factors + 1)).all()  # more factors mix more blocks
    w = layer.weight.double().flatten(1) @ r
    w = w * one.scale[:, None] if scaled else w
    torch.testing.assert_close(one.weight.double().flatten(1), w, rtol=0, atol=1e-6)
    torch.testing.assert_close(one.folded()(x), one(x), rtol=0, atol=4e-6)
    on_meta = sk.nn.ButterflyAdapter(copy.deepcopy(layer).to("meta"), block_size=4, **options)
    for other in (on_meta, copy.deepcopy(one).to("meta")):
        other.to_empty(device="cpu").load_state_dict(one.state_dict())
        assert torch.equal(other(x), one(x))
        assert torch.equal(other.rotation.matrix, one.rotation.matrix)


# Low rank


@every_rank
def test_the_change_has_the_rank(kind: str):
    one = trained(adapter(kind), 20)
    s = torch.linalg.svdvals((one.weight - one.layer.weight).detach())
    assert s[3] > 1e-4 * s[0]
    assert s[4] < 1e-5 * s[0]
    if kind == "low_rank":
        assert torch.allclose(s[:4], one.spectrum.detach().abs().sort(descending=True).values, atol=1e-6)
    if kind == "principal without diagonals":
        expected = torch.linalg.svdvals(one.layer.weight)
        torch.testing.assert_close(torch.linalg.svdvals(one.weight), expected, rtol=0, atol=1e-5)
        assert orthogonality_error(one.rotation.weight) <= permitted_error(4, torch.float32)


def test_the_principal_part_is_that_of_the_singular_value_decomposition():
    layer = nn.Linear(12, 24, dtype=torch.float64)
    one = adapter("principal", layer)
    u, s, vh = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
    torch.testing.assert_close(one.left @ one.right, u[:, :4] * s[:4] @ vh[:4])
    assert orthogonality_error(one.left) <= permitted_error(4, torch.float64) * 20
    names = {name for name, p in one.named_parameters() if p.requires_grad}
    assert names == {"after", "before", "rotation.parametrizations.weight.original0"}
    assert sum(p.numel() for p in one.parameters() if p.requires_grad) == 4 * 3 // 2 + 2 * 4


def test_frames_are_moved_by_optimizers_of_frames_alone_and_coordinates_by_any():
    one, free = adapter("low_rank"), adapter("low_rank by Cayley transforms")
    one(drawn(2, 12)).sum().backward()
    with pytest.raises(OptimizerError, match="frame"):
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad]).step()
    before = free.left.weight.detach().clone()
    assert torch.dist(trained(free).left.weight, before) > 0.01


def test_a_change_or_a_weight_that_is_not_finite_is_refused():
    one = adapter("low_rank")
    with torch.no_grad():
        one.spectrum.fill_(torch.inf)
    with pytest.raises(NonFiniteError):
        one.merge()
    layer = nn.Linear(6, 6)
    with torch.no_grad():
        layer.weight[1, 2] = torch.nan
    with pytest.raises(NonFiniteError):
        sk.nn.adapt(nn.Sequential(layer), "0", "principal", rank=2)
    assert layer.weight.requires_grad


def test_principal_vectors_need_a_weight_and_frames_none():
    class Packed(nn.Module):
        in_features, out_features, bias = 12, 24, None
        weight = torch.zeros(2, 3, dtype=torch.int8)

        def forward(self, x: Tensor) -> Tensor:
            return x.repeat(1, 2)[:, :24]

    with pytest.raises(OptionError, match="Packed"):
        PrincipalAdapter(Packed(), rank=4)
    x, one = drawn(2, 12), LowRankAdapter(Packed(), rank=4)
    assert torch.equal(one(x), Packed()(x))
    assert trained(one).spectrum.abs().min() > 0


SWITCHES: dict[str, Any] = {
    "use_adapters": lambda net: sk.nn.use_adapters(net, "a"),
    "none": lambda net: sk.nn.use_adapters(net, ()),
    "merge": lambda net: [net.eval(), *(one.merge() for one in sk.nn.adapters(net).values())],
    "adapt": lambda net: sk.nn.adapt(net, "0", block_size=4, name="c"),
}


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("parametrization", ["block_diagonal", "low_rank"])
def test_a_checkpoint_computes_anew_what_was_on_or_is_refused(parametrization, use_reentrant):
    def net_and_output() -> Any:
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        for name in "ab":
            sk.nn.adapt(net, ["0", "2"], parametrization, name=name)
        x = torch.randn(3, 8, requires_grad=True)
        output: Any = checkpoint(net, x, use_reentrant=use_reentrant)
        return net, x, output.pow(3).sum()

    for switch in SWITCHES.values():
        net, _, y = net_and_output()
        switch(net)
        with pytest.raises(OptionError, match="backward"):
            y.backward()
    net, x, _ = net_and_output()
    for _ in range(100):  # more than are remembered
        with sk.nn.without_adapters(net), torch.no_grad():
            net(x)
        expected = torch.autograd.grad(net(x).pow(3).sum(), x)[0]
        x.grad = torch.zeros_like(x)
        output: Any = checkpoint(net, x, use_reentrant=use_reentrant)
        output.pow(3).sum().backward()
        assert torch.equal(x.grad, expected)

    def switching(x: Tensor) -> Tensor:
        sk.nn.use_adapters(net, "a")
        y = net(x)
        sk.nn.use_adapters(net, "b")
        return net(y).pow(3).sum()

    expected = torch.autograd.grad(switching(x), x)[0]
    x.grad = torch.zeros_like(x)
    output = checkpoint(switching, x, use_reentrant=use_reentrant)
    output.backward()
    assert torch.equal(x.grad, expected)
