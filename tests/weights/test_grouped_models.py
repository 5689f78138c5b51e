"""Grouped models in torch's surroundings: calls, checkpoints, compiled code, several processes."""

import copy
import pickle
from typing import Any

import pytest
import torch
from optimizers_at_hand import descend
from test_grouped import evaluations, loss, several
from torch import nn
from torch.utils.checkpoint import checkpoint
from two_ranks import equal_on_both, on_two_ranks, sharded

import stiefelkit as sk
from stiefelkit.testing import seeds

SIZES = ((6, 6), (6, 4), (4, 6))


class Stack(nn.Module):
    """Three blocks of a square, a wide and a tall layer; `kind` of checkpoint, reentrant or not, if any."""

    def __init__(self, kind: bool | None = None, name: str = "cayley"):
        super().__init__()
        seeds.reseed()
        self.kind = kind
        self.blocks = nn.ModuleList(
            nn.Sequential(*(sk.orthogonal(nn.Linear(*sizes), "weight", name) for sizes in SIZES), nn.Tanh())
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.kind is None else checkpoint(block, x, use_reentrant=self.kind)
        return x


def trained(net, x, steps=3):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    descend(optimizer, lambda: (net(x) - 1).square().mean(), steps)
    return list(net.parameters())


def data():
    return torch.randn(8, 6, generator=seeds.generator(1))


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_model_that_is_grouped_for_good_maps_once_a_call(monkeypatch):
    net, alone = Stack(), Stack()
    assert sk.group_(sk.group_(net)) is net
    seen = evaluations(net, monkeypatch)
    assert_close(trained(net, data()), trained(alone, data()))
    assert seen == [3] * 9
    net.blocks[0](data())
    assert len(seen) == 9
    with sk.grouped(net):
        net(data())
        net(data())
    assert len(seen) == 12
    assert sk.ungroup_(net) is net
    net(data())
    assert len(seen) == 12
    assert not net._forward_pre_hooks
    assert not net._forward_hooks


@pytest.mark.parametrize("replicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_of_a_grouped_model_are_grouped_by_themselves(replicate, monkeypatch):
    net = sk.group_(Stack())
    net(data())
    twin = replicate(net)
    before = [p.clone() for p in net.parameters()]
    seen = evaluations(net, monkeypatch)
    assert_close(trained(twin, data()), trained(Stack(), data()))
    assert seen == [3] * 9
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_part_and_the_whole_may_both_be_grouped(monkeypatch):
    net: Any = Stack()
    whole, parts = sk.group_(net), [sk.group_(block) for block in net.blocks]
    seen = evaluations(net, monkeypatch)
    whole(data())
    assert seen == [3] * 3
    several_of_a_kind = sk.group_(nn.Sequential(net.blocks[0][1], net.blocks[1][2], net.blocks[2][1]))
    several_of_a_kind(data())
    assert seen == [3] * 3 + [2]
    whole(data())
    assert seen == [3] * 3 + [2] + [3] * 3
    parts[0](data())
    assert seen == [3] * 3 + [2] + [3] * 3


def test_a_call_that_fails_leaves_nothing_open(monkeypatch):
    net = sk.group_(Stack())
    with pytest.raises(RuntimeError):
        net(torch.ones(1, 2))
    seen = evaluations(net, monkeypatch)
    net.blocks[0](data())
    assert seen == []


@pytest.mark.parametrize("kind", [False, True], ids=["by hooks", "reentrant"])
@pytest.mark.parametrize("is_switched", [False, True], ids=["context", "for good"])
def test_checkpoints_compute_the_same_anew(kind, is_switched, monkeypatch):
    net, alone = Stack(kind), Stack()
    x = data().requires_grad_()
    if is_switched:
        result = trained(sk.group_(net), x)
    else:
        with sk.grouped(net):
            result = trained(net, x)
    assert_close(result, trained(alone, data()))


def test_a_checkpoint_by_hooks_maps_nothing_anew(monkeypatch):
    net: Any = sk.group_(Stack(False))
    seen = evaluations(net, monkeypatch)
    alone: list[int] = []
    param = type(net.blocks[0][0].parametrizations.weight.param)
    plain = param.forward
    monkeypatch.setattr(param, "forward", lambda self, *args: (alone.append(args[0].dim()), plain(self, *args))[1])
    net(data()).sum().backward()
    assert seen == [3] * 3
    assert alone == [2] * 3
    checkpoint(net.blocks[0], data(), use_reentrant=False).sum().backward()


@pytest.mark.parametrize("name", ["cayley", "matrix_exp"])
def test_compiled_whole_it_is_grouped_in_the_graph(name):
    net, alone = sk.group_(Stack(name=name)), Stack(name=name)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(net, fullgraph=True, backend=backend)
    assert_close(trained(compiled, data()), trained(alone, data()))
    count = len(graphs)
    stacks = sum(node.target is torch.stack for graph in graphs for node in graph.graph.nodes)
    assert stacks == {"cayley": 3 + 3, "matrix_exp": 3 + 2}[name]  # coordinates, and charts where there are any
    with sk.grouped(net):
        assert torch.allclose(compiled(data()), alone(data()), atol=1e-5)
    assert len(graphs) == count


@pytest.mark.slow
def test_code_that_is_compiled_inside_a_context_reads_weights_one_by_one():
    net, alone = Stack(), Stack()

    @torch.compile(fullgraph=True, backend="eager")
    def loss(x):
        with sk.grouped(net):
            return (net(x) - 1).square().mean()

    assert torch.allclose(loss(data()), (alone(data()) - 1).square().mean())


def run_ddp(rank):
    for switch in (True, False):
        net: Any = nn.parallel.DistributedDataParallel(sk.group_(Stack()) if switch else Stack())
        if switch:
            trained(net, data()[rank::2])
        else:
            with sk.grouped(net):
                trained(net, data()[rank::2])
        assert_close(net.module.parameters(), trained(Stack(), data()))
        assert all(map(equal_on_both, net.parameters()))


def run_ddp_unused(rank):
    """A block that no loss depends on, though its weights are mapped with the others."""
    nets: Any = [sk.group_(Stack()), Stack()]
    for net in nets:
        wrapped = nn.parallel.DistributedDataParallel(Tapped(net), find_unused_parameters=True)
        for part in data()[rank::2].split(2):
            wrapped(part).square().mean().backward()
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, atol=1e-5)
    assert all(p.grad is None for p in nets[0].blocks[2].parameters())


class Tapped(nn.Module):
    """Gives what a stack has after two of its blocks."""

    def __init__(self, net: Any):
        super().__init__()
        self.net = net

    def forward(self, x):
        seen = []
        hook = self.net.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out))
        self.net(x)
        hook.remove()
        return seen[0]


