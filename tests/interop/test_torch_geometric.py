"""Layers of torch_geometric list the entries of their state dicts themselves: frames are saved as coordinates."""

import copy
from typing import Any

import pytest
import torch

import stiefelkit as sk
from stiefelkit.testing import seeds

pyg = pytest.importorskip("torch_geometric.nn", reason="needs the extra [interop]")

maps = pytest.mark.parametrize("name", ["cayley", "householder", "stiefel"])


@maps
def test_graph_nets_of_torch_geometric_save_load_copy_and_reset(name):
    edges, x = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), torch.randn(4, 4, generator=seeds.generator(3))

    def net() -> Any:
        model = pyg.GCN(4, 8, 2, 4)
        for conv in model.convs:
            sk.orthogonal(conv.lin, "weight", name)
        return model

    first, second = net(), net()
    second.load_state_dict(first.state_dict())
    y = first(x, edges)
    assert torch.equal(second(x, edges), y)
    assert torch.equal(copy.deepcopy(first)(x, edges), y)
    first.reset_parameters()
    assert not torch.equal(first(x, edges), y)
    assert [drift.bits_lost < 2 for drift in sk.drift(first).values()] == [True, True]
