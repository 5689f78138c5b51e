"""What every optimizer of frames does beside the laws: torch's habits, few products, words for what is refused."""

import copy
import math

import pytest
import torch
from optimizers_at_hand import (
    OPTIMIZERS,
    STATEFUL,
    Shapes,
    descend,
    every_optimizer,
    excess,
    frame,
    gradient,
    group,
    run,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.testing import seeds


@every_optimizer
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named(name, count, bad):
    net = nn.Sequential(*(sk.orthogonal(nn.Linear(4 + i, 4 + i), "weight", "stiefel") for i in range(count)))
    optimizer = OPTIMIZERS[name](sk.optim.parameter_groups(net, lr=0.1), **STATEFUL[name])
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    (w,) = sk.coordinates(net[-1], "weight").values()
    assert w.grad is not None
    w.grad[0, 0] = bad
    with pytest.raises(errors.NonFiniteError, match=r"Linear\.weight"):
        optimizer.step()
    w.grad[0, 0] = 1.0
    optimizer.step()


@every_optimizer
def test_closures_missing_gradients_and_frozen_groups(name):
    first, second = frame((5, 5)), frame((5, 5), seed=3)
    kept = second.detach().clone()
    groups = [*group(first), *group(second)]
    optimizer = OPTIMIZERS[name](groups, lr=0.1)

    def closure():
        optimizer.zero_grad(set_to_none=True)
        loss = (first - torch.eye(5)).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert torch.equal(second, kept)
    second.requires_grad_(False)
    optimizer.step(closure)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert torch.equal(second, kept)


@every_optimizer
def test_sparse_gradients_of_frames_move_them_as_dense_ones(name):
    w, twin = frame((6, 4)), frame((6, 4))
    for p, sparse in ((w, True), (twin, False)):
        optimizer = OPTIMIZERS[name](group(p), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.embedding(torch.tensor([1, 2]), p, sparse=sparse).square().sum().backward()
            optimizer.step()
    assert torch.equal(w, twin)


@every_optimizer
def test_weights_of_16_bits_train_through_a_frame_of_32(name):
    seeds.reseed()
    net = sk.orthogonal(nn.Linear(8, 8, dtype=torch.bfloat16), "weight", "stiefel")
    optimizer = OPTIMIZERS[name](sk.optim.parameter_groups(net, lr=0.01, stiefel={"lr": 0.1}))
    descend(optimizer, lambda: net(torch.ones(8, dtype=torch.bfloat16)).square().sum(), 5)
    (coordinate,) = sk.coordinates(net, "weight").values()
    assert (coordinate.dtype, net.weight.dtype) == (torch.float32, torch.bfloat16)
    assert excess(coordinate) < 2.1


@every_optimizer
def test_a_grad_scaler_skips_what_overflowed_and_unscales_the_rest(name):
    seeds.reseed()
    net = sk.orthogonal(nn.Linear(4, 4), "weight", "stiefel")
    optimizer = OPTIMIZERS[name](sk.optim.parameter_groups(net, lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # pyright: ignore[reportPrivateImportUsage]
    twin = copy.deepcopy(net)
    other = OPTIMIZERS[name](sk.optim.parameter_groups(twin, lr=0.1))
    before = net.weight.detach().clone()
    scaler.scale(net(torch.full((4,), math.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(net.weight, before)
    optimizer.zero_grad()
    scaler.scale(net(torch.ones(4)).square().sum()).backward()
    scaler.step(optimizer)
    twin(torch.ones(4)).square().sum().backward()
    other.step()
    assert torch.allclose(net.weight, twin.weight, atol=1e-6)
    assert not torch.equal(net.weight, before)


@every_optimizer
def test_tall_frames_never_need_an_n_by_n_matrix(name):
    w = frame((300, 4))
    optimizer = OPTIMIZERS[name](group(w), lr=0.1, **STATEFUL[name])
    with Shapes() as seen:
        run(optimizer, w, [gradient((300, 4), seed=i) for i in range(3)])
    assert seen.largest <= 300 * 4


def test_a_frame_that_is_none_is_refused_and_one_that_is_nearly_one_is_mended():
    w = frame((6, 6))
    w.data += 1e-4
    with pytest.raises(errors.NotAFrameError, match="nearest_frame"):
        sk.optim.CayleySGD(group(w), lr=0.1)
    w = frame((6, 6))
    optimizer = sk.optim.CayleySGD(group(w), lr=0.1)
    w.data += 1e-4
    run(optimizer, w, [gradient((6, 6), seed=i) for i in range(3)])
    assert excess(w) < 2.1
    w.data *= 2
    optimizer.state[w]["wear"] = math.inf
    with pytest.raises(errors.NotAFrameError, match="changed from outside"):
        run(optimizer, w, [gradient((6, 6))])


def test_groups_are_checked_before_they_are_added():
    w = frame((4, 4))
    optimizer = sk.optim.CayleySGD(group(w), lr=0.1)
    net = sk.orthogonal(nn.Linear(4, 4), "weight", "stiefel")
    for wrong, error in [
        ({"params": [frame((4, 4)) * 2], "manifold": "stiefel:canonical"}, errors.NotAFrameError),
        ({"params": [nn.Parameter(torch.zeros(3, 4))], "manifold": "stiefel:canonical"}, errors.ShapeError),
        ({"params": [frame((4, 4))], "manifold": "stiefel:cannonical"}, errors.OptionError),
        ({"params": [nn.Parameter(torch.eye(4).bfloat16())], "manifold": "stiefel:canonical"}, errors.OptionError),
        ({"params": list(net.parameters())}, errors.OptimizerError),
    ]:
        wrong["params"] = [p.detach().requires_grad_() if not p.is_leaf else p for p in wrong["params"]]
        with pytest.raises(error):
            optimizer.add_param_group(wrong)
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group(group(frame((3, 3)))[0])
    with pytest.raises(errors.OptimizerError, match="parameter_groups"):
        sk.optim.MultiplicativeCayley(net.parameters())


def test_clipping_measures_what_moves_and_scales_everything():
    seeds.reseed()
    net = sk.orthogonal(nn.Linear(5, 5), "weight", "stiefel")
    (w,) = sk.coordinates(net, "weight").values()
    g = gradient((5, 5))
    w.grad, net.bias.grad = g + 100 * w.detach(), torch.ones(5)
    omega = w.detach().mT @ g - g.mT @ w.detach()
    expected = (0.5 * omega.square().sum() + 5).sqrt()
    for given in (net, net.parameters(), sk.optim.parameter_groups(net, lr=1.0)):
        assert torch.allclose(sk.optim.clip_grad_norm_(given, math.inf).float(), expected, rtol=1e-3)
    assert torch.equal(net.bias.grad, torch.ones(5))
    sk.optim.clip_grad_norm_(net, 0.5)
    assert torch.allclose(sk.optim.clip_grad_norm_(net, math.inf).float(), torch.tensor(0.5), rtol=1e-3)
    assert torch.allclose(net.bias.grad, 0.5 / expected * torch.ones(5), rtol=1e-3)
    groups = sk.optim.parameter_groups(net, lr=1.0, stiefel=dict(manifold="stiefel:euclidean"))
    assert sk.optim.clip_grad_norm_(groups, 9.0) < 0.5
    net.bias.grad.fill_(3e38)
    w.grad = g * 1e30
    assert sk.optim.clip_grad_norm_(net, math.inf) > 3e38
    assert torch.equal(net.bias.grad, torch.full((5,), 3e38))
    net.bias.grad[0] = math.nan
    with pytest.raises(errors.NonFiniteError):
        sk.optim.clip_grad_norm_(net, 1.0, error_if_nonfinite=True)
    for wrong in (-1.0, "a"):
        with pytest.raises(errors.OptionError):
            sk.optim.clip_grad_norm_(net, wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("name", "settings"), [(n, s) for n, cls in OPTIMIZERS.items() for s in cls.examples])
def test_torchs_distributed_checkpoint_resumes_to_the_same_bits(name, settings, flat):
    """It refuses states of some parameters alone: frames have one always, others not, nor what had no gradient."""

    def made():
        seeds.reseed()
        first = sk.orthogonal(nn.Linear(4, 4), "weight", "stiefel")
        unused = [] if flat else [nn.Linear(2, 2)]  # which torch's flat form makes a state of dictionaries
        model = nn.ModuleList([nn.Sequential(first, nn.Linear(4, 3)), *unused])
        return model, OPTIMIZERS[name](sk.optim.parameter_groups(model, lr=1e-2), **settings)

    def trained(model, optimizer, seed):
        optimizer.zero_grad()
        model[0](torch.randn(5, 4, generator=seeds.generator(seed))).square().sum().backward()
        optimizer.step()
        return list(model.parameters())

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = made()
    trained(model, optimizer, 1)
    saved = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    again, other = made()
    set_state_dict(again, other, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
    assert all(map(torch.equal, trained(model, optimizer, 2), trained(again, other, 2)))
