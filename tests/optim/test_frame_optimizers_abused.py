"""Optimizers of frames where things go wrong: huge steps, casts, foreign states, changes from outside."""

import copy
from typing import Any

import pytest
import torch
from optimizers_at_hand import OPTIMIZERS, STATEFUL, every_optimizer, frame, group, run
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.testing import seeds


def gradient(w, seed=0, size=1.0):
    g = torch.randn(w.shape, dtype=w.dtype, generator=seeds.generator(seed))
    return size * g / g.norm()


def make(name, *ws, metric="canonical", **options) -> Any:
    return OPTIMIZERS[name](group(*ws, metric=metric), **options)


def excess(w):
    """||W^H W - I||_F in limits, less the scatter of one eps."""
    p, dtype = w.shape[-1], w.dtype
    return (orthogonality_error(w).max().item() - torch.finfo(dtype).eps) / rounding_limit(p, dtype)


def test_a_long_step_is_the_cayley_transform_too():
    w = frame((12, 4))
    g = gradient(w)
    exact, g64 = w.detach().double(), g.double()
    b = g64 @ exact.mT - exact @ g64.mT
    eye = torch.eye(12, dtype=torch.float64)
    expected = torch.linalg.solve(eye + 500 * b, (eye - 500 * b) @ exact)
    run(make("MultiplicativeCayley", w, lr=1e3), w, [g])
    assert torch.dist(w, expected) < 1e-3


@every_optimizer
def test_a_gradient_that_overflows_moves_no_other_frame(name):
    first, second = frame((16, 16)), frame((20, 4))
    optimizer = make(name, first, second, lr=0.1)
    before = [w.detach().clone() for w in (first, second)]
    first.grad, second.grad = gradient(first), gradient(second, size=1.7e19)
    with pytest.raises(errors.NonFiniteError, match="overflows"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, (first, second), strict=True))


@every_optimizer
def test_moments_that_overflow_are_an_error_and_not_written(name):
    w = frame((16, 16))
    optimizer = make(name, w, lr=0.1, **STATEFUL[name])
    for size in (5e18, 1e20, 1e22):
        w.grad = gradient(w, size=size)
        try:
            optimizer.step()
        except errors.NonFiniteError:
            pass
    run(optimizer, w, [gradient(w, seed) for seed in range(3)])
    assert all(torch.isfinite(v).all() for v in optimizer.state[w].values() if isinstance(v, torch.Tensor))
    assert excess(w) <= 2


@every_optimizer
def test_casts_between_steps(name):
    net: Any = sk.orthogonal(nn.Linear(8, 8, bias=False), "weight", "stiefel")
    optimizer = OPTIMIZERS[name](sk.optim.parameter_groups(net, lr=1e-2))
    for dtype, bound in ((torch.float32, 2), (torch.float64, 20), (torch.float32, 2), (torch.bfloat16, 2)):
        net.to(dtype)
        (w,) = sk.coordinates(net, "weight").values()
        run(optimizer, w, [gradient(w, seed) for seed in range(3)])
        assert excess(w) <= bound