def run_fsdp(rank):
    seeds.reseed()
    for is_switched_first in (True, False):
        net: Any = Stack()
        blocks = nn.ModuleList(
            nn.Sequential(*(sk.orthogonal(nn.Linear(6, 6), "weight") for _ in range(3)), nn.Tanh()) for _ in range(2)
        )
        net.blocks = blocks
        alone = copy.deepcopy(net)
        if is_switched_first:
            sk.group_(net)
        sharded(net, *net.blocks)
        sk.group_(net)
        for step in range(3):
            with pytest.MonkeyPatch.context() as patch:
                seen = evaluations(net, patch)
                for model, x in ((net, data()[rank::2]), (alone, data())):
                    (model(x) - 1).square().mean().backward()
                assert seen == [3, 3] or (step == 0 and is_switched_first)
            for model in (net, alone):
                torch.optim.SGD(model.parameters(), lr=0.1).step()
                model.zero_grad()
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(ours.full_tensor(), theirs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_ddp, run_ddp_unused, run_fsdp])
def test_two_processes_agree_with_one(run, tmp_path):
    assert on_two_ranks(run, tmp_path / "store") == [0, 0]


def test_frames_that_an_optimizer_moves_are_grouped_too():
    net = several("stiefel")
    alone = copy.deepcopy(net)
    for model in (net, alone):
        optimizer = sk.optim.CayleySGD(sk.optim.parameter_groups(model, lr=0.1))
        with sk.grouped(net):
            descend(optimizer, lambda model=model: loss(model), 3)
    assert_close(net.parameters(), alone.parameters())
    assert all(d.error < 1e-6 for d in sk.drift(net).values())
