"""What is done where no value is read: on devices beside CPUs, and with capturable=True."""

import copy
import math

import pytest
import torch
from optimizers_at_hand import OPTIMIZERS, STATEFUL, every_optimizer, excess, frame, gradient, group, run
from torch import nn

import stiefelkit as sk
from benchmarks import launches
from stiefelkit.errors import NonFiniteError
from stiefelkit.functional import exponential, norms_of
from stiefelkit.functional._arithmetic.devices import may_sync_host, without_reads
from stiefelkit.testing import LawBroken, refusing_reads, seeds

GRADIENTS = [gradient((8, 5), seed=seed) for seed in range(6)]


def test_reads_are_free_on_a_cpu_unless_the_thread_says_otherwise():
    t = torch.ones(2, 2)
    assert may_sync_host(t)
    assert not may_sync_host(t.to("meta"))
    with without_reads():
        assert not may_sync_host(t)
        (norms,) = norms_of(t)
        assert isinstance(norms[0], torch.Tensor)
    assert norms_of(t) == [[2.0]]


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: torch.equal(t, t.clone()),
        lambda t: torch.matrix_exp(t),
        lambda t: t * torch.tensor(2.0),
        lambda t: t.new_tensor([1.0, 2.0]) + t,
        lambda t: t[[0, 1]],
        lambda t: t[0, 0].__setitem__((), 2.0),
    ],
)
def test_a_read_or_a_tensor_made_on_the_host_is_refused(read):
    t = torch.ones(2, 2)
    read(t)
    with pytest.raises(LawBroken, match=r"reads a value|from the host"), refusing_reads():
        read(t)


LAYERS = {
    "OrthogonalLinear": ((8, 8), (3, 8)), "HadamardLinear": ((12, 12), (3, 12)), "ModReLU": ((8,), (2, 8)),
    "OrthogonalConv1d": ((4, 4, 3), (2, 4, 9)), "OrthogonalConvTranspose2d": ((4, 4, 3), (2, 4, 9, 9)),
    "CayleyConv1d": ((4, 4, 3), (2, 4, 9)), "CayleyConv2d": ((4, 4, 3), (2, 4, 9, 9)),
    **{name: ((5, 8), (7, 2, 5)) for name in ("GORU", "LRU", "LinearTransitionRNN", "OrthogonalRNN", "RotationRNN")},
    **{name: ((5, 8), (7, 2, 5)) for name in ("LRUBlock", "ReflectorBlock", "ReflectorRNN", "RotationBlock")},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_copy_nothing_from_the_host(name):
    sizes, shape = LAYERS[name]
    layer, x = getattr(sk.nn, name)(*sizes), torch.ones(shape)
    for context in (without_reads, refusing_reads):  # constants are made at first use
        with context():
            y = layer(x)
            y = y[0] if isinstance(y, tuple) else y
            y.abs().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 100.0, 1e4])
def test_the_exponential_takes_as_many_squarings_as_it_needs(size, dtype):
    a = torch.randn(3, 9, 9, dtype=dtype, generator=seeds.generator(0)) * size
    a = a - a.mH
    a[1] *= 1e-2  # each matrix its own
    with without_reads():
        w = exponential(a, skew=True)
    assert torch.dist(w, exponential(a, skew=True)).item() <= 1e-14 * (1 + size) * 30


@pytest.mark.parametrize("shape", [(8, 5), (5, 6, 3)])
@every_optimizer
def test_capturable_goes_on_a_cpu_as_any_device_does(name, shape):
    gradients = [gradient(shape, seed=seed) for seed in range(6)]
    captured, unread, read = frame(shape), frame(shape), frame(shape)
    run(OPTIMIZERS[name](group(captured), lr=0.02, capturable=True, **STATEFUL[name]), captured, gradients)
    with without_reads():
        run(OPTIMIZERS[name](group(unread), lr=0.02, **STATEFUL[name]), unread, gradients)
    run(OPTIMIZERS[name](group(read), lr=0.02, **STATEFUL[name]), read, gradients)
    assert torch.equal(captured, unread)
    assert excess(captured) <= 2 + 4
    assert torch.dist(captured, read).item() <= 0.01 * torch.dist(read, frame(shape)).item()


