"""Adapters of any frozen layer: it does at first what it did, is merged where it is W x + b, and refused elsewhere."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from moved_adapters import drawn, turned
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.errors import ImageError, NonFiniteError, OptionError, UnknownNameError
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.nn import OrthogonalAdapter, adapt, fold
from stiefelkit.testing import seeds

CLOSE = 4e-6


class Conv1D(nn.Module):
    """Stands in for the class of this name in transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(drawn(nx, nf)), nn.Parameter(drawn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Quantized(nn.Module):
    """Holds integers and scales, as quantized layers do, and no parameter."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("scale", torch.full((out_features, 1), 0.01))
        self.register_buffer("weight", (30 * drawn(out_features, in_features)).round().to(torch.int8))
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return F.linear(x, weight.to(x.dtype) * self.scale)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked() -> nn.Module:
    layer: Any = nn.Linear(8, 8)
    layer.register_forward_hook(lambda module, args, y: 2 * y)
    return layer


def faking_quantization() -> nn.Module:
    from torch.ao.nn.qat import Linear
    from torch.ao.quantization import get_default_qat_qconfig

    return Linear(8, 8, qconfig=get_default_qat_qconfig("fbgemm"))


def image(*sizes: int) -> Callable[[], Tensor]:
    return lambda: drawn(2, 8, *sizes)


MERGED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[str, ...]]] = {
    "Linear": (lambda: nn.Linear(8, 16), lambda: drawn(3, 8), ("in", "out")),
    "Conv1D": (lambda: Conv1D(16, 8), lambda: drawn(3, 5, 8), ("in", "out")),
    "Conv1d": (lambda: nn.Conv1d(8, 16, 3), image(9), ("in", "out", "patches")),
    "Conv2d": (lambda: nn.Conv2d(8, 16, 3, stride=2, padding=1), image(9, 7), ("in", "out", "patches")),
    "Conv2d, reflected": (
        lambda: nn.Conv2d(8, 16, 3, padding=1, padding_mode="reflect", bias=False),
        image(9, 7),
        ("in", "out", "patches"),
    ),
    "Conv3d": (lambda: nn.Conv3d(8, 16, 2), image(4, 3, 3), ("in", "out", "patches")),
    "Embedding": (lambda: nn.Embedding(11, 16, padding_idx=0), lambda: torch.arange(11), ("out",)),
}
UNMERGED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[str, ...], str]] = {
    "integers": (lambda: Quantized(8, 16), lambda: drawn(3, 8), ("in", "out"), "Quantized"),
    "groups": (lambda: nn.Conv2d(8, 16, 3, groups=4), image(5, 5), ("in", "out"), "groups"),
    "transposed": (lambda: nn.ConvTranspose2d(8, 16, 3), image(5, 5), ("in", "out"), "forward"),
    "bag": (lambda: nn.EmbeddingBag(11, 16), lambda: torch.arange(10).view(2, 5), ("out",), "forward"),
    "max_norm": (lambda: nn.Embedding(11, 16, max_norm=1.0), lambda: torch.arange(11), ("out",), "max_norm"),
    "parametrized": (
        lambda: sk.orthogonal(nn.Conv2d(8, 16, 3), "weight", view="out_by_rest"),
        image(5, 5),
        ("in", "out"),
        "bake",
    ),
    "hooks": (hooked, lambda: drawn(3, 8), ("in", "out"), "hooks"),
    "a forward of its own": (lambda: Doubled(8, 8), lambda: drawn(3, 8), ("in", "out"), "does more"),
    "fake quantization": (faking_quantization, lambda: drawn(3, 8), ("in", "out"), "Linear"),
}
CASES = [(kind, side) for kind, (_, _, sides) in MERGED.items() for side in sides]
STRANGE = [(kind, side) for kind, (_, _, sides, _) in UNMERGED.items() for side in sides]


@pytest.mark.parametrize(("kind", "side"), CASES)
def test_a_layer_does_what_it_did_then_what_its_matrix_does(kind: str, side: str):
    make, draw, _ = MERGED[kind]
    layer, x = make(), draw()
    before = layer(x)
    adapter: Any = OrthogonalAdapter(layer, side=side, block_size=4)
    torch.testing.assert_close(adapter(x), before, rtol=0, atol=CLOSE)
    frozen = layer.weight.detach().clone()  # type: ignore[union-attr]
    apart = turned(adapter).eval()(x)
    assert torch.dist(apart, before) > 0.05 * before.norm()
    adapter.merge()
    torch.testing.assert_close(adapter(x), apart, rtol=0, atol=CLOSE)
    assert adapter.merged.shape == frozen.shape
    plain = adapter.folded()
    assert type(plain) is type(layer)
    assert all(p.is_contiguous() for p in plain.parameters())
    torch.testing.assert_close(plain(x), apart, rtol=0, atol=CLOSE)
    adapter.unmerge()
    assert torch.equal(adapter(x), apart)
    assert torch.equal(layer.weight, frozen)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "side"), STRANGE)
def test_what_computes_no_matrix_is_adapted_trained_and_not_merged(kind: str, side: str):
    make, draw, _, word = UNMERGED[kind]
    layer, x = make().eval(), draw()
    before = layer(x).detach()
    model: Any = sk.nn.adapt(nn.Sequential(layer), ["0"], side=side, block_size=4).eval()
    torch.testing.assert_close(model(x), before, rtol=0, atol=CLOSE)
    model(x).pow(3).sum().backward()
    skew = sk.coordinates(model[0].rotation, "weight")["skew"]
    assert skew.grad is not None
    assert skew.grad.norm() > 0
    assert [p for p in model.parameters() if p.requires_grad] == [skew]
    apart, state = turned(model)(x), copy.deepcopy(model.state_dict())
    for act in (model[0].merge, model[0].folded, lambda: sk.nn.fold(model)):
        with pytest.raises(OptionError, match=word):
            act()
    assert isinstance(model[0], OrthogonalAdapter)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(x), apart)


def test_all_layers_are_checked_before_the_first_is_changed():
    model = nn.Sequential(nn.Linear(8, 8), nn.Embedding(5, 8), nn.Linear(8, 8))
    with pytest.raises(OptionError, match="reads indices"):
        sk.nn.adapt(model, "*", block_size=4)
    assert not sk.nn.adapters(model)
    assert all(p.requires_grad for p in model.parameters())


def test_code_that_asks_an_adapter_for_its_layer_is_answered():
    adapter: Any = OrthogonalAdapter(nn.Conv2d(8, 16, 3, stride=2), block_size=4)
    assert (adapter.in_features, adapter.out_features, adapter.in_channels) == (8, 16, 8)
    assert adapter.stride == (2, 2)
    assert OrthogonalAdapter(nn.Embedding(5, 8), side="out").num_embeddings == 5
    with pytest.raises(AttributeError, match="no attribute 'strid'"):
        _ = adapter.strid


def test_shared_blocks_are_one_block():
    adapter = turned(OrthogonalAdapter(nn.Linear(12, 6), block_size=4, shared=True)).eval()
    assert sum(p.numel() for p in adapter.parameters() if p.requires_grad) == 6
    x = drawn(3, 12)
    q = adapter.rotation.weight
    r = torch.block_diag(q, q, q)
    torch.testing.assert_close(adapter(x), F.linear(x @ r.mT, adapter.layer.weight, adapter.layer.bias))
    apart = adapter(x)
    adapter.merge()
    torch.testing.assert_close(adapter(x), apart, rtol=0, atol=CLOSE)
    assert list(sk.drift(adapter)) == ["rotation.weight"]


@pytest.mark.parametrize(
    "options", [{"block_size": 4}, {"block_size": 4, "shared": True}, {"parametrization": "cayley"}]
)
def test_a_bound_holds_whatever_the_coordinates_are_and_leaves_small_rotations_alone(options: dict[str, Any]):
    layer, free = nn.Linear(12, 6), OrthogonalAdapter(nn.Linear(12, 6), **options)
    bounded = OrthogonalAdapter(layer, bound=0.5, **options)
    eye = torch.eye(12)
    for scale in (1.0, 1e4):
        r = turned(bounded, scale).rotation.matrix
        assert 0.25 < torch.dist(r, eye) <= 0.5 + 1e-6
        assert orthogonality_error(bounded.rotation.weight) <= permitted_error(12, torch.float32)
    assert torch.equal(turned(bounded, 1e-3).rotation.matrix, turned(free, 1e-3).rotation.matrix)
    rotation: Any = bounded.rotation
    with pytest.raises(ImageError, match="bound"):
        rotation.weight = -torch.eye(len(rotation.weight))


def test_dropout_leaves_whole_blocks_alone_with_its_chance_and_only_in_training():
    options: Any = {"block_size": 2, "dropout": 0.25}
    net = sk.nn.adapt(nn.Sequential(nn.Linear(16, 4)).eval(), "*", **options)
    assert not any(m.training for m in net.modules())
    adapter = turned(OrthogonalAdapter(nn.Linear(400, 400, bias=False), **options))
    with torch.no_grad():
        adapter.layer.weight.copy_(torch.eye(400))
    x = drawn(3, 400)
    moved = adapter.eval()(x)
    assert torch.equal(moved, adapter(x))
    torch.manual_seed(seeds.seed(0))
    y = adapter.train()(x)
    is_x, is_moved = ((y - z).view(3, 200, 2).abs().amax((0, 2)) < 1e-6 for z in (x, moved))
    assert bool((is_x | is_moved).all())
    assert 20 <= is_x.sum() <= 80  # of 200, of which a quarter is 50 with a deviation of 6


class Respelled(nn.Linear):
    """Another forward, the same function."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + self.bias


@pytest.mark.parametrize("side", ["in", "out"])
def test_a_forward_that_only_spells_the_product_in_another_way_is_folded(side: str):
    model: Any = turned(adapt(nn.Sequential(Respelled(8, 8)), "*.weight", block_size=4, side=side)).eval()
    x = drawn(3, 8)
    before = model(x)
    torch.testing.assert_close(fold(model)(x), before, rtol=0, atol=CLOSE)


def test_a_rotation_is_not_adapted_and_goes_on_training():
    model: Any = adapt(nn.Sequential(nn.Linear(8, 8)), "*.weight", block_size=4)
    with pytest.raises(UnknownNameError, match="adapter"):
        adapt(model, "*.rotation.weight", block_size=4)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "0.rotation.parametrizations.weight.original0"
    ]


