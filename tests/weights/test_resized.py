"""A module is not resized around an orthogonal weight, which cannot follow."""

from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit.errors import OptionError

SIZES: dict[str, Any] = dict.fromkeys(("num_embeddings", "embedding_dim"), nn.Embedding)
SIZES |= dict.fromkeys(("in_features", "out_features"), nn.Linear)


@pytest.mark.parametrize("name", ["cayley", "stiefel"])
@pytest.mark.parametrize(("size", "make"), SIZES.items())
def test_a_size_of_a_module_with_an_orthogonal_weight_is_not_changed_until_it_is_baked(make, size, name):
    module = sk.orthogonal(make(6, 4), "weight", name)
    before, w = getattr(module, size), module.weight.detach().clone()
    setattr(module, size, before)
    with pytest.raises(OptionError, match=rf"needs {size}={before} while its weight is orthogonal, got 9; sk.bake"):
        setattr(module, size, 9)
    assert getattr(module, size) == before
    assert torch.equal(module.weight, w)
    setattr(sk.bake(module), size, 9)
    assert getattr(module, size) == 9
