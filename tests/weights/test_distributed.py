"""Two gloo processes: DDP equals one process on the whole batch, FSDP2 trains and measures sharded coordinates."""

from typing import Any

import pytest
import torch
from optimizers_at_hand import descend
from torch import nn
from two_ranks import equal_on_both, mesh, on_two_ranks, sharded

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.testing import seeds
from stiefelkit.weights import find, optimizer_hooks


class Real(nn.Module):
    """Real inputs and outputs for complex layers."""

    def forward(self, x):
        return torch.cat([x.real, x.imag], dim=-1) if x.is_complex() else torch.complex(x, x)


def make(name: str = "cayley", dtype: torch.dtype = torch.float32) -> Any:
    """A square weight by the named map and a wide one by another; complex if the map does no real ones."""
    seeds.reseed()
    square = nn.Linear(8, 8, dtype=dtype)
    wide = sk.orthogonal(nn.Linear(8, 4, dtype=dtype), "weight", "householder")
    if sk.available()[name].supports((8, 8), dtype) is None:
        return nn.Sequential(sk.orthogonal(square, "weight", name), nn.Tanh(), wide)
    middle = sk.orthogonal(nn.Linear(8, 8, bias=False, dtype=torch.complex64), "weight", name)
    return nn.Sequential(square, Real(), middle, Real(), nn.Linear(16, 8), nn.Tanh(), wide)


def train(net, x, steps=3):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)  # Adam would blow rounding up
    descend(optimizer, lambda: net(x).square().mean(), steps)


def data():
    return torch.randn(16, 8, generator=seeds.generator(1))


def free():
    """Names of the maps whose coordinates any optimizer may move."""
    return [name for name in sk.available() if not find.coordinate_manifolds(make(name))]


def run_ddp(rank):
    for name in free():
        net, alone = nn.parallel.DistributedDataParallel(make(name)), make(name)
        train(net, data()[rank::2])
        train(alone, data())
        for ours, theirs in zip(net.module.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5), name
        assert all(map(equal_on_both, net.parameters()))


def run_fsdp(rank):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    for name in free():
        if sk.available()[name].supports((8, 8), torch.float32) is None:
            net = make(name)
            train(sharded(net, net[0], net[2]), data()[rank::2])
            alone = make(name)
            train(alone, data())
            for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
                assert torch.allclose(ours.full_tensor(), theirs, atol=1e-5), name
    net = make()
    train(sharded(net, net[0], net[2]), data()[rank::2])
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
    frame = sk.init.haar((8, 8), generator=seeds.generator(2)).float()
    sk.assign_(net[0], "weight", frame)
    held = net[0].parametrizations["weight"]
    assert torch.allclose(held.param(*held.gathered()), frame, atol=1e-6)


def run_fsdp_of_two_dtypes(rank):
    net: Any = make("matrix_exp", torch.bfloat16)
    sk.fully_shard_coordinates(net, mesh())
    train(sharded(net, net[0], net[2]), data()[rank::2].bfloat16())
    assert all(d.error < 0.05 for d in sk.drift(net).values())
    dtypes = {p.dtype for p in net.parameters()}
    assert dtypes == {torch.float32, torch.bfloat16}
    alone = make("matrix_exp", torch.bfloat16)
    train(alone, data().bfloat16())
    pairs: Any = zip(net.parameters(), alone.parameters(), strict=True)
    for ours, theirs in pairs:
        assert torch.allclose(ours.full_tensor().float(), theirs.float(), atol=0.05)


def run_fsdp_of_layers_that_apply_their_weight(rank):
    for dtype in (torch.float32, torch.bfloat16):
        seeds.reseed()
        net: Any = sk.nn.OrthogonalLinear(80, 80, parametrization="householder", reflections=2, dtype=dtype)
        x = torch.randn(4, 80, dtype=dtype)
        expected = net(x)
        sharded(sk.fully_shard_coordinates(net, mesh()))
        y = net(x)
        assert torch.allclose(y, expected, atol=0.05 if dtype == torch.bfloat16 else 1e-5)
        y.float().square().sum().backward()


