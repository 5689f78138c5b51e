"""Averages of weights stay frames, or become frames again before anybody reads or saves them."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.functional._arithmetic.devices import without_reads
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing import seeds
from stiefelkit.testing.cases import saved_and_loaded
from stiefelkit.weights.find import orthogonal_weights

MAPS = sorted(sk.available())
DTYPES = [torch.float32, torch.float64, torch.complex64]


def made(name, dtype=torch.float32, shape=(6, 4)) -> Any:
    """A module whose only weight is orthogonal by some map."""
    module = nn.Module()
    shape = {"fourier": (shape[0], shape[0]), "hadamard": (8, 8)}.get(name, shape)
    module.register_parameter("weight", nn.Parameter(torch.randn(shape, dtype=dtype)))
    return sk.orthogonal(module, "weight", name)


averaging: Any = AveragedModel


def supported(name, dtype):
    return sk.available()[name].supports({"fourier": (6, 6), "hadamard": (8, 8)}.get(name, (6, 4)), dtype) is None


CASES = [(name, dtype) for name in MAPS for dtype in DTYPES if supported(name, dtype)]


def turned_(module, k):
    """Somewhere else: another frame, as training might have reached."""
    sk.reset_(module, "weight", generator=seeds.generator(k))


def at_the_limit(module):
    if not all(weight.coordinate_list.param.traits.exact for weight in orthogonal_weights(module)):
        return True  # near-orthogonal by construction
    w = next(host for host in module.modules() if hasattr(host, "parametrizations")).weight
    return orthogonality_error(w).item() <= permitted_error(w.shape[-1], w.dtype)


@pytest.mark.parametrize("decay", [0.9, None])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_averages_of_every_map_are_frames_and_load(name, dtype, decay):
    module = made(name, dtype)
    averaged = averaging(module, multi_avg_fn=sk.optim.multi_avg_fn(decay), use_buffers=True)
    for k in range(6):
        averaged.update_parameters(module)
        if name == "stiefel" or k % 2:
            turned_(module, k)
        else:
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(1.01)
    assert at_the_limit(averaged)
    fresh = averaging(made(name, dtype))
    fresh.load_state_dict(saved_and_loaded(averaged.state_dict()))
    assert torch.equal(fresh.module.weight, averaged.module.weight)


@pytest.mark.parametrize("name", [name for name in MAPS if name not in ("stiefel", "fourier")])
def test_a_mean_of_state_dicts_is_taken_with_the_integers_of_one_and_refused_without(name):
    first, second = made(name), made(name)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        for c in sk.coordinates(second, "weight").values():
            c.mul_(0.5)
    states = [first.state_dict(), second.state_dict()]
    mean = {key: torch.stack([state[key].float() for state in states]).mean(0) for key in states[0]}
    with pytest.raises(errors.CheckpointError, match="integers"):
        first.load_state_dict(mean)
    first.load_state_dict({key: mean[key] if t.is_floating_point() else t for key, t in states[0].items()})
    assert at_the_limit(first)
    assert torch.equal(first.parametrizations.weight.original0, mean["parametrizations.weight.original0"])


def test_the_average_is_the_frame_nearest_to_the_mean():
    module = made("stiefel", torch.float64)
    averaged = averaging(module, multi_avg_fn=sk.optim.multi_avg_fn(0.75))
    averaged.update_parameters(module)
    first = module.weight.detach().clone()
    turned_(module, 1)
    averaged.update_parameters(module)
    u, _, vh = torch.linalg.svd(0.75 * first + 0.25 * module.weight.detach(), full_matrices=False)
    assert torch.dist(averaged.module.weight, u @ vh) < 1e-13


def test_a_frame_without_a_module_is_averaged_as_one():
    module = nn.Module()
    module.w = nn.Parameter(sk.init.haar((5, 3)))
    sk.optim.frames(module.w)
    averaged = averaging(module, multi_avg_fn=sk.optim.multi_avg_fn(0.5))
    averaged.update_parameters(module)
    with torch.no_grad():
        module.w.copy_(sk.init.haar((5, 3)))
    averaged.update_parameters(module)
    assert orthogonality_error(averaged.module.w).item() < 1e-14


def test_what_optimizers_assignments_and_checkpoints_write_is_not_touched():
    module = made("stiefel")
    coordinate_list = module.parametrizations.weight
    nearly = coordinate_list.original0.detach() * (1 + 60 * sk.metrics.rounding_limit(4, torch.float32) / 4)
    state = module.state_dict()
    state["parametrizations.weight.original0"] = nearly
    module.load_state_dict(state)
    assert torch.equal(module.weight, nearly)
    optimizer = sk.optim.POGO(sk.optim.parameter_groups(module, lr=0.1), precision="fast")
    module.weight.sum().backward()
    optimizer.step()
    before = coordinate_list.original0.detach().clone()
    assert torch.equal(module.weight, before)


def test_tensors_of_functional_call_are_nobodys_to_mend():
    layer = sk.orthogonal(nn.Linear(4, 4, bias=False), "weight", "stiefel")
    foreign = torch.randn(4, 4)
    kept = foreign.clone()
    foreign.mul_(1)
    out = torch.func.functional_call(layer, {"parametrizations.weight.original0": foreign}, torch.eye(4))
    assert torch.equal(foreign, kept)
    assert torch.equal(out, kept.mT)


def test_weights_that_cannot_be_averaged_say_so():
    module = made("stiefel")
    averaged = averaging(module, multi_avg_fn=sk.optim.multi_avg_fn(0.5))
    averaged.update_parameters(module)
    sk.assign_(module, "weight", -module.weight.detach())
    before = averaged.module.weight.detach().clone()
    with pytest.raises(errors.RankError):
        averaged.update_parameters(module)
    assert torch.equal(averaged.module.weight, before)


def lerp_(averaged, current):
    for a, c in zip(averaged, current, strict=True):
        a.data.lerp_(c.data, 0.3)


def replaced(averaged, current):
    for a, c in zip(averaged, current, strict=True):
        a.data = 0.7 * a.data + 0.3 * c.data


def all_at_once_(averaged, current):
    torch._foreach_lerp_([a.data for a in averaged], [c.data for c in current], 0.3)  # pyright: ignore


def counted_(averaged, current):
    get_ema_multi_avg_fn(0.7)(averaged, current, 0)


MEANS = [lerp_, replaced, all_at_once_, counted_]
"""No count of writes tells of any but the last."""


def held(module):
    return [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]


def everything(module):
    return [*module.parameters(), *module.buffers()]


def hidden_mean(name, dtype, write, k=3):
    """A copy of a module that is being trained, moved by such means and never read meanwhile."""
    module = made(name, dtype)
    averaged = copy.deepcopy(module)
    for i in range(k):
        turned_(module, i)
        write(held(averaged), held(module))
    return averaged


@pytest.mark.parametrize("look", ["eval", "no_grad", "training", "save", "copy", "pickle", "bake"])
@pytest.mark.parametrize("write", MEANS)
@pytest.mark.parametrize(("name", "dtype"), [("stiefel", t) for t in DTYPES] + [("rebased", t) for t in DTYPES])
def test_means_are_mended_before_they_are_read_saved_or_copied(name, dtype, write, look):
    averaged: Any = hidden_mean(name, dtype, write)
    if look == "save":
        state = saved_and_loaded(averaged.state_dict())
        averaged = made(name, dtype)
        averaged.load_state_dict(state)
    elif look == "copy":
        averaged = copy.deepcopy(averaged)
    elif look == "pickle":
        averaged = pickle.loads(pickle.dumps(averaged))
    elif look == "bake":
        sk.bake(averaged, "weight")
    averaged.train(look != "eval" and not (look == "training" and name == "rebased"))
    with torch.set_grad_enabled(look != "no_grad"):
        assert orthogonality_error(averaged.weight).item() <= permitted_error(4, dtype)


@pytest.mark.parametrize("name", ["stiefel", "rebased"])
def test_means_through_data_are_mended_in_a_group(name):
    models: Any = [nn.ModuleList([made(name) for _ in range(3)]) for _ in range(2)]
    with torch.no_grad():
        for k in range(3):
            with sk.grouped(models[0]):
                assert all(orthogonality_error(one.weight) <= permitted_error(4, torch.float32) for one in models[0])
            for i, one in enumerate(models[1]):
                turned_(one, 3 * k + i)
            lerp_(held(models[0]), held(models[1]))


@pytest.mark.parametrize("mode", ["no_grad", "training"])
@pytest.mark.parametrize("name", ["cayley", "householder", "givens", "rebased"])
def test_a_group_follows_charts_that_are_copied_through_data(name, mode):
    online, target = (nn.ModuleList([made(name, shape=(6, 6)) for _ in range(3)]) for _ in range(2))
    for k in range(3):
        for i, one in enumerate(online):
            turned_(one, 3 * k + i)
        for a, c in zip(
            [*target.parameters(), *target.buffers()], [*online.parameters(), *online.buffers()], strict=True
        ):
            a.data.copy_(c.data)
        with torch.set_grad_enabled(mode == "training"), sk.grouped(target):
            assert all(torch.allclose(a.weight, c.weight, atol=1e-6) for a, c in zip(target, online, strict=True))  # pyright: ignore


@pytest.mark.parametrize("decay", [0.9, 0.9999])
@pytest.mark.parametrize("name", ["fourier", "cayley", "givens", "householder"])
def test_a_chart_that_was_averaged_with_itself_stays_what_it_is(name, decay):
    """Rounding takes k a + k (1 - a) to less than k, and integers hold what is below: k - 1."""
    module = made(name, torch.complex64 if name == "fourier" else torch.float32, (60, 60))
    averaged = AveragedModel(module, avg_fn=lambda a, c, _: decay * a + (1 - decay) * c, use_buffers=True)
    for _ in range(3):
        averaged.update_parameters(module)
    for a, c in zip(averaged.module.buffers(), module.buffers(), strict=True):
        a.data.copy_(decay * a.data + (1 - decay) * c.data)
    averaged.module.state_dict()
    assert all(map(torch.equal, averaged.module.buffers(), module.buffers()))
    assert torch.allclose(averaged.module.weight, module.weight, atol=1e-5)  # pyright: ignore


@pytest.mark.parametrize("look", [lambda m: m.state_dict(), copy.deepcopy, lambda m: m.eval().weight])
def test_a_mean_of_other_signs_is_refused_before_it_is_written(look):
    module, other = made("cayley"), made("cayley")
    other.parametrizations.weight.signs.neg_()
    for a, c in zip(module.buffers(), other.buffers(), strict=True):
        a.data.copy_(0.9 * a.data + 0.1 * c.data)
    with pytest.raises(errors.NotAFrameError, match="signs of 1 and -1"):
        look(module)


def test_what_does_not_land_at_each_step_lands_before_it_is_saved():
    module = made("stiefel")
    optimizer = sk.optim.Landing(sk.optim.parameter_groups(module, lr=0.1), every=100)
    for k in range(5):
        module.weight.mul(torch.randn(6, 4, generator=seeds.generator(k))).sum().backward()
        optimizer.step()
    with torch.no_grad():
        assert not at_the_limit(module)  # evaluating it does not
    made("stiefel").load_state_dict(saved_and_loaded(module.state_dict()))
    assert at_the_limit(module)


def test_no_value_is_read_to_read_a_weight_where_reads_are_not_free():
    averaged = hidden_mean("stiefel", torch.float32, lerp_)
    with without_reads(), torch.no_grad():
        assert not at_the_limit(averaged)
    averaged.state_dict()
    assert at_the_limit(averaged)


@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if case[1] != torch.float64])
def test_parameters_alone_are_the_weight_where_there_is_no_chart_and_all_tensors_everywhere(name, dtype):
    online, target = made(name, dtype), made(name, dtype)
    turned_(online, 1)
    turned_(target, 2)
    with torch.no_grad():
        torch._foreach_copy_(list(target.parameters()), list(online.parameters()))  # pyright: ignore
        charts = [list(module.parametrizations.weight.param.buffers()) for module in (online, target)]
        have_others = any(not torch.equal(*pair) for pair in zip(*charts, strict=True))
        assert torch.equal(target.weight, online.weight) != have_others
        torch._foreach_copy_(everything(target), everything(online))  # pyright: ignore
        assert torch.equal(target.weight, online.weight)
