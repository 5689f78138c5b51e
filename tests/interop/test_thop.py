"""thop registers buffers on every module: it is refused, and counts a baked copy."""

import copy

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors

thop = pytest.importorskip("thop", reason="needs the extra [interop]")

maps = pytest.mark.parametrize("name", ["cayley", "householder", "stiefel"])


@maps
def test_thop_is_refused_and_counts_a_baked_copy(name):
    layer, x = sk.orthogonal(nn.Linear(4, 3), "weight", name), torch.ones(2, 4)
    with pytest.raises(errors.OptionError, match="total_ops"):
        thop.profile(layer, inputs=(x,), verbose=False)
    other = nn.Sequential(sk.orthogonal(nn.Linear(4, 3), "weight", name))
    counted = thop.profile(sk.bake(copy.deepcopy(other)), inputs=(x,), verbose=False)
    assert counted == (2 * 4 * 3, 4 * 3 + 3)
    assert not [key for key in other.state_dict() if "total" in key]
