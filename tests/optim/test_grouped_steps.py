"""Many frames in one step: as in a batch, without a call for each, and as if each were alone."""

import gc
import math
import os
import pickle
import sys
from typing import Any

import pytest
import torch
from optimizers_at_hand import OPTIMIZERS, STATEFUL, every_optimizer, excess, frame, gradient, group

import stiefelkit as sk
from stiefelkit.optim import batch as buckets

COUNT = 5
RATE = 0.05


def apart(frames):
    return [torch.nn.Parameter(w.detach().clone()) for w in frames.unbind()]


def give(params, gradients):
    for p, g in zip(params, gradients, strict=True):
        p.grad = None if g is None else g.clone()


def near(w):
    return 8 * torch.finfo(w.dtype).eps * math.sqrt(w.shape[-1])


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (7, 3), (2, 5, 4)], ids=str)
@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_frames_by_themselves_go_where_those_of_a_batch_go(name, dtype, shape, precision):
    batch = frame((COUNT, *shape), dtype)
    params = apart(batch)
    settings = {**STATEFUL[name], "precision": precision, "lr": RATE}
    optimizers = [OPTIMIZERS[name](group(*members), **settings) for members in ([batch], params)]
    for i in range(4):
        g = gradient((COUNT, *shape), dtype, seed=i)
        give([batch, *params], [g, *g])
        for optimizer in optimizers:
            optimizer.step()
    moved = torch.stack(list[torch.Tensor](params))
    assert torch.linalg.vector_norm(moved - batch, dim=(-2, -1)).max() <= 20 * near(batch)
    assert excess(moved) <= {"exact": 2.0, "fast": 30.0}[precision] * (20 if dtype == torch.complex128 else 1) + 4
    alone = OPTIMIZERS[name](group(frame(shape, dtype)), **settings)
    (single,) = alone.param_groups[0]["params"]
    give([single], [g[0]])
    alone.step()
    shapes = {key: getattr(value, "shape", None) for key, value in alone.state[single].items()}
    for p in params:
        assert {key: getattr(value, "shape", None) for key, value in optimizers[1].state[p].items()} == shapes


@every_optimizer
def test_a_long_step_beside_longer_ones_goes_where_it_goes_alone(name):
    """Bounds of steps, beyond which they are shortened, are each frame's own: sizes are on both sides of them."""
    g = gradient((80, 5, 3), torch.float64, seed=1)
    g = g / torch.linalg.matrix_norm(g, keepdim=True) * torch.linspace(0.1, 4.0, 80).double().view(-1, 1, 1)
    for settings in OPTIMIZERS[name].examples:
        batch = frame((80, 5, 3), torch.float64)
        params = apart(batch)
        give([batch, *params], [g, *g])
        for members in ([batch], *([p] for p in params)):
            OPTIMIZERS[name](group(*members), **settings | {"lr": 0.4}).step()
        moved = torch.stack([p.detach() for p in params])
        assert torch.linalg.vector_norm(moved - batch, dim=(-2, -1)).max() <= 1e-11


class Calls:
    """Counts the calls of Python functions, all of them or those of a package."""

    def __init__(self, within=""):
        self.within = within

    def __enter__(self):
        self.count = 0
        gc.disable()  # its callbacks would be counted
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame, event, arg):
        self.count += event == "call" and (not self.within or self.within in frame.f_code.co_filename)


@every_optimizer
def test_a_step_of_five_times_as_many_frames_makes_hardly_more_calls(name):
    counts = []
    for count in (50, 250):
        params = apart(frame((count, 4, 4)))
        other = apart(frame((count, 5, 3)))
        optimizer = OPTIMIZERS[name](group(*params, *other), **STATEFUL[name], lr=RATE)
        for i in range(3):
            give([*params, *other], [*gradient((count, 4, 4), seed=i), *gradient((count, 5, 3), seed=i)])
            with Calls() as calls:
                optimizer.step()
        counts.append(calls.count)
    # What is a number for each frame may be worked out in Python.
    assert counts[1] - counts[0] <= 2 * 400 + 80


@every_optimizer
def test_a_step_of_one_frame_enters_few_functions_of_the_package(name):
    w = frame((16, 16), torch.float32)
    optimizer = OPTIMIZERS[name](group(w), lr=RATE)
    for i in range(3):
        w.grad = gradient((16, 16), torch.float32, seed=i)
        with Calls(within=f"{os.sep}stiefelkit{os.sep}optim{os.sep}") as calls:
            optimizer.step()
    assert calls.count <= 75


def test_clipping_twice_as_many_frames_makes_hardly_more_calls():
    counts = []
    for count in (20, 40):
        params = apart(frame((count, 4, 4)))
        give(params, gradient((count, 4, 4)))
        with Calls() as calls:
            sk.optim.clip_grad_norm_(group(*params), 1e-3)
        counts.append(calls.count)
    assert counts[1] - counts[0] <= 4 * 20


def one_lacks_a_gradient(optimizers, params):
    give([params[1]], [None])


def data_are_others(optimizers, params):
    params[2].data = frame(params[2].shape, params[2].dtype, seed=9).detach()


def data_are_written_to(optimizers, params):
    params[2].data.copy_(frame(params[2].shape, params[2].dtype, seed=9))


def states_are_lost(optimizers, params):
    for optimizer in optimizers:
        optimizer.state.pop(params[0], None)


def a_state_is_another_tensor(optimizers, params):
    for optimizer in optimizers:
        state = optimizer.state.get(params[3], {})
        state.update({k: 0 * v for k, v in state.items() if torch.is_tensor(v)})


def states_are_loaded(optimizers, params):
    for optimizer in optimizers:
        optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))


def frames_are_cast(optimizers, params):
    for p in params:
        p.data = sk.functional.nearest_frame(p.data.double())
        p.grad = None if p.grad is None else p.grad.double()


def a_frame_joins(optimizers, params):
    more = frame(params[0].shape, seed=5)
    give([more], [gradient(more.shape, seed=6)])
    optimizers[0].add_param_group(group(more)[0])


EVENTS: Any = [
    one_lacks_a_gradient, data_are_others, data_are_written_to, states_are_lost, a_state_is_another_tensor,
    states_are_loaded, frames_are_cast, a_frame_joins,
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", ["CayleySGD", "CayleyAdam", "Landing", "StiefelAdam"])
def test_whatever_happens_between_steps_frames_go_as_alone(name, event):
    params = apart(frame((COUNT, 5, 4)))
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    settings = {"lr": RATE, **({"momentum": 0.5} if name == "Landing" else {})}
    together = [OPTIMIZERS[name](group(*params), **settings)]
    alone = [OPTIMIZERS[name](group(p), **settings) for p in twins]
    for i in range(6):
        for side in (params, twins):
            give(side, gradient((COUNT, 5, 4), seed=i).to(side[0].dtype))
        if i == 3:
            event(together, params)
            event(alone, twins)
        for optimizer in (*together, *alone):
            optimizer.step()
    for p, q in zip(params, twins, strict=True):
        assert p.dtype == q.dtype
        assert torch.linalg.vector_norm(p - q) <= 1e-5
        assert excess(p) <= (20 if p.dtype == torch.float64 else 2) + 4


def test_a_batch_that_is_copied_together_has_a_limit(monkeypatch):
    monkeypatch.setattr(buckets, "_LARGEST", 70)
    params = apart(frame((COUNT, 5, 4)))
    give(params, gradient((COUNT, 5, 4)))
    assert [len(b.params) for b in buckets.buckets(params, {p: {} for p in params})] == [3, 2]
