"""Weights whose mapping ranks share: as if each rank had mapped all, in frames, gradients and state dicts."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from test_grouped_models import Stack, Tapped, assert_close, data, trained
from torch import nn
from two_ranks import on_two_ranks

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.testing import seeds
from stiefelkit.weights.group import Group, StackOfMaps
from stiefelkit.weights.owners import Kind, predict, rows_of_ranks
from stiefelkit.weights.rank_shares import Sharing


class Mixed(nn.Module):
    """Kinds of one, two and three weights: complex, learned gains, bfloat16, a kernel, and two frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        seeds.reseed()

        def several(count, shape, name="cayley", dtype=torch.float32, **options):
            return nn.ModuleList(
                sk.orthogonal(nn.Linear(*shape, bias=False, dtype=dtype), "weight", name, **options)
                for _ in range(count)
            )

        self.real = several(3, (6, 6))
        self.wide = several(2, (6, 3), "householder", gain="learned")
        self.complex = several(3, (5, 5), dtype=torch.complex64)
        self.lowered = several(2, (6, 6), "matrix_exp", dtype=torch.bfloat16)
        self.one = several(1, (4, 4), "givens")
        self.frozen = several(2, (6, 6)).requires_grad_(False)

    def forward(self, x):
        lowered = [layer(x.bfloat16()).float().sum(-1).sin() for layer in self.lowered]
        for layer in (*self.real, *self.frozen):
            x = layer(x)
        terms = [layer(x).sum(-1) for layer in self.wide]
        terms += [layer(x[:, :5].to(torch.complex64)).real.prod(-1) for layer in self.complex]
        return {"sum": sum(terms), "also": [self.one[0](x[:, :4]), sum(lowered)], "none": None}


def steps(net, x):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        out = net(x)
        torch.stack([(y - 1).square().mean() for y in (out["sum"], *out["also"])]).sum().backward()
        optimizer.step()
    return list(net.parameters())


def shared(net, **options) -> Any:
    return sk.group_(net, owners=sk.Owners(when="always", **options))


def assert_same_on_both(tensors):
    for t in tensors:
        both = [torch.empty_like(t) for _ in range(2)]
        dist.all_gather(both, t.detach())
        assert torch.equal(*both)


def rows_mapped(patch):
    """Has the list that is returned grow by the number of weights of each call of a map."""
    mapped: list[int] = []
    plain = StackOfMaps.__call__
    patch.setattr(StackOfMaps, "__call__", lambda self, c: (mapped.append(len(c[0])), plain(self, c))[1])
    return mapped


def rows_of_both(mapped):
    count = torch.tensor(sum(mapped))
    dist.all_reduce(count)
    return count.item()


def run_training(rank):
    ddp = nn.parallel.DistributedDataParallel
    ours: Any = ddp(shared(Mixed()))
    with pytest.MonkeyPatch.context() as patch:
        mapped = rows_mapped(patch)
        steps(ours, data()[rank::2])
    assert rows_of_both(mapped) == 3 * (3 + 2 + 3 + 2 + 1 + 2 * 2)  # the frozen ones by each
    theirs: Any = ddp(Mixed())
    steps(theirs, data()[rank::2])
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        slack = 1e-2 if "lowered" in name else 1e-5
        assert torch.allclose(a, b, atol=slack), name
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.allclose(a.grad, b.grad, atol=slack), name
    assert_same_on_both(ours.parameters())
    assert_same_on_both([p.grad for p in ours.parameters() if p.grad is not None])
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():  # by each rank alone, and grouped
        if rank == 0:
            assert torch.allclose(ours.module(data())["sum"], theirs.module(data())["sum"], atol=1e-5)
    copied = pickle.loads(pickle.dumps(ours.module))
    if rank == 1:
        copied(data())["sum"].sum().backward()


def run_frames(rank):
    net = shared(Stack())
    frames: list[Any] = []
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda module, *_: frames.append(module.weight))
    net(data())
    assert_same_on_both(frames)
    for w, layer in zip(frames, (x for x in Stack().modules() if isinstance(x, nn.Linear)), strict=True):
        assert torch.linalg.vector_norm(w - layer.weight) < 1e-6
    applied = [sk.nn.OrthogonalLinear(80, 80, parametrization="householder", reflections=2) for _ in range(2)]
    net = shared(nn.Sequential(*applied, nn.Linear(80, 6), Stack()))
    for count in (2 + 9, 9):  # what is applied without its weight is mapped once
        with pytest.MonkeyPatch.context() as patch:
            mapped = rows_mapped(patch)
            net(torch.ones(1, 80)).sum().backward()
        assert rows_of_both(mapped) == count