@pytest.mark.parametrize("pair", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
@every_optimizer
def test_a_state_that_was_loaded_into_another_dtype_is_one_that_its_own_optimizer_takes(name, pair):
    """What rounding left of a frame in one dtype is nothing that belongs to it in another."""
    w = frame((8, 8), pair[0])
    optimizer = make(name, w, **STATEFUL[name])
    run(optimizer, w, [gradient(w, seed) for seed in range(3)])
    other = make(name, frame((8, 8), pair[1]), **STATEFUL[name])
    other.load_state_dict(optimizer.state_dict())
    (state,) = other.state_dict()["state"].values()
    assert "lo" not in state
    other.load_state_dict(other.state_dict())
    (copied,) = other.state_dict()["state"].values()
    assert not any(isinstance(value, torch.Tensor) and value is state[key] for key, value in copied.items())


@every_optimizer
def test_a_state_of_torchs_own_optimizer_is_refused_with_the_remedy(name):
    two = sk.optim.parameter_groups(sk.orthogonal(nn.Linear(3, 3), "weight", "stiefel"), lr=1e-2)
    ours, plain = OPTIMIZERS[name](two), OPTIMIZERS[name].free_optimizer
    with pytest.raises(errors.CheckpointError, match="load the model"):
        ours.load_state_dict(plain([frame((16, 16))]).state_dict())


@pytest.mark.parametrize("change", ["assign", "reset", "load"])
def test_a_remainder_does_not_survive_a_new_frame(change):
    net: Any = sk.orthogonal(nn.Linear(64, 64, bias=False), "weight", "stiefel")
    other: Any = sk.orthogonal(nn.Linear(64, 64, bias=False), "weight", "stiefel")
    optimizer = sk.optim.CayleySGD(sk.optim.parameter_groups(net, lr=1e-6))
    (w,) = sk.coordinates(net, "weight").values()
    run(optimizer, w, [gradient(w)])
    old = optimizer.state[w]["lo"].clone()
    {
        "assign": lambda: sk.assign_(net, "weight", other.weight.detach()),
        "reset": lambda: sk.reset_(net, "weight"),
        "load": lambda: net.load_state_dict(other.state_dict()),
    }[change]()
    new = w.detach().clone()
    run(optimizer, w, [gradient(w)])
    master = w.detach().double() + optimizer.state[w]["lo"].double()
    assert orthogonality_error(master).item() < 0.1 * rounding_limit(64, torch.float32)
    assert torch.dist(optimizer.state[w]["lo"], old) > 0.1 * old.norm()
    assert torch.dist(w, new) < 1e-4


def test_a_loaded_frame_that_is_barely_one_is_polished_at_the_next_step():
    net: Any = sk.orthogonal(nn.Linear(16, 16, bias=False), "weight", "stiefel")
    optimizer = sk.optim.MultiplicativeCayley(sk.optim.parameter_groups(net, lr=1e-5))
    (w,) = sk.coordinates(net, "weight").values()
    run(optimizer, w, [gradient(w)])
    state = {
        key: value * (1 + 4 * rounding_limit(16, w.dtype)) for key, value in net.state_dict().items() if "_" not in key
    }
    net.load_state_dict(net.state_dict() | state)
    assert excess(w) > 10
    run(optimizer, w, [gradient(w)])
    assert excess(w) <= 2


@every_optimizer
def test_a_write_through_data_lasts_until_a_polish_and_no_longer_than_until_all_values_are_looked_at(name):
    net: Any = sk.orthogonal(nn.Linear(6, 6), "weight", "stiefel")
    optimizer = OPTIMIZERS[name](sk.optim.parameter_groups(net, lr=1e-5))
    w = net.parametrizations.weight.original0
    for look in (lambda: net.state_dict(), lambda: copy.deepcopy(net), lambda: sk.bake(copy.deepcopy(net))):
        run(optimizer, w, [gradient(w)])
        w.data[:, 0] *= 1.05
        w.data[:, 1] *= (2 - 1.05**2) ** 0.5  # the norm stays, so that no read would see it
        run(optimizer, w, [gradient(w)])
        if name in ("POGO", "Landing"):
            assert excess(w) <= 30
        look()
        assert excess(w) <= 100


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (40, 20)], ids=str)
@every_optimizer
def test_ten_steps_after_a_mean_that_was_written_through_data_end_at_a_frame(name, shape, dtype, count):
    """As averages write, which torch does not count."""
    ws = [frame(shape, dtype, k) for k in range(count)]
    optimizer = make(name, *ws, lr=0.1)

    def step(seed):
        for k, w in enumerate(ws):
            w.grad = gradient(w, 7 * seed + k)
        optimizer.step()

    step(0)
    before = [w.detach().clone() for w in ws]
    step(1)
    for w, old in zip(ws, before, strict=True):
        w.data.lerp_(old, 0.5)
    assert all(excess(w) > 100 for w in ws)
    for seed in range(2, 12):
        step(seed)
    assert all(excess(w) <= (20 if dtype == torch.float64 else 2) for w in ws)


def free_beside(name, w, **options) -> Any:
    """An optimizer of a frame and of an embedding that moves freely, with gradients, that of the embedding sparse."""
    free = nn.Parameter(torch.ones(4, 4))
    nn.functional.embedding(torch.tensor([1]), free, sparse=True).sum().backward()
    w.grad = gradient(w)
    return free, OPTIMIZERS[name]([*sk.optim.frames([w]), {"params": [free]}], **options)


@every_optimizer
def test_what_torchs_optimizer_refuses_is_refused_before_a_frame_moves(name):
    w = frame((4, 4))
    before = w.detach().clone()
    free, optimizer = free_beside(name, w)
    if optimizer.free_optimizer is torch.optim.SGD:
        optimizer.step()
        assert free[1].ne(1).all()
        assert free[0].eq(1).all()
        assert not torch.equal(w, before)
        return
    with pytest.raises(errors.OptimizerError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(w, before)
    free, optimizer = free_beside(name, w, capturable=True)
    free.grad = free.grad.to_dense()
    with pytest.raises(errors.OptimizerError, match="capturable=False"):
        optimizer.step()
    assert torch.equal(w, before)
