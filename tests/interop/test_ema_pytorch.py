"""ema-pytorch writes means through `.data`, uncounted: they are frames when read, saved and copied."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing import seeds

ema_pytorch = pytest.importorskip("ema_pytorch", reason="needs the extra [interop]")


def net() -> Any:
    torch.manual_seed(seeds.seed(1))
    first, last = (sk.orthogonal(nn.Linear(8, n), "weight", "stiefel") for n in (8, 4))
    return nn.Sequential(first, nn.Tanh(), nn.BatchNorm1d(8), last)


def errors_of(model):
    return [
        orthogonality_error(w if w.shape[0] >= w.shape[1] else w.mT).item() for w in map(_weight, (model[0], model[-1]))
    ]


def _weight(layer):
    return layer.weight.detach()


def trained(average, model, steps=10):
    optimizer = sk.optim.CayleySGD(sk.optim.parameter_groups(model, lr=0.3))
    for k in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 8, generator=seeds.generator(k))
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        average.update()
    return average


@pytest.mark.parametrize("options", [{}, {"use_foreach": True}], ids=["one by one", "foreach"])
def test_a_running_mean_is_a_frame_when_read_saved_and_copied(options):
    model = net()
    average = trained(ema_pytorch.EMA(model, beta=0.8, update_after_step=0, update_every=1, **options), model)
    limits = [permitted_error(n, torch.float32) for n in (8, 4)]

    copied = copy.deepcopy(average.ema_model)
    file = io.BytesIO()
    torch.save(average.ema_model.state_dict(), file)
    file.seek(0)
    loaded = net()
    loaded.load_state_dict(torch.load(file))
    average(torch.randn(3, 8))
    for held in (copied, loaded, average.ema_model):
        assert all(error <= limit for error, limit in zip(errors_of(held), limits, strict=True))

    again = ema_pytorch.EMA(net(), beta=0.8, update_after_step=0, update_every=1, **options)
    again.load_state_dict(average.state_dict())
    assert torch.equal(_weight(again.ema_model[0]), _weight(average.ema_model[0]))


def test_a_forward_pass_of_the_mean_is_that_of_its_nearest_frames():
    model = net()
    average = trained(ema_pytorch.EMA(model, beta=0.8, update_after_step=0, update_every=1), model)
    average.eval()
    expected: Any = copy.deepcopy(average.ema_model)
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert torch.equal(average(x), expected(x))


def test_the_mean_goes_back_into_the_model_and_trains_on():
    model = net()
    average = trained(ema_pytorch.EMA(model, beta=0.8, update_after_step=0, update_every=1), model)
    average.update_model_with_ema()
    model.load_state_dict(model.state_dict())
    trained(average, model, 3)
    assert all(e <= permitted_error(n, torch.float32) for e, n in zip(errors_of(model), (8, 4), strict=True))
