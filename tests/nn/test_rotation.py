"""Rotations that are folded into the layers around them leave the function as it was."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors, init
from stiefelkit.testing import seeds


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
        sk.nn.rotate_(r, readers=[*self.up, self.head], writers=[self.embedding, *self.down])


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


def test_low_precision_weights_are_rounded_once():
    layer = nn.Linear(16, 8, dtype=torch.bfloat16)
    r = init.haar((16, 16), generator=seeds.generator()).float()
    expected = (layer.weight.double() @ r.double().mT).bfloat16()
    sk.nn.rotate_(r, readers=[layer])
    assert torch.equal(layer.weight, expected)


def test_what_does_not_fit_is_refused_before_anything_is_written():
    good, narrow = nn.Linear(4, 4), nn.Linear(3, 4)
    before = good.weight.detach().clone()
    r = init.haar((4, 4), generator=seeds.generator()).float()
    for error, kind, readers, words in (
        (errors.ShapeError, r, [good, narrow], "4 features"),
        (errors.DtypeError, r, [good, nn.Conv1d(4, 4, 1)], "Conv1d"),
        (errors.NotAFrameError, 2 * r, [good], "orthogonal matrix"),
        (errors.ShapeError, r[:, :2], [good], "square"),
        (errors.DtypeError, r, [good, sk.orthogonal(nn.Linear(4, 4), "weight")], "plain weights"),
    ):
        with pytest.raises(error, match=words):
            sk.nn.rotate_(kind, readers=readers)
    assert torch.equal(good.weight, before)


def test_hooks_that_may_do_more_are_refused():
    first, last = nn.Linear(5, 8), nn.Linear(8, 5)
    for module, hook in (
        (first, first.register_forward_hook(lambda _, args, y: y.relu())),
        (last, last.register_forward_pre_hook(lambda _, args: args[0].relu())),
    ):
        before = copy.deepcopy(module.state_dict())
        with pytest.raises(errors.OptionError, match="without hooks, which may do more, got Linear with hooks"):
            sk.nn.rotate_(sk.init.haar((8, 8)), readers=[last], writers=[first])
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
        hook.remove()
    sk.nn.rotate_(sk.init.haar((8, 8)), readers=[last], writers=[first])


def test_a_forward_put_on_an_instance_is_refused():
    first, last = nn.Linear(5, 8), nn.Linear(8, 5)
    forward = first.forward
    first.forward = lambda input: forward(input).relu()
    with pytest.raises(errors.OptionError, match="a copy runs in float64, got Linear, which raises RuntimeError"):
        sk.nn.rotate_(sk.init.haar((8, 8)), readers=[last], writers=[first])


def test_a_layer_inside_an_adapter_is_refused():
    net: Any = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 5)).requires_grad_(False)
    sk.nn.adapt(net, "1.weight", block_size=4)
    with pytest.raises(errors.OptionError, match=r"got 1\.layer inside OrthogonalAdapter; fold or "):
        sk.nn.rotate_(sk.init.haar((8, 8)), readers=[net[1].layer], writers=[net[0]], model=net)
