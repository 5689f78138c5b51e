"""tensordict takes the parameters of a module apart, stacks them and puts them back for a call."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors

tensordict = pytest.importorskip("tensordict", reason="needs the extra [interop]")
parts = pytest.importorskip("tensordict.nn", reason="needs the extra [interop]")


def net(name) -> Any:
    return nn.Sequential(*(sk.orthogonal(nn.Linear(4, 4), "weight", name) for _ in range(2)))


@pytest.mark.parametrize("name", ["cayley", "householder", "givens", "matrix_exp", "stiefel"])
def test_parameters_of_one_model_serve_another_for_a_call_and_an_ensemble_is_the_loop(name):
    model, others, x = net(name), [net(name) for _ in range(3)], torch.randn(2, 4)
    y = model(x)
    with tensordict.TensorDict.from_module(others[0]).to_module(model):
        assert torch.equal(model(x), others[0](x))
    assert torch.equal(model(x), y)
    stacked, base = tensordict.TensorDict.from_modules(*others), copy.deepcopy(model).to("meta")

    def call(x, parameters):
        with parameters.to_module(base):
            return base(x)

    out = torch.vmap(call, (None, 0))(x, stacked)
    out.square().sum().backward()
    for i, other in enumerate(others):
        assert torch.allclose(out[i], other(x), atol=1e-6)
        other(x).square().sum().backward()
        for key, p in other.named_parameters():
            assert torch.allclose(stacked.get(tuple(key.split("."))).grad[i], p.grad, atol=1e-4)


def test_an_ensemble_whose_frames_were_moved_off_the_manifold_is_refused():
    layer = sk.orthogonal(nn.Linear(4, 4), "weight", "stiefel")
    ensemble = parts.EnsembleModule(parts.TensorDictModule(layer, in_keys=["x"], out_keys=["y"]), num_copies=3)
    given = tensordict.TensorDict({"x": torch.ones(2, 4)}, [2])
    optimizer = torch.optim.SGD(ensemble.params_td.parameters(), lr=0.1)
    (ensemble(given)["y"] - 1).square().sum().backward()
    optimizer.step()
    with pytest.raises(errors.NotAFrameError, match="needs a frame in stiefel"):
        ensemble(given)


def test_an_ensemble_that_takes_a_frame_in_a_chart_for_a_parameter_is_refused():
    layer = sk.orthogonal(nn.Linear(6, 4), "weight", "matrix_exp")
    ensemble = parts.EnsembleModule(parts.TensorDictModule(layer, in_keys=["x"], out_keys=["y"]), num_copies=3)
    with pytest.raises(errors.OptionError, match="needs a chart that does not train, got rotation"):
        ensemble(tensordict.TensorDict({"x": torch.ones(2, 6)}, [2]))
