"""stable-baselines3 moves target nets by means through `.data`: a target acts, is saved and loads as frames."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing import seeds

utils = pytest.importorskip("stable_baselines3.common.utils", reason="needs the extra [interop]")


def net(name="stiefel") -> Any:
    torch.manual_seed(seeds.seed(2))
    return nn.Sequential(sk.orthogonal(nn.Linear(8, 8), "weight", name), nn.Tanh(), nn.Linear(8, 2))


def error(model):
    return orthogonality_error(model[0].weight).item()


@pytest.mark.parametrize("mode", ["eval", "no_grad", "train"])
def test_a_target_net_moved_by_polyak_updates_is_made_of_frames(mode):
    online = net()
    target = copy.deepcopy(online)
    optimizer = sk.optim.CayleyAdam(sk.optim.parameter_groups(online, lr=0.2))
    for k in range(10):
        optimizer.zero_grad()
        (online(torch.randn(16, 8, generator=seeds.generator(k))) - 1).square().mean().backward()
        optimizer.step()
        utils.polyak_update(online.parameters(), target.parameters(), 0.05)
        target.train(mode != "eval")
        with torch.set_grad_enabled(mode != "no_grad"):
            assert error(target) <= permitted_error(8, torch.float32)
    fresh = net()
    fresh.load_state_dict(target.state_dict())
    assert torch.equal(fresh[0].weight, target[0].weight)


@pytest.mark.parametrize("name", ["stiefel", "cayley", "rebased"])
def test_a_hard_update_copies_parameters_and_buffers(name):
    online, target = net(name), net(name)
    sk.reset_(online[0], "weight", generator=seeds.generator(3))
    utils.polyak_update(online.parameters(), target.parameters(), 1.0)
    utils.polyak_update(online.buffers(), target.buffers(), 1)
    with torch.no_grad():
        assert torch.allclose(target[0].weight, online[0].weight, atol=1e-6)