@pytest.mark.parametrize("saved", [False, True])
@every_optimizer
def test_states_load_from_one_road_onto_the_other(name, saved):
    w, twin = frame((8, 5)), frame((8, 5))
    first = OPTIMIZERS[name](group(w), lr=0.02, capturable=saved, **STATEFUL[name])
    run(first, w, GRADIENTS[:3])
    second = OPTIMIZERS[name](group(twin), lr=0.02, capturable=not saved, **STATEFUL[name])
    twin.data.copy_(w.data)
    state = copy.deepcopy(first.state_dict())
    for settings in state["param_groups"]:
        settings["capturable"] = not saved
    second.load_state_dict(state)
    run(first, w, GRADIENTS[3:])
    run(second, twin, GRADIENTS[3:])
    assert torch.dist(w, twin).item() <= 0.01 * torch.dist(w, frame((8, 5))).item()


def test_a_refused_step_is_counted_and_an_error_where_values_are_read():
    w = frame((8, 5))
    optimizer = sk.optim.CayleyAdam(group(w), lr=0.02, capturable=True)
    run(optimizer, w, [GRADIENTS[0], GRADIENTS[1] * math.nan, GRADIENTS[2]])
    assert optimizer.state[w]["refused"].item() == 1
    assert optimizer.state[w]["step"].item() == 2
    with pytest.raises(NonFiniteError):
        run(sk.optim.CayleyAdam(group(w), lr=0.02), w, [GRADIENTS[1] * math.nan])


def test_a_frame_that_is_none_any_more_does_not_move():
    w = frame((8, 5))
    optimizer = sk.optim.CayleySGD(group(w), lr=0.02, capturable=True)
    run(optimizer, w, GRADIENTS[:1])
    w.data.mul_(2)
    before = w.detach().clone()
    run(optimizer, w, GRADIENTS[1:2])
    assert torch.equal(w, before)
    assert optimizer.state[w]["refused"].item() == 1


def test_a_rate_that_is_a_tensor_is_not_read():
    w, twin = frame((8, 5)), frame((8, 5))
    lr = torch.tensor(0.5, dtype=torch.float64)
    optimizer = sk.optim.CayleySGD(group(w), lr=lr, capturable=True)
    lr.fill_(0.02)  # as a schedule does between replays
    with refusing_reads():
        run(optimizer, w, GRADIENTS)
    run(sk.optim.CayleySGD(group(twin), lr=0.02, capturable=True), twin, GRADIENTS)
    assert torch.dist(w, twin).item() < 1e-6


@pytest.mark.parametrize("max_norm", [0.5, 1e3, math.inf])
def test_clipping_reads_nothing_either(max_norm):
    layer = sk.orthogonal(nn.Linear(5, 8), "weight", "stiefel")
    totals, gradients = [], []
    for context in (refusing_reads, torch.no_grad):
        for p in layer.parameters():
            p.grad = gradient(p.shape if p.dim() == 2 else (8, 1)).view(p.shape)
        with context():
            totals.append(sk.optim.clip_grad_norm_(layer, max_norm))
        gradients.append([p.grad for p in layer.parameters()])
    assert totals[0].item() == pytest.approx(totals[1].item(), rel=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(*gradients, strict=True))


def test_what_launches_is_counted_and_what_only_looks_is_not():
    a, b = torch.ones(3, 3), torch.ones(3, 3)
    assert launches.counts_of(lambda: (a.mT @ b).view(9)[1:].unsqueeze(0)) == (1, 0)
    assert launches.counts_of(lambda: (a + b).sum().item()) == (2, 1)


def test_benchmarks_launches_counts_and_none_of_ours_reads():
    runs = [launches.of_map(each, "8x8", "float32") for each in launches.MAPS.values()]
    methods = launches.OPTIMIZERS.values()
    runs += [launches.of_optimizer(each, size, "float32") for each in methods for size in ("8x4", "8x8")]
    for count, reads in map(launches.counts_of, runs):
        assert count > 0
        assert reads == 0


@every_optimizer
def test_a_step_launches_no_more_for_many_frames_than_for_few(name):
    counts = []
    for frames in (3, 12):
        ws = [frame((6, 4), seed=i) for i in range(frames)]
        optimizer = OPTIMIZERS[name](group(*ws), lr=0.01, **STATEFUL[name])
        for i, w in enumerate(ws):
            w.grad = gradient((6, 4), seed=100 + i)
        counts.append(launches.counts_of(optimizer.step))
    assert counts[0] == counts[1]
