"""Weights that one batched call maps: as those that are mapped one by one, in values, gradients and everything else."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from every_map import make, over_all_maps, squares
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.metrics import rounding_limit
from stiefelkit.testing import seeds
from stiefelkit.weights import grouped as group


def several(name="cayley", dtype=torch.float32, rows=4, columns=4, count=3) -> Any:
    return nn.ModuleList(make(name, dtype, rows, columns) for _ in range(count))


def weights(net):
    return [layer.weight for layer in net]


def loss(net):
    return torch.stack([squares(layer(torch.ones(1, 4)) - 1) for layer in net]).sum()


def gradients(net, read):
    """Those of coordinates by a fixed random gradient of each weight."""
    generator = seeds.generator(3)
    read = read(net)
    given = [torch.randn(w.shape, dtype=w.dtype, generator=generator) for w in read]
    parameters = [c for layer in net for c in sk.coordinates(layer, "weight").values()]
    return torch.autograd.grad(read, parameters, given)


def grouped_weights(net):
    with sk.grouped(net):
        return weights(net)


def assert_alike(net):
    for a, b, layer in zip(grouped_weights(net), weights(net), net, strict=True):
        param = layer.parametrizations.weight.param
        slack = 1e-7 if param.precision == "exact" else param.error_bound()
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert a.requires_grad == b.requires_grad
        assert torch.linalg.vector_norm(a - b) <= 4 * rounding_limit(min(a.shape[:2]), a.dtype) + slack
    for a, b in zip(gradients(net, grouped_weights), gradients(net, weights), strict=True):
        assert torch.linalg.vector_norm(a - b) <= 1e-5 * torch.linalg.vector_norm(b) + 1e-7


def evaluations(net, monkeypatch):
    """Has the list that is returned grow by one with each evaluation of a group."""
    seen: list[int] = []
    plain = group.Group.evaluate
    monkeypatch.setattr(group.Group, "evaluate", lambda self: (seen.append(len(self.members)), plain(self))[1])
    return seen


@over_all_maps
@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6)], ids=str)
def test_frames_and_gradients_are_those_of_weights_by_themselves(name, dtype, shape, monkeypatch):
    if sk.available()[name].supports((max(shape), min(shape)), dtype) is not None:
        return
    net = several(name, dtype, *shape)
    seen = evaluations(net, monkeypatch)
    assert_alike(net)
    assert seen == [3, 3]


@over_all_maps
def test_built_in_maps_take_stacks_themselves(name, dtype):
    param = make(name, dtype).parametrizations.weight.param
    assert group.maps_stacks(param), f"{name} needs stacks = True, see OrthogonalParam.stacks"


OPTIONS: dict[str, Any] = {
    "signs": ((6, 6), {"negative": 2}),
    "band": ((6, 6), {"bandwidth": 2}),
    "batch": ((2, 3, 6, 4), {}),
    "reflections": ((6, 5), {"parametrization": "householder", "reflections": 2}),
    "panels": ((67, 66), {"parametrization": "householder"}),
    "layers": ((6, 6), {"parametrization": "givens", "layers": 2}),
    "fft": ((8, 8), {"parametrization": "givens", "layout": "fft"}),
    "fast": ((6, 6), {"parametrization": "matrix_exp", "precision": "fast"}),
    "rebased": ((6, 4), {"parametrization": "rebased", "inner": "givens"}),
    "margin": ((6, 4), {"parametrization": "margin", "u": "householder", "v": "matrix_exp"}),
    "gain": ((4, 6), {"gain": 1.5}),
    "learned gain": ((4, 6), {"gain": "learned"}),
    "gain of a batch": ((2, 6, 4), {"gain": "learned"}),
    "kernel": ((6, 2, 3, 1), {"view": "out_by_rest"}),
    "taps": ((4, 2, 3, 2), {"view": "per_tap"}),
    "groups": ((6, 2, 2, 1), {"view": "out_by_rest"}),
    "double": ((5, 5), {"dtype": torch.float64}),
    "half": ((5, 5), {"dtype": torch.bfloat16}),
}


class Weight(nn.Module):
    def __init__(self, shape, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape).to(dtype))


@pytest.mark.parametrize("case", OPTIONS)
def test_options_views_and_gains_go_along(case, monkeypatch):
    shape, options = OPTIONS[case]
    dtype = options.get("dtype", torch.float32)
    options = {key: value for key, value in options.items() if key != "dtype"}
    init: Any = {} if case != "reflections" else {"init": "haar"}
    net = nn.ModuleList(sk.orthogonal(Weight(shape, dtype), "weight", **options, **init) for _ in range(3))
    if case == "learned gain":
        with torch.no_grad():
            for i, layer in enumerate(net):
                sk.coordinates(layer, "weight")["gain"].fill_(i + 0.5)
    seen = evaluations(net, monkeypatch)
    assert_alike(net)
    assert seen == [3, 3]


def test_weights_of_other_kinds_are_in_other_groups_and_single_ones_in_none(monkeypatch):
    layers = [make("cayley", torch.float32) for _ in range(2)]
    layers += [make("cayley", torch.complex64) for _ in range(2)]
    layers += [make("householder", torch.float32) for _ in range(3)]
    layers += [make("cayley", torch.float32, 6, 4), make("cayley", torch.float32, 4, 6)]
    layers += [sk.orthogonal(nn.Linear(4, 4), "weight", gain=2.0)]
    net: Any = nn.ModuleList(layers)
    seen = evaluations(net, monkeypatch)
    grouped_weights(net)
    assert sorted(seen) == [2, 2, 3]
    assert_alike(net)


def test_large_weights_are_parted_as_memory_counts(monkeypatch):
    monkeypatch.setattr(group, "_ENTRIES", 40)
    net = several(count=5)
    seen = evaluations(net, monkeypatch)
    assert_alike(net)
    assert seen == [2, 2] * 2


class Plugin(sk.parametrizations.Cayley):
    """A map whose forward says nothing of stacks."""

    def forward(self, skew, phase=None):
        assert skew.dim() == 1
        return super().forward(skew, phase)


def test_a_map_that_says_nothing_of_stacks_goes_by_vmap(monkeypatch):
    net: Any = nn.ModuleList(sk.orthogonal(nn.Linear(4, 4), "weight", Plugin) for _ in range(3))
    assert not group.maps_stacks(net[0].parametrizations.weight.param)
    sk.assign_(net[1], "weight", -torch.eye(4))
    seen = evaluations(net, monkeypatch)
    assert_alike(net)
    assert seen == [3, 3]


def test_tied_weights_are_one_and_their_gradients_add_up(monkeypatch):
    net = several()
    sk.tie(net[0], "weight", net[2], "weight")
    seen = evaluations(net, monkeypatch)
    with sk.grouped(net):
        assert net[0].weight is net[2].weight
        squares(net[0].weight[0, 0] * net[2].weight[1, 1] * net[1].weight[0, 0]).backward()
    assert seen == [2]
    found = [layer.parametrizations.weight.skew.grad.clone() for layer in net]
    net.zero_grad()
    squares(net[0].weight[0, 0] * net[2].weight[1, 1] * net[1].weight[0, 0]).backward()
    for a, layer in zip(found, net, strict=True):
        assert torch.allclose(a, layer.parametrizations.weight.skew.grad, atol=1e-6)


def test_what_stands_on_top_is_applied_to_each_by_itself():
    net = several()
    parametrizations.spectral_norm(net[1])
    net.eval()
    assert_alike(net)


def test_what_is_written_between_two_reads_is_seen():
    net = several()
    with sk.grouped(net), torch.no_grad():
        before = [w.clone() for w in weights(net)]
        net[1].parametrizations.weight.skew.neg_()
        assert not torch.equal(net[1].weight, before[1])
        assert torch.equal(net[0].weight, before[0])
        net[2].parametrizations.weight.signs.neg_()
        assert torch.equal(net[2].weight, -before[2])
        net[0].weight = torch.eye(4)
        assert torch.allclose(net[0].weight, torch.eye(4), atol=1e-6)
        net[0].weight.zero_()
        assert torch.allclose(net[0].weight, torch.eye(4), atol=1e-6)
        net[0].parametrizations.weight.signs.zero_()
        with pytest.raises(errors.NotAFrameError):
            net[0].weight  # noqa: B018


def test_one_evaluation_serves_all_reads_of_a_step_with_and_without_gradient(monkeypatch):
    net = several()
    seen = evaluations(net, monkeypatch)
    with sk.grouped(net):
        first = weights(net)
        with torch.no_grad():
            assert not any(w.requires_grad for w in weights(net))
        assert all(a is b for a, b in zip(first, weights(net), strict=True))
        with torch.inference_mode():
            assert torch.equal(net[0].weight, first[0])
    assert seen == [3]
    with sk.grouped(net):
        with torch.inference_mode():
            weights(net)
        with torch.no_grad():
            weights(net)
        assert all(w.requires_grad for w in weights(net))
    assert seen == [3] * 4


def test_after_a_backward_pass_the_graph_is_made_anew():
    net = several()
    with sk.grouped(net):
        for _ in range(2):
            loss(net).backward()
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    (2 * loss(net)).backward()
    for a, p in zip(found, net.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-5)


def test_weights_that_no_loss_depends_on_have_no_gradient():
    net = several()
    with sk.grouped(net):
        squares(net[0].weight[0] + net[2].weight[0]).backward()
    assert [layer.parametrizations.weight.skew.grad is None for layer in net] == [False, True, False]


def test_frozen_weights_stay_so():
    net = several()
    net[1].requires_grad_(False)
    with sk.grouped(net):
        assert [w.requires_grad for w in weights(net)] == [True, False, True]
        net[0].requires_grad_(False)
        net[2].requires_grad_(False)
        assert not any(w.requires_grad for w in weights(net))


def test_second_derivatives_are_those_of_weights_by_themselves():
    net = several(dtype=torch.float64)

    def hessian_row(read):
        skew = [layer.parametrizations.weight.skew for layer in net]
        value = torch.stack([(w[0, 0] * w[1, 2]).sin() for w in read(net)]).sum()
        first = torch.autograd.grad(value, skew, create_graph=True)
        return torch.autograd.grad(torch.stack(first).square().sum(), skew)

    for a, b in zip(hessian_row(grouped_weights), hessian_row(weights), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@over_all_maps
def test_state_dicts_copies_and_baked_weights_are_as_without(name, dtype):
    net = several(name, dtype)
    keys, plain = list(net.state_dict()), [w.detach() for w in weights(net)]
    with sk.grouped(net):
        weights(net)
        replicas = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
        assert list(net.state_dict()) == keys
    for replica in replicas:
        assert all(torch.equal(a, b) for a, b in zip(weights(replica), plain, strict=True))
        with torch.no_grad():
            for c in sk.coordinates(replica[0], "weight").values():
                c.neg_()
    with sk.grouped(net):
        assert torch.allclose(net[0].weight, plain[0], atol=1e-6)
        sk.bake(net, "0.weight")
        assert type(net[0]) is nn.Linear
        assert torch.allclose(net[0].weight, plain[0], atol=1e-6)
        assert torch.allclose(net[1].weight, plain[1], atol=1e-6)


def test_each_thread_has_evaluations_of_its_own():
    net = several(count=4)
    expected = [g.clone() for g in gradients(net, weights)]
    failures: list[BaseException] = []

    def work():
        try:
            for _ in range(10):
                for a, b in zip(gradients(net, grouped_weights), expected, strict=True):
                    assert torch.allclose(a, b, atol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_under_transforms_and_caches_of_torch_weights_are_read_as_ever():
    net = several()
    values = {name: p.detach().clone() for name, p in net.named_parameters()}
    layer = net[0]
    own = {key.removeprefix("0."): value for key, value in values.items() if key.startswith("0.")}

    def loss_of(values):
        return squares(torch.func.functional_call(layer, values, torch.ones(1, 4)) - 1)

    expected = torch.func.grad(loss_of)(own)
    changed = {key: value + 0.5 for key, value in own.items()}
    other = torch.func.functional_call(layer, changed, torch.ones(1, 4))
    with sk.grouped(net):
        weights(net)
        assert all(torch.equal(a, expected[key]) for key, a in torch.func.grad(loss_of)(own).items())
        assert torch.allclose(torch.func.functional_call(layer, changed, torch.ones(1, 4)), other, atol=1e-6)
        with parametrize.cached():
            assert layer.weight is layer.weight


def test_weights_that_are_not_filled_say_so_and_others_are_read():
    net = several()
    with sk.grouped(net):
        weights(net)
        net[1].to_empty(device="cpu")
        with pytest.raises(errors.UnfilledError):
            net[1].weight  # noqa: B018
        assert net[0].weight.isfinite().all()
        sk.reset_(net[1], "weight")
        assert_alike(net)


def test_a_parametrization_on_top_of_a_grouped_weight_is_in_force_at_once():
    class Double(nn.Module):
        def forward(self, w):
            return 2 * w

    net = several()
    sk.group_(net)
    before = weights(net)
    parametrize.register_parametrization(net[0], "weight", Double())
    assert torch.equal(net[0].weight, 2 * before[0])
    assert torch.equal(net[1].weight, before[1])


def test_hooks_of_a_weight_in_a_group_are_its_own():
    net = several()
    net[0].parametrizations.weight.register_full_backward_pre_hook(lambda module, grads: (0 * grads[0],))
    net[1].parametrizations.weight.param.register_forward_hook(lambda module, args, out: 2 * out)
    alone, expected = weights(net), gradients(net, weights)
    with sk.grouped(net):
        together, found = weights(net), gradients(net, weights)
    for one, other in zip([*alone, *expected], [*together, *found], strict=True):
        assert torch.dist(one, other) <= 1e-5
