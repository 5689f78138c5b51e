"""Two gloo processes: DDP equals one process on the whole batch, FSDP2 trains and measures sharded coordinates."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stiefelkit as sk
from stiefelkit import errors


def make() -> Any:
    torch.manual_seed(0)
    square = sk.orthogonal(nn.Linear(8, 8), "weight", "cayley")
    wide = sk.orthogonal(nn.Linear(8, 4), "weight", "householder")
    return nn.Sequential(square, nn.Tanh(), wide)


def train(net, x, steps=3):
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def data():
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def run_ddp(rank):
    net = nn.parallel.DistributedDataParallel(make())
    train(net, data()[rank::2])
    alone = make()
    train(alone, data())
    for ours, theirs in zip(net.module.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    for parameter in net.parameters():
        both = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(both, parameter.detach())
        assert torch.equal(*both)


def run_fsdp(rank):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = make()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, data()[rank::2])
    measured = sk.drift(net)
    assert list(measured) == ["0.weight", "2.weight"]
    assert all(d.error < 5e-7 for d in measured.values())
    with pytest.raises(errors.UnfilledError, match="unshard"):
        net[0].weight  # noqa: B018
    alone = make()
    train(alone, data())
    whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        fresh = make()
        fresh.load_state_dict(whole)
        for ours, theirs in zip(fresh.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
    frame = sk.init.haar((8, 8), generator=torch.Generator().manual_seed(2)).float()
    sk.assign_(net[0], "weight", frame)
    assert torch.allclose(net[0].parametrizations["weight"].evaluate_whole(), frame, atol=1e-6)


def worker(rank, run, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    run(rank)
    gc.collect()  # what holds the group goes first, and neither process before the other is done
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("run", [run_ddp, run_fsdp])
def test_two_processes_agree_with_one(run, tmp_path):
    # What fails in a process is raised here.
    torch.multiprocessing.spawn(worker, (run, tmp_path / "store"), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
