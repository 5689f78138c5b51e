"""Modules of Pyro keep priors of weights elsewhere: those of biases are sampled, those of frames refused."""

from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors

pyro = pytest.importorskip("pyro", reason="needs the extra [interop]")
pyro_nn = pytest.importorskip("pyro.nn.module", reason="needs the extra [interop]")

maps = pytest.mark.parametrize("name", ["cayley", "householder", "stiefel"])


@maps
def test_models_of_pyro_take_priors_of_biases_and_refuse_those_of_frames(name):
    layer = nn.Linear(4, 4)
    pyro_nn.to_pyro_module_(layer)
    sk.orthogonal(layer, "weight", name)
    w = layer.weight.detach().clone()

    def prior(*shape: int) -> Any:
        return pyro_nn.PyroSample(pyro.distributions.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))

    with pytest.raises(errors.DtypeError, match=r"needs a tensor while it is orthogonal, got PyroSample"):
        layer.weight = prior(4, 4)
    with pytest.raises(errors.DtypeError, match=r"needs a tensor while it is orthogonal, got PyroParam"):
        layer.weight = pyro_nn.PyroParam(torch.eye(4))
    layer.bias = prior(4)
    x = torch.ones(2, 4)
    trace: Any = pyro.poutine.trace(layer).get_trace(x)
    assert torch.allclose(trace.nodes["_RETURN"]["value"], x @ w.mT + trace.nodes["bias"]["value"], atol=1e-5)