def test_a_tied_embedding_that_trains_is_not_frozen_by_its_other_name():
    model: Any = nn.ModuleDict({"embedding": nn.Embedding(9, 8), "head": nn.Linear(8, 9, bias=False)})
    model["head"].weight = model["embedding"].weight
    with pytest.raises(OptionError, match=r"embedding\.weight"):
        adapt(model, "head.weight", block_size=4)
    assert model.embedding.weight.requires_grad
    assert isinstance(model.head, nn.Linear)
    assert isinstance(adapt(model.requires_grad_(False), "head.weight", block_size=4).head, OrthogonalAdapter)


def test_a_rotation_that_is_not_finite_is_not_folded_into_a_frozen_weight():
    model: Any = adapt(nn.Sequential(nn.Linear(8, 8)), "*.weight", block_size=4)
    weight = model[0].layer.weight.clone()
    with torch.no_grad():
        sk.coordinates(model[0].rotation, "weight")["skew"].fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="finite"):
        fold(model)
    assert torch.equal(model[0].layer.weight, weight)


def test_merging_in_inference_mode_leaves_a_weight_that_inputs_have_gradients_by():
    adapter = OrthogonalAdapter(nn.Linear(8, 8), block_size=4).eval()
    with torch.inference_mode():
        adapter.merge()
    x = drawn(2, 8).requires_grad_()
    adapter(x).sum().backward()
    assert x.grad is not None
