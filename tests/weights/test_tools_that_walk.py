"""Tools that walk through a model, put its children back, wrap or swap them leave orthogonal weights working."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
import torch.ao.nn.qat
from every_map import OwnLinear, close, make, over_all_maps, squares
from torch import nn
from torch.ao import quantization
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.utils import parametrize

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.contract.param import coordinate_dtypes
from stiefelkit.metrics import orthogonality_error, rounding_limit

INSIDE = "parametrizations.weight."


class Net(nn.Module):
    """A model with two orthogonal layers and a norm between them."""

    def __init__(self, name="cayley", kind=nn.Linear):
        super().__init__()
        self.first, self.last = (sk.orthogonal(kind(4, 4), "weight", each) for each in (name, "stiefel"))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def put_back(module):
    for name, child in module.named_children():
        put_back(child)
        setattr(module, name, getattr(module, name))
        module.add_module(name, child)
        module.register_module(name, child)


@over_all_maps
def test_a_child_that_is_put_back_where_it_was_stays_what_it_was(name, dtype):
    net: Any = nn.Sequential(make(name, dtype), nn.Sequential(make(name, dtype)))
    before = {prefix: id(module) for prefix, module in net.named_modules()}
    weights, keys = [net[0].weight, net[1][0].weight], list(net.state_dict())
    put_back(net)
    assert {prefix: id(module) for prefix, module in net.named_modules()} == before
    assert list(net.state_dict()) == keys
    assert all(map(torch.equal, [net[0].weight, net[1][0].weight], weights))
    assert list(sk.drift(net)) == ["0.weight", "1.0.weight"]


def test_batch_norms_become_synchronised_ones():
    net = Net()
    keys, x = list(net.state_dict()), torch.randn(6, 4)
    expected = copy.deepcopy(net).eval()(x)
    converted: Any = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(converted.norm, nn.SyncBatchNorm)
    assert list(converted.state_dict()) == keys
    assert torch.equal(converted.eval()(x), expected)


CHECKS = {"all": lambda _: True, "layers": lambda module: isinstance(module, nn.Linear)}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [name for name in sk.available() if name != "fourier"])
def test_activations_are_checkpointed_around_weights_and_not_inside(name, check):
    net, x = Net(name), torch.randn(6, 4)
    plain, keys = copy.deepcopy(net), list(net.state_dict())
    apply_activation_checkpointing(net, check_fn=CHECKS[check])
    assert type(net.first).__name__ == "CheckpointWrapper"
    assert list(net.state_dict()) == keys
    assert list(sk.drift(net)) == ["first.weight", "last.weight"]
    assert list(sk.coordinates(net, "first.weight")) == list(sk.coordinates(plain, "first.weight"))
    for each in (net, plain):
        squares(each(x)).backward()
    ours, theirs = dict(net.named_parameters()), dict(plain.named_parameters())
    for key, p in theirs.items():
        found = next(value for other, value in ours.items() if other.replace("_checkpoint_wrapped_module.", "") == key)
        assert close(found.grad, p.grad)
    net.load_state_dict(plain.state_dict())
    bad = {key: value.clone() for key, value in plain.state_dict().items()}
    bad[f"last.{INSIDE}original0"] *= 2
    bad["norm.weight"] += 1
    before = {key: value.clone() for key, value in net.state_dict().items()}
    for whole in (net, checkpoint_wrapper(net)):
        with pytest.raises(errors.CheckpointError, match=r"last\.weight"):
            sk.check_state_dict(whole, bad)
        with pytest.raises(errors.CheckpointError, match=r"last\.weight"):
            whole.load_state_dict(bad)
        assert all(torch.equal(value, before[key]) for key, value in whole.state_dict().items())
    assert isinstance(sk.bake(net, "first.weight").first.weight, nn.Parameter)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in sk.available() if name != "fourier"])
def test_a_model_is_prepared_for_quantization_and_trains(name):
    net: Any = Net(name).train()
    x, w = torch.randn(6, 4), net.first.weight.detach().clone()
    coordinates = sk.coordinates(net, "first.weight")
    net.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(net, inplace=True)
    assert parametrize.type_before_parametrizations(net.first) is torch.ao.nn.qat.Linear
    assert torch.equal(net.first.weight, w)
    assert {key: id(c) for key, c in sk.coordinates(net, "first.weight").items()} == {
        key: id(c) for key, c in coordinates.items()
    }
    optimizer = sk.optim.CayleySGD(sk.optim.parameter_groups(net, lr=0.1))
    (net(x) * torch.randn(6, 4)).sum().backward()
    assert all(c.grad is not None for c in coordinates.values())
    optimizer.step()
    assert not torch.equal(net.first.weight, w)
    assert all(drift.bits_lost < 1 or name == "margin" for drift in sk.drift(net).values())
    assert len(net.first.parametrizations.weight) == 1


@pytest.mark.parametrize("name", [name for name in sk.available() if name != "fourier"])
def test_a_traced_model_has_its_weights(name):
    net: Any = nn.Sequential(Net(name, OwnLinear), nn.Sequential(sk.orthogonal(OwnLinear(4, 4), "weight", name)))
    traced = torch.fx.symbolic_trace(net)
    names = ["0.first.weight", "0.last.weight", "1.0.weight"]
    assert list(sk.drift(traced)) == list(sk.drift(net)) == names

    def described(groups):
        return [(group.get("name"), group.get("weight_decay"), len(group["params"])) for group in groups]

    options: Any = {"lr": 0.1, "weight_decay": 0.01}
    assert described(sk.optim.parameter_groups(traced, **options)) == described(
        sk.optim.parameter_groups(net, **options)
    )
    assert sk.coordinates(traced, "1.0.weight") == sk.coordinates(net, "1.0.weight")
    sk.reset_(traced, "0.first.weight")
    x = torch.randn(6, 4)
    assert torch.equal(traced.eval()(x), net.eval()(x))
    state = copy.deepcopy(net.state_dict())
    sk.check_state_dict(traced, state)
    traced.load_state_dict(state)
    state[f"1.0.{INSIDE}original0"][0] = torch.nan
    with pytest.raises(errors.NonFiniteError, match=r"1\.0\.weight"):
        sk.check_state_dict(traced, state)
    with pytest.raises(errors.OptionError, match="traced"):
        sk.bake(traced)
    with pytest.raises(errors.OptionError, match="traced"):
        sk.bake(traced, "1.0.weight")
    assert list(sk.drift(copy.deepcopy(traced))) == names


class Attention(nn.Module):
    """Attention whose shapes torch.fx cannot follow, and layers of torch around it."""

    def __init__(self):
        super().__init__()
        self.embed, self.conv, self.attend = nn.Embedding(6, 4), nn.Conv1d(4, 4, 1), nn.MultiheadAttention(4, 2)

    def forward(self, tokens):
        x = self.conv(self.embed(tokens).mT).mT
        return self.attend(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("name", ["cayley", "givens", "householder", "matrix_exp", "stiefel"])
def test_a_trace_calls_orthogonal_layers_of_torch_whole_as_it_does_plain_ones(name):
    plain = Attention()
    net = sk.orthogonal(copy.deepcopy(plain), ["embed.weight", "attend.out_proj.weight"], name)
    sk.orthogonal(net, "attend.in_proj_weight", "cayley", blocks=3)
    sk.orthogonal(net, "conv.weight", name, view="out_by_rest")
    expected, traced = (torch.fx.symbolic_trace(each) for each in (plain, net))
    assert [(n.op, n.target) for n in traced.graph.nodes] == [(n.op, n.target) for n in expected.graph.nodes]
    assert sorted(sk.drift(traced)) == sorted(sk.drift(net))
    assert traced.state_dict().keys() == net.state_dict().keys()
    tokens = torch.tensor([[0, 3, 1], [5, 2, 2]])
    found, wanted = (torch.autograd.grad(squares(f(tokens)), list(net.parameters())) for f in (traced, net))
    assert all(close(a, b) for a, b in zip(found, wanted, strict=True))
    before = net(tokens)
    assert close(sk.bake(traced)(tokens), before)


def test_a_baked_model_pickles_as_if_nothing_had_been():
    net = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(4, 4), Net())})
    sk.orthogonal(net, "inner.0.weight")
    assert b"stiefelkit.weights.modules" in pickled(net)
    assert b"stiefelkit" not in pickled(sk.bake(net)).replace(b"test_tools_that_walk", b"")
    for part in (0, 1):
        sk.orthogonal(net, f"inner.{'1.first' if part else 0}.weight")
    sk.bake(net, "inner.0.weight")
    bad = {**net.state_dict(), f"inner.1.first.{INSIDE}original0": torch.full((6,), torch.nan)}
    bad["inner.0.weight"] = torch.zeros(4, 4)
    with pytest.raises(errors.NonFiniteError):
        net.load_state_dict(bad)
    assert net["inner"][0].weight.any()  # type: ignore[index]


def pickled(net) -> bytes:
    buffer = io.BytesIO()
    torch.save(net, buffer)
    return buffer.getvalue()


COARSER = [(torch.float32, torch.half), (torch.float32, torch.bfloat16), (torch.float64, torch.float32)]


@pytest.mark.parametrize("how", ["alone", "grouped", "saved"])
@pytest.mark.parametrize(("dtype", "coarse"), COARSER)
@pytest.mark.parametrize("name", [name for name in sk.available() if name not in ("fourier", "margin")])
def test_coordinates_whose_data_are_of_a_coarser_dtype_still_give_frames_to_the_limit(name, dtype, coarse, how):
    net: Any = nn.Sequential(*(make(name, dtype) for _ in range(2)))
    for p in net.parameters():
        p.data = p.data.to(coarse)
    if how == "saved":
        net.state_dict()
    if how == "grouped":
        with sk.grouped(net):
            w = net[0].weight.detach()
    else:
        w = net[0].weight.detach()
    bound = (20 if dtype is torch.float64 else 2) * rounding_limit(4, dtype) + torch.finfo(dtype).eps
    assert orthogonality_error(w).item() <= bound
    make(name, dtype).load_state_dict(net[0].state_dict())


@over_all_maps
@pytest.mark.parametrize("store", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu], ids=str)
def test_a_layer_that_is_stored_in_eight_bits_between_its_calls_has_its_weight_again(store, name, dtype):
    layer = make(name, dtype)
    before = layer.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a complex bias, which loses its imaginary part
        layer.to(store)
    copied = copy.deepcopy(layer)
    for each in (layer, copied):
        assert torch.equal(each.to(torch.float32).weight, before)


@over_all_maps
def test_a_type_that_casts_everything_leaves_charts_of_integers_what_they_are(name, dtype):
    layer, twin = make(name, dtype), make(name, dtype)
    before = {key: b.dtype for key, b in layer.named_buffers() if not (b.is_floating_point() or b.is_complex())}
    w = layer.weight.detach().clone()
    layer.type(torch.complex128 if dtype.is_complex else torch.float64)
    assert close(layer.weight.to(dtype), w)
    layer.type(dtype)
    assert {key: b.dtype for key, b in layer.named_buffers() if key in before} == before
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin.weight, layer.weight)


@over_all_maps
def test_a_tensor_under_the_name_of_a_coordinate_is_refused_at_the_next_read(name, dtype):
    layer = make(name, dtype)
    held, w = layer.parametrizations.weight, layer.weight.detach().clone()
    hidden = next(iter(held.coordinates))
    setattr(held, hidden, torch.zeros_like(held.original0))
    for look in (lambda: layer.weight, layer.state_dict, lambda: copy.deepcopy(layer)):
        with pytest.raises(errors.OptionError, match=rf"attribute {hidden} that hides one; del it"):
            look()
    delattr(held, hidden)
    assert torch.equal(layer.weight, w)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in sk.available() if name != "fourier"])
def test_what_makes_another_weight_of_a_frame_is_refused_and_takes_a_baked_one(name):
    norm, x = nn.BatchNorm1d(4).eval(), torch.randn(3, 4)
    nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]
    layer = make(name, torch.float32).eval()
    w = layer.weight.detach().clone()
    with pytest.raises(errors.NotAFrameError):
        nn.utils.fusion.fuse_linear_bn_eval(layer, norm)
    with pytest.raises(AssertionError, match="only works for"):  # torch's own words, as over any parametrization
        quantization.quantize_dynamic(nn.Sequential(layer), {nn.Linear})
    assert torch.equal(layer.weight, w)
    baked = sk.bake(layer)
    assert close(nn.utils.fusion.fuse_linear_bn_eval(baked, norm)(x), norm(baked(x)))
    quantized = quantization.quantize_dynamic(nn.Sequential(baked), {nn.Linear})
    assert torch.dist(quantized(x), baked(x)) < 0.1 * baked(x).norm()


@over_all_maps
def test_vectors_of_parameters_sharing_and_freezing_leave_frames(name, dtype):
    layer = make(name, dtype)
    w = layer.weight.detach().clone()
    vector = nn.utils.parameters_to_vector(layer.parameters())
    nn.utils.vector_to_parameters(vector, layer.parameters())
    assert close(layer.weight, w)
    nn.utils.vector_to_parameters(vector + 0.1, layer.parameters())
    layer.weight  # noqa: B018
    assert name == "margin" or sk.drift(copy.deepcopy(layer))["weight"].bits_lost < 1
    assert {key: c.dtype for key, c in sk.coordinates(layer, "weight").items()} == (
        coordinate_dtypes(layer.parametrizations.weight.param)
    )
    layer.share_memory()
    frozen = sk.bake(layer.requires_grad_(False)).weight
    assert isinstance(frozen, nn.Parameter)
    assert not frozen.requires_grad
