"""No optimizer that would take a frame off its manifold makes a step, however it came to hold the frame."""

import copy
import gc
import subprocess
import sys
from typing import Any

import geoopt
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.weights import optimizer_hooks


def make(name="stiefel", **options) -> Any:
    return sk.orthogonal(nn.Linear(4, 4), "weight", name, **options)


def backward(net):
    net(torch.ones(4)).square().sum().backward()


def refused(optimizer, match="Adam", *closure):
    """Whether the first step is refused, with the weights as they were."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    with pytest.raises(errors.OptimizerError, match=match):
        optimizer.step(*closure)
    return all(map(torch.equal, before, params))


def adam(net) -> Any:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    backward(net)
    return optimizer


def test_a_frame_that_comes_into_a_group_of_the_rest_is_refused_before_others_move():
    first, second = make(), nn.Linear(4, 4)
    optimizer = sk.optim.CayleyAdam([*sk.optim.parameter_groups(first, lr=0.1), {"params": [second.weight]}], lr=0.1)
    late = nn.Linear(4, 4, bias=False)
    sk.orthogonal(late, "weight", "stiefel")
    with torch.no_grad():
        second.weight.copy_(late.weight)
    carried: Any = late.get_submodule("parametrizations.weight")
    carried.replace(next(iter(carried.coordinates)), second.weight)
    backward(first)
    backward(late)
    assert refused(optimizer, r"CayleyAdam needs groups that name the manifold.*got the frame of .*in one without")


OPTIMIZERS = "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax NAdam RAdam ASGD Rprop LBFGS".split()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_torch_optimizer_is_refused_at_its_first_step(name):
    net = nn.Sequential(nn.Linear(4, 4), make())
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.1)
    backward(net)
    assert refused(optimizer, name, *([lambda: 0.0] if name == "LBFGS" else []))


def test_what_holds_no_frame_is_left_alone():
    net = nn.Sequential(make("cayley"), nn.Linear(4, 4))
    kept = make()
    adam(net).step()
    assert optimizer_hooks.frames()[id(kept.parametrizations.weight.stiefel)].name == "stiefel"
    other = nn.ModuleList([kept, nn.Linear(4, 4)])
    optimizer = torch.optim.Adam([p for p in other.parameters() if id(p) not in optimizer_hooks.frames()])
    kept(other[1](torch.ones(4))).sum().backward()
    optimizer.step()


def test_a_frozen_frame_may_stand_in_any_optimizer_until_it_trains():
    net = make()
    frame = net.parametrizations.weight.stiefel
    frame.requires_grad_(False)
    optimizer = adam(net)
    optimizer.step()
    frame.requires_grad_(True)
    assert refused(optimizer)
    # A gradient that was left there would still move it.
    frame.grad = torch.ones(4, 4)
    frame.requires_grad_(False)
    assert refused(optimizer)


def through_pickle(net, tmp_path):
    torch.save(net, tmp_path / "net.pt")
    return torch.load(tmp_path / "net.pt", weights_only=False)


def through_a_checkpoint(net, assign):
    other = make()
    other.load_state_dict(net.state_dict(), assign=assign)
    return other


def through_meta(net):
    with torch.device("meta"):
        other = make()
    other.to_empty(device="cpu")
    sk.reset_(other, "weight")
    nn.init.zeros_(other.bias)  # may hold NaN, which is not equal to itself
    return other


@pytest.mark.parametrize(
    "change",
    [
        lambda net, path: copy.deepcopy(net),
        lambda net, path: copy.deepcopy(nn.Sequential(net))[0],
        through_pickle,
        lambda net, path: through_a_checkpoint(net, False),
        lambda net, path: through_a_checkpoint(net, True),
        lambda net, path: through_meta(net),
        lambda net, path: net.double().float(),
        lambda net, path: torch.optim.swa_utils.AveragedModel(net).module,
    ],
    ids=["deepcopy", "deepcopy of a parent", "pickle", "load", "assign", "meta", "casts", "averaged"],
)
@pytest.mark.parametrize("also_the_original_dies", [False, True])
def test_a_frame_is_known_after(change, also_the_original_dies, tmp_path):
    net = make()
    other = change(net, tmp_path)
    if also_the_original_dies:
        del net
        gc.collect()
    assert refused(adam(other))


@pytest.mark.parametrize(("name", "option"), [("rebased", {"inner": "stiefel"}), ("margin", {"v": "stiefel"})])
def test_a_frame_inside_a_composite_is_known(name, option):
    assert refused(adam(make(name, **option)))


def test_a_group_added_later_is_seen():
    net, other = nn.Linear(4, 4), make()
    optimizer = adam(net)
    optimizer.step()
    optimizer.add_param_group({"params": other.parameters()})
    backward(other)
    assert refused(optimizer)


def test_scalers_schedulers_and_compiled_steps_are_no_way_around():
    net = make()
    optimizer = adam(net)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert refused(optimizer)
    scaler = torch.amp.GradScaler("cpu")  # pyright: ignore[reportPrivateImportUsage]
    scaler.scale(net(torch.ones(4)).sum()).backward()
    with pytest.raises(errors.OptimizerError):
        scaler.step(optimizer)
    torch._dynamo.reset()
    with pytest.raises(errors.OptimizerError):
        torch.compile(lambda: optimizer.step(), backend="eager")()


def test_geoopt_may_have_its_own_parameters_and_no_others():
    net = make()
    coordinate_list = net.parametrizations.weight
    backward(net)
    assert refused(geoopt.optim.RiemannianAdam(net.parameters(), lr=0.1), "sk.optim.geoopt_parameters")
    manifold: Any = geoopt.EuclideanStiefel()
    frame: Any = geoopt.ManifoldParameter(coordinate_list.stiefel.detach(), manifold=manifold)  # pyright: ignore
    coordinate_list.replace("stiefel", frame)
    optimizer = geoopt.optim.RiemannianSGD(net.parameters(), lr=0.1)
    backward(net)
    optimizer.step()
    assert sk.drift(net)["weight"].error < 1e-5
    assert refused(adam(net))


def step_by_hand(net):
    """What optimizers do that torch knows nothing of: no hook is called, and no write counted."""
    backward(net)
    for p in net.parameters():
        p.data.add_(p.grad, alpha=-0.1)


def test_a_perturbation_before_each_step_of_an_optimizer_of_frames_is_not_refused():
    net = make()
    optimizer = sk.optim.CayleySGD(sk.optim.parameter_groups(net, lr=0.1))
    w = net.parametrizations.weight.stiefel
    for _ in range(5):
        backward(net)
        kept = w.detach().clone()
        with torch.no_grad():
            w.add_(w.grad, alpha=0.05)
        optimizer.zero_grad()
        backward(net)
        w.data = kept
        optimizer.step()
    assert sk.drift(net)["weight"].error <= 1.2 * sk.drift(net)["weight"].limit + 1.2e-7


def test_flat_coordinates_take_any_optimizer_and_a_frame_any_write_before_it_trains():
    for name in ("cayley", "householder", "givens", "matrix_exp"):
        net = make(name)
        before = net.weight.detach().clone()
        step_by_hand(net)
        assert not torch.equal(net.weight, before)
    net = make()
    net(torch.ones(4))
    net.parametrizations.weight.stiefel.data.mul_(1.5)
    assert torch.linalg.matrix_norm(net.weight, 2).item() == pytest.approx(1)


def global_hooks():
    return [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]


def test_the_same_hooks_serve_all_and_cost_little():
    kept = [make()]
    before = global_hooks()
    assert before.count(optimizer_hooks._before_step) == before.count(optimizer_hooks._after_step) == 1
    kept.append(make())
    assert global_hooks() == before
    params = [nn.Parameter(torch.ones(2)) for _ in range(500)]
    for p in params:
        p.grad = torch.ones(2)
    optimizer = torch.optim.Adam(params)

    def calls(fn):
        seen = []
        sys.setprofile(lambda frame, event, arg: seen.append(event) if "call" in event else None)
        try:
            fn()
        finally:
            sys.setprofile(None)
        return len(seen)

    optimizer.step()
    step = calls(optimizer.step)
    hooks = (optimizer_hooks._before_step, optimizer_hooks._after_step)
    assert calls(lambda: [hook(optimizer, (), {}) for hook in hooks]) < 0.1 * step
    assert kept


ALONE = """
import gc, torch, stiefelkit as sk
from torch.optim.optimizer import _global_optimizer_post_hooks as after, _global_optimizer_pre_hooks as before
for _ in range(2):
    layer = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "stiefel")
    print(len(before), len(after), end=" ")
    del layer
    gc.collect()
    print(len(before), len(after), end=" ")
"""


def test_the_hooks_are_unregistered_with_the_last_weight():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", "0", "0"] * 2