def run_frames_that_are_sharded(rank):
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        seeds.reseed()
        net: Any = nn.Sequential(*(nn.Linear(8, n, dtype=dtype) for n in (8, 4)))
        for layer in net:
            sk.orthogonal(layer, "weight", "stiefel")
        whole = {key: value.clone() for key, value in net.state_dict().items()}
        x = torch.randn(16, 8).to(dtype)
        expected = net(x)
        sharded(net, *(sk.fully_shard_coordinates(layer, mesh()) for layer in net))
        assert torch.equal(net(x), expected)
        net(x[rank::2]).abs().square().sum().backward()
        frames: Any = optimizer_hooks.frames().values()
        found = {coordinate_list.weight: manifold for coordinate_list, _, manifold in frames}
        assert found == {"Linear.weight": "stiefel:canonical"}
        with pytest.raises(errors.OptimizerError, match=r"Linear\.weight \(8 x 8\)"):
            torch.optim.SGD(net.parameters(), lr=0.1).step()
        with pytest.raises(errors.OptimizerError, match="sharded"):
            sk.optim.geoopt_parameters(net)
        state = net.state_dict()
        net.load_state_dict(state)
        for name, coordinate_list in ((name, layer.parametrizations["weight"]) for name, layer in net.named_children()):
            assert torch.equal(
                coordinate_list.stiefel.full_tensor(), whole[f"{name}.parametrizations.weight.original0"]
            )
        key = "0.parametrizations.weight.original0"
        with pytest.raises(errors.CheckpointError, match="orthonormal"):
            net.load_state_dict(state | {key: 1.1 * state[key]})
        assert all(d.error < 0.05 for d in sk.drift(net).values())


def run_layers_that_are_made_without_memory(rank):
    """torch's recipe for models that fit on no single rank, each with a generator of its own."""
    for name in ("cayley", "householder", "stiefel", "matrix_exp"):
        net: Any = nn.Sequential(nn.Linear(8, 6, device="meta"), nn.RNNCell(6, 6, device="meta"))
        sk.orthogonal(net, ["0.weight", "1.weight_hh"], name)
        sharded(net, *net)
        net.to_empty(device="cpu")
        seeds.reseed(rank)
        for module in net.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        assert all(drift.bits_lost < 1 for drift in sk.drift(net).values()), name
        assert all(torch.isfinite(p.full_tensor()).all() for p in net.parameters())
        for weight in find.orthogonal_weights(net):
            w = weight.coordinate_list.param(*weight.coordinate_list.gathered()).detach()
            assert equal_on_both(w), name


def run_states_that_are_shared_out(rank):
    """torch's optimizer that leaves each rank a part of the states, around one that moves frames."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    nets: Any = []
    for _ in range(2):
        seeds.reseed()
        net: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        nets.append(sk.orthogonal(net, ["0.weight", "2.weight"], "stiefel"))
    shared, alone = nets
    wrapped, x = nn.parallel.DistributedDataParallel(shared), torch.randn(4, 8)
    groups = sk.optim.parameter_groups(shared, lr=0.1)
    optimizer: Any = ZeroRedundancyOptimizer(groups, optimizer_class=sk.optim.CayleyAdam, lr=0.1)
    other = sk.optim.CayleyAdam(sk.optim.parameter_groups(alone, lr=0.1))
    for _ in range(3):
        for each, stepped in ((wrapped, optimizer), (alone, other)):
            stepped.zero_grad()
            each(x).square().sum().backward()
            stepped.step()
    for a, b in zip(shared.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert all(drift.bits_lost < 1 for drift in sk.drift(shared).values())
    with pytest.raises(errors.OptimizerError, match="ZeroRedundancyOptimizer"):
        ZeroRedundancyOptimizer(shared.parameters(), optimizer_class=torch.optim.Adam, lr=0.1).step()


RUNS = [
    run_ddp,
    run_fsdp,
    run_fsdp_of_two_dtypes,
    run_fsdp_of_layers_that_apply_their_weight,
    run_frames_that_are_sharded,
    run_layers_that_are_made_without_memory,
    run_states_that_are_shared_out,
]


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_two_processes_agree_with_one(run, tmp_path):
    assert on_two_ranks(run, tmp_path / "store") == [0, 0]