def run_parts_in_use(rank):
    """A rank that reads some of the weights, one that reads none, and weights that nobody reads."""
    nets: Any = [shared(Stack()), Stack()]
    ddp = nn.parallel.DistributedDataParallel
    for net in nets:
        wrapped = ddp(Tapped(net), find_unused_parameters=True)
        for part in data()[rank::2].split(2):
            wrapped(part).square().mean().backward()
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, atol=1e-5)
    nets = [shared(Chooses(rank)), Chooses(rank)]
    for net in nets:
        wrapped = ddp(net, find_unused_parameters=True)
        for _ in range(2):
            wrapped(data()).square().mean().backward()
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)


class Chooses(nn.Module):
    """Rank 0 applies the weights, rank 1 a bias alone."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.net, self.bias = rank, Stack(), nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.net(x) + self.bias if self.rank == 0 else x + self.bias


def run_accumulation(rank):
    """Checkpoints of both kinds, and calls whose gradients add up before DDP averages them."""
    for kind in (None, False, True):
        nets: Any = [nn.parallel.DistributedDataParallel(net) for net in (shared(Stack(kind)), Stack())]
        for net in nets:
            first, second = data()[rank::2].requires_grad_().split(2)
            with net.no_sync():
                net(first).square().mean().backward()
            net(second).square().mean().backward()
        grads = ([p.grad for p in net.parameters()] for net in nets)
        assert_close(*grads)


def run_differences(rank):
    """What is not the same on both ranks is said on both, or each maps by itself; nobody waits for ever."""
    owners = sk.Owners(when="always")
    with pytest.raises(errors.OptionError, match="same weights on all ranks"):
        sk.group_(nn.Sequential(*list(Stack().blocks)[rank:]), owners=owners)
    net: Any = sk.group_(Stack(), owners=owners)
    kept = Group.read
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Group, "read", lambda self: int("no"))
        with (
            pytest.raises(ValueError, match="no") if rank == 1 else pytest.raises(errors.PeerError, match="rank 1 Val")
        ):
            net(data())
    assert Group.read is kept
    if rank == 0:
        net.blocks[0][0].requires_grad_(False)
    alone: Any = Stack()
    for model in (net, alone):
        model(data()).sum().backward()
    pairs = [(a, b) for a, b in zip(net.parameters(), alone.parameters(), strict=True) if a.requires_grad]
    assert len(pairs) == 18 - 2 * (1 - rank)
    assert_close(*zip(*((a.grad, b.grad) for a, b in pairs), strict=True))  # each by itself, as there is no DDP
    net.requires_grad_(True)
    net(data())
    with pytest.MonkeyPatch.context() as patch:
        mapped = rows_mapped(patch)
        net(data()).sum().backward()
        assert sum(mapped) in (3, 6)
    slow, fast = sk.Link(1.0, 1e3), sk.Link(0.0, 1e30)
    for link, counts in ((slow, {9}), (fast, {3, 6}), (None, {3, 6, 9})):
        with pytest.MonkeyPatch.context() as patch:
            if link is not None:  # what is timed is no law
                patch.setattr(Sharing, "_seconds", lambda *_: (1e-3, 0.0))
            net = sk.group_(Stack(), owners=sk.Owners(link=link))
            mapped = rows_mapped(patch)
            trained(net, data(), steps=1)
            assert sum(mapped) in counts


def run_one_after_the_other(rank):
    for run in (run_training, run_frames, run_parts_in_use, run_accumulation, run_differences):
        run(rank)


@pytest.mark.slow
def test_two_processes_that_share_agree_with_two_that_do_not(tmp_path):
    assert on_two_ranks(run_one_after_the_other, tmp_path / "store") == [0, 0]


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0.1, 100)), min_size=1, max_size=5), st.integers(1, 9))
def test_each_weight_has_one_owner_and_shares_are_equal_to_within_one_weight(kinds, ranks):
    counts, costs = zip(*kinds, strict=True)
    rows = rows_of_ranks(counts, costs, ranks)
    total = sum(count * cost for count, cost in kinds)
    for i, count in enumerate(counts):
        assert [j for row in rows for j in range(count)[row[i]]] == list(range(count))
    for row in rows:
        share = sum((part.stop - part.start) * cost for part, cost in zip(row, costs, strict=True))
        assert share <= total / ranks + max(costs) * (1 + 1e-9)


def test_sharing_is_cheaper_where_mapping_costs_more_than_talking():
    kinds = [Kind(count=1000, size=4 * 64 * 64, cost=1.0, seconds=2e-4)]
    prediction = predict(kinds, 64, sk.Link(2e-5, 1e10))
    assert prediction.mapping == pytest.approx(16 * 2e-4)
    assert prediction.received == 2 * 63 * 16 * 4 * 64 * 64
    assert prediction.shared < prediction.alone
    slow = predict(kinds, 64, sk.Link(2e-5, 1e8))
    assert slow.shared > slow.alone


def test_owners_are_refused_without_ranks():
    with pytest.raises(errors.OptionError, match="init_process_group"):
        sk.Owners()
    with pytest.raises(errors.OptionError, match="cheaper"):
        sk.Owners(when="sometimes")  # type: ignore[arg-type]
