"""Optimizers of frames with two gloo processes, spawned and under torchrun: DDP and FSDP2 equal one process."""

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers_at_hand import STATEFUL, descend
from torch import nn
from two_ranks import equal_on_both, mesh, on_two_ranks, rank_of_two, sharded

import stiefelkit as sk
from stiefelkit.testing import seeds


class Parts(nn.Module):
    """Real and imaginary parts of a complex layer's output, from a real input."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x.to(torch.complex64))
        return y.real + y.imag


def make() -> Any:
    """Two square frames of one shape, a wide one and a complex one."""
    seeds.reseed()
    layers = [sk.orthogonal(nn.Linear(8, 8), "weight", "stiefel") for _ in range(2)]
    unitary = sk.orthogonal(nn.Linear(8, 8, bias=False, dtype=torch.complex64), "weight", "stiefel")
    wide = sk.orthogonal(nn.Linear(8, 3), "weight", "stiefel")
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], Parts(unitary), nn.Tanh(), wide)


def data():
    return torch.randn(16, 8, generator=seeds.generator(1))


def build(net, name):
    groups = sk.optim.parameter_groups(net, lr=1e-2, stiefel=dict(lr=0.05))
    return (
        getattr(sk.optim, name)(groups, eps=1e-3, **STATEFUL[name])
        if "SGD" not in name
        else getattr(sk.optim, name)(groups, momentum=0.9)
    )


def train(net, optimizer, x, steps=5):
    descend(optimizer, lambda: (net(x) - 1).square().mean(), steps)


def run_ddp(rank, names=tuple(STATEFUL)):
    for name in names:
        net = nn.parallel.DistributedDataParallel(make())
        train(net, build(net.module, name), data()[rank::2])
        alone = make()
        train(alone, build(alone, name), data())
        for ours, theirs in zip(net.module.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4), name
            assert equal_on_both(torch.view_as_real(ours) if ours.is_complex() else ours)


def run_fsdp(rank):
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    def made() -> Any:
        net = sk.fully_shard_coordinates(make(), mesh())
        return sharded(net, *(layer for layer in net.children() if list(layer.parameters())))

    for name in STATEFUL:
        net = made()
        optimizer = build(net, name)
        train(net, optimizer, data()[rank::2], steps=3)
        frames = [p for group in optimizer.param_groups if group["manifold"] for p in group["params"]]
        assert len(frames) == 4
        assert all(hasattr(optimizer.state[p]["lo"], "full_tensor") for p in frames)
        model_state, state = copy.deepcopy((get_model_state_dict(net), get_optimizer_state_dict(net, optimizer)))
        train(net, optimizer, data()[rank::2], steps=2)
        alone = make()
        train(alone, build(alone, name), data())
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(ours.full_tensor(), theirs, atol=1e-4), name
        assert all(d.error <= 2 * d.limit + 1.2e-7 for d in sk.drift(net).values())
        again = made()
        other = build(again, name)
        set_model_state_dict(again, model_state)
        set_optimizer_state_dict(again, other, state)
        train(again, other, data()[rank::2], steps=2)
        for ours, theirs in zip(again.parameters(), net.parameters(), strict=True):
            assert torch.equal(ours.to_local(), theirs.to_local()), name


def run_a_bad_gradient_on_one_rank(rank):
    for sizes in ((8,), (8, 4)):
        seeds.reseed()
        net: Any = nn.Sequential(*(sk.orthogonal(nn.Linear(8, n), "weight", "stiefel") for n in sizes))
        sharded(net)
        optimizer = build(net, "CayleySGD")
        train(net, optimizer, data()[rank::2], steps=1)
        before = [p.to_local().clone() for p in net.parameters()]
        frame = [p for p in net.parameters() if p.dim() == 2][-1]
        if rank == 1:
            frame.grad.to_local()[0, 0] = torch.nan
        with pytest.raises(sk.errors.NonFiniteError, match=r"Linear\.weight|another rank"):
            optimizer.step()
        assert all(torch.equal(a, p.to_local()) for a, p in zip(before, net.parameters(), strict=True))


@pytest.mark.slow
def test_ranks_stay_bit_identical_under_ddp(tmp_path):
    assert on_two_ranks(run_ddp, tmp_path / "store") == [0, 0]


@pytest.mark.slow
def test_sharded_frames_are_gathered_moved_and_scattered(tmp_path):
    assert on_two_ranks(run_fsdp, tmp_path / "store") == [0, 0]


def test_every_rank_notices_a_bad_gradient(tmp_path):
    assert on_two_ranks(run_a_bad_gradient_on_one_rank, tmp_path / "store") == [0, 0]


@pytest.mark.slow
def test_torchrun_runs_the_same():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    rank_of_two([functools.partial(run_ddp, names=("StiefelAdam",)), run_a_bad_gradient_on_one_rank])
