"""Rotations that are folded into the layers around them leave the function as it was."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors, init
from stiefelkit.testing import seeds

R = init.haar((8, 8), generator=seeds.generator())


class Residual(nn.Module):
    """An embedding, two blocks that read and write a residual stream, and a read-out."""

    def __init__(self, n=16):
        super().__init__()
        self.embedding = nn.Embedding(10, n)
        self.up: Any = nn.ModuleList(nn.Linear(n, 3 * n) for _ in range(2))
        self.down: Any = nn.ModuleList(nn.Linear(3 * n, n) for _ in range(2))
        self.head = nn.Linear(n, 10, bias=False)
        self.norm = nn.RMSNorm(n, elementwise_affine=False)

    def forward(self, tokens):
        h = self.embedding(tokens)
        for up, down in zip(self.up, self.down, strict=True):
            h = h + down(torch.relu(up(self.norm(h))))
        return self.head(self.norm(h))

    def rotate(self, r):
        rotate(r, self, [self.embedding, *self.down], [*self.up, self.head])


def rotate(r, model, writers, readers=(), norms=None, **inputs):
    """Folds R into layers of a model."""
    sites = sk.nn.RotationSites(model, norms or {}, writers, readers=readers, inputs=inputs or None)
    sk.nn.rotate_(r, sites=sites)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_function_is_the_same(is_tied):
    net, tokens = Residual().double(), torch.arange(10)
    if is_tied:
        net.head.weight = net.embedding.weight
    r = init.haar((16, 16), generator=seeds.generator())
    before, weight = net(tokens), net.down[0].weight.clone()
    net.rotate(r)
    assert torch.allclose(net(tokens), before, atol=1e-12)
    assert torch.allclose(net.down[0].weight, r @ weight)
    net.rotate(r.mT)
    assert torch.allclose(net.down[0].weight, weight, atol=1e-13)


def test_what_does_not_fit_is_refused_before_anything_is_written():
    good, narrow = nn.Linear(4, 4), nn.Linear(3, 4)
    before = good.weight.detach().clone()
    r = init.haar((4, 4), generator=seeds.generator()).float()
    for error, given, readers in (
        (errors.ShapeError, r, [good, narrow]),
        (errors.DtypeError, r, [good, nn.Conv1d(4, 4, 1)]),
        (errors.NotAFrameError, 2 * r, [good]),
        (errors.ShapeError, r[:, :2], [good]),
        (errors.DtypeError, r, [good, sk.orthogonal(nn.Linear(4, 4), "weight")]),
    ):
        net = nn.Sequential(nn.Linear(2, 4), *readers)
        with pytest.raises(error):
            rotate(given, net, [net[0]], readers)
    assert torch.equal(good.weight, before)


class Rectified(nn.Linear):
    def forward(self, input):
        return super().forward(input + 1).relu()


class Squared(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x) ** 2


def hooked(hook):
    layer = nn.Linear(8, 3)
    hook(layer)
    return layer


def patched():
    layer = nn.Linear(8, 3)
    forward = layer.forward
    layer.forward = lambda input: forward(input).relu()
    return layer


MORE = {
    "before it": (nn.RMSNorm, lambda: hooked(lambda m: m.register_forward_pre_hook(lambda _, args: args[0].relu()))),
    "after it": (nn.RMSNorm, lambda: hooked(lambda m: m.register_forward_hook(lambda _, args, y: y.relu()))),
    "a forward of the class": (nn.RMSNorm, lambda: Rectified(8, 3)),
    "a forward of the instance": (nn.RMSNorm, patched),
    "a norm": (Squared, lambda: nn.Linear(8, 3)),
}


@pytest.mark.parametrize("what", MORE)
def test_layers_and_norms_that_do_more_are_refused_and_nothing_is_written(what):
    norm, layer = (make(*sizes) for make, sizes in zip(MORE[what], ((8,), ()), strict=True))
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    before = copy.deepcopy([norm.state_dict(), layer.state_dict()])
    net = nn.Sequential(nn.Embedding(5, 8), norm, layer)
    for act in (
        lambda: sk.nn.absorb_norm_(norm, [layer]),
        lambda: rotate(R, net, [net[0]], norms={norm: [layer]}),
    ):
        with pytest.raises(errors.OptionError):
            act()
    after = [norm.state_dict(), layer.state_dict()]
    assert all(torch.equal(a[key], b[key]) for a, b in zip(after, before, strict=True) for key in b)
    for readers in ([nn.Linear(8, 3), nn.Linear(4, 3)], [nn.Linear(4, 3)]):
        with pytest.raises(errors.ShapeError):
            sk.nn.absorb_norm_(nn.RMSNorm(8), readers)


def test_a_layer_inside_an_adapter_is_refused():
    net: Any = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 5)).requires_grad_(False)
    sk.nn.adapt(net, "1.weight", block_size=4)
    with pytest.raises(errors.OptionError, match="fold"):
        rotate(R, net, [net[0]], [net[1].layer])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_is_absorbed_by_what_reads_it(kind, has_bias):
    norm, readers = kind(8).double(), [nn.Linear(8, n, bias=has_bias).double() for n in (3, 5)]
    torch.manual_seed(seeds.seed(1))
    for p in norm.parameters():
        nn.init.normal_(p)
    x = torch.randn(4, 8, dtype=torch.float64)
    before = [layer(norm(x)) for layer in readers]
    sk.nn.absorb_norm_(norm, [*readers, readers[0]])  # which takes it once
    for layer, y in zip(readers, before, strict=True):
        assert torch.allclose(layer(norm(x)), y, atol=1e-13)
    assert torch.equal(norm.weight, torch.ones(8, dtype=torch.float64))
    assert getattr(norm, "bias", None) is None or not norm.bias.any()


class Normed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(6, 8), kind(8), nn.Linear(8, 3, bias=False)
        for p in self.norm.parameters():
            nn.init.normal_(p)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_norms_in_a_model_are_folded_where_they_are_named_and_refused_where_they_are_forgotten(kind):
    net: Any = Normed(kind).double()
    tokens, norms = torch.arange(6), {net.norm: [net.head]}
    before = net(tokens)
    with pytest.raises(errors.OptionError, match="norm"):
        rotate(R, net, [net.embed], [net.head])
    assert torch.equal(net(tokens), before)
    rotate(R, net, [net.embed], norms=norms)
    assert isinstance(net.norm, nn.RMSNorm)
    assert torch.equal(net.norm.weight, torch.ones(8))
    assert torch.allclose(net(tokens), before, atol=1e-12)


def test_a_layer_that_reads_and_writes_gets_both_products_and_one_weight_in_two_roles_becomes_two():
    net, x = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)).double(), torch.randn(5, 3)
    layer: Any = net[1]
    w, b = layer.weight.detach().clone(), layer.bias.detach().clone()
    rotate(R, net, [net[0], layer], [layer, net[2]], input=x)
    torch.testing.assert_close(layer.weight, R @ w @ R.mT)
    torch.testing.assert_close(layer.bias, R @ b)
    writer, reader = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
    writer.weight = reader.weight
    w = reader.weight.detach().clone()
    rotate(R, nn.Sequential(writer, reader), [writer], [reader], input=torch.randn(5, 8))
    torch.testing.assert_close(writer.weight, R @ w)
    torch.testing.assert_close(reader.weight, w @ R.mT)


@pytest.mark.parametrize(("n", "options"), [(12, {}), (28, {"block": 4}), (24, {"order": "fast_hadamard_transform"})])
def test_a_hadamard_layer_is_the_layer_with_the_transform_in_its_weight(n, options):
    layer, x = nn.Linear(n, 5).double(), torch.randn(3, n, dtype=torch.float64)
    online = sk.nn.HadamardLinear.around(copy.deepcopy(layer), **options)
    with torch.no_grad():
        online.weight.copy_(sk.functional.hadamard_transform(layer.weight, **options))
    assert torch.allclose(online(x), layer(x), atol=1e-13)
    online.load_state_dict(online.state_dict())
    other = sk.nn.HadamardLinear(n, 5, dtype=torch.float64, block=2)
    with pytest.raises(errors.CheckpointError, match="hadamard"):
        other.load_state_dict(online.state_dict())


@pytest.mark.parametrize("n", [80, 2048])
def test_a_rotation_that_a_float32_root_scaled_is_taken_as_the_nearest_one(n):
    h = sk.init.hadamard(n, random=False) * n**0.5
    r = h / torch.tensor(n).sqrt()  # as SpinQuant and QuaRot make it
    writer, reader = nn.Linear(4, n, dtype=torch.float64), nn.Linear(n, 3, dtype=torch.float64)
    w = writer.weight.detach().clone()
    with pytest.warns(UserWarning, match="nearest") as shown:
        rotate(r, nn.Sequential(writer, reader), [writer], [reader], input=torch.randn(5, 4))
    assert shown[0].filename == __file__
    exact = sk.init.hadamard(n, random=False) @ w
    assert torch.dist(writer.weight, exact) <= 1e-14 * exact.norm()


def test_base_state_has_plain_keys_for_an_adapter_behind_a_transform():
    net = nn.Sequential(sk.nn.HadamardLinear(8, 8))
    keys = net.state_dict().keys()
    sk.nn.adapt(net, "0.linear", block_size=4)
    assert sk.nn.base_state(net).keys() == keys
    assert all(key.startswith("0.linear.rotation.") for key in sk.nn.adapter_state(net))


def test_a_plain_layer_and_a_hadamard_layer_do_not_load_each_other_in_silence():
    layer = nn.Linear(12, 5)
    online = sk.nn.HadamardLinear.around(copy.deepcopy(layer))
    other = sk.nn.HadamardLinear(12, 5)
    other.load_state_dict(online.state_dict())
    assert torch.equal(other.weight, layer.weight)
    with pytest.raises(RuntimeError, match="hadamard"):
        nn.Linear(12, 5).load_state_dict(online.state_dict())
    net = nn.Sequential(other)
    for is_strict in (True, False):
        with pytest.raises(errors.CheckpointError, match="hadamard"):
            net.load_state_dict(nn.Sequential(nn.Linear(12, 5)).state_dict(), strict=is_strict)
    assert torch.equal(other.weight, layer.weight)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantized_rows_are_integers_times_one_scale_and_gradients_pass_straight_through(bits):
    x = torch.randn(64, 33, generator=seeds.generator()).requires_grad_()
    scale = x.detach().abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    levels = torch.arange(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1), dtype=x.dtype)
    y = sk.nn.fake_quantize(x, bits)
    assert torch.isin(y.detach()[0], levels * scale[0]).all()
    assert (y.detach().abs().amax(-1) == (scale * levels.max()).squeeze(-1)).all()
    (y * torch.arange(33)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.arange(33.0).expand(64, 33))
