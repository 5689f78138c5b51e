"""Layers whose weights torchao has quantized: adapted and trained, neither merged nor taken apart."""

from typing import Any

import pytest
import torch
from optimizers_at_hand import descend
from torch import nn

import stiefelkit as sk
from stiefelkit.errors import OptionError
from stiefelkit.testing import seeds

quantization: Any = pytest.importorskip("torchao.quantization", reason="needs torchao")


def quantized() -> Any:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).requires_grad_(False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("options", [{}, {"side": "out"}, {"parametrization": "low_rank", "inner": "cayley"}])
def test_quantized_layers_are_adapted_and_trained(options: dict[str, Any]):
    model, x = quantized(), torch.randn(4, 64, generator=seeds.generator())
    before = model(x)
    sk.nn.adapt(model, "*.weight", **options)
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-5)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = descend(optimizer, lambda: model(x).square().mean(), 5)
    assert losses[-1] < losses[0]
    with sk.nn.without_adapters(model):
        assert torch.equal(model(x), before)
    for act in (model[0].merge, lambda: sk.nn.fold(model)):
        with pytest.raises(OptionError, match="got Linear without a matrix of real numbers as its weight"):
            act()
    assert type(model[0].base.weight).__name__ == "Int8Tensor"


def test_singular_vectors_of_a_quantized_weight_are_refused():
    model = quantized()
    with pytest.raises(OptionError, match="PrincipalAdapter needs singular vectors of a weight, got Linear without"):
        sk.nn.adapt(model, "*.weight", "principal")
    assert not sk.nn.adapters(model)
