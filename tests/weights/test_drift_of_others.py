"""`sk.drift(model, where=...)` measures weights that others hold, as their modules read them."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.metrics import permitted_error

geotorch: Any = pytest.importorskip("geotorch")


def model() -> Any:
    """One weight of each who may hold it: ours, torch, geotorch, a plain parameter, a buffer."""
    net: Any = nn.ModuleDict({name: nn.Linear(8, 5, bias=False) for name in ("ours", "torch", "geotorch", "plain")})
    sk.orthogonal(net, "ours.weight", "stiefel")
    parametrizations.orthogonal(net["torch"])
    geotorch.orthogonal(net["geotorch"], "weight")
    nn.init.orthogonal_(net["plain"].weight)
    net.register_buffer("rotation", sk.init.haar((6, 6), torch.complex64).to(torch.complex64))
    return net


NAMES = ["rotation", "ours.weight", "torch.weight", "geotorch.weight", "plain.weight"]


@pytest.mark.parametrize("where", ["*", NAMES, lambda name, host: True])
def test_weights_of_all_are_measured_in_one_table(where):
    net = model()
    measured = sk.drift(net, where)
    assert sorted(measured) == sorted(NAMES)
    assert all(drift.error <= permitted_error(6, torch.float32) * 4 for drift in measured.values())
    assert measured["ours.weight"] == sk.drift(net)["ours.weight"]
    with torch.no_grad():
        net["plain"].weight.mul_(1.01)
    assert sk.drift(net, where=nn.Linear)["plain.weight"].bits_lost > 10


def test_kernels_blocks_and_gains_are_read_as_they_are_told():
    conv, fused = nn.Conv2d(3, 8, 3), nn.Linear(4, 12)
    frame, q = 2 * sk.init.haar((27, 8)).mT, sk.init.haar((3, 4, 4))
    with torch.no_grad():
        conv.weight.copy_(frame.reshape(8, 3, 3, 3))
        fused.weight.copy_(q.reshape(12, 4))
    assert sk.drift(conv, "weight", view="out_by_rest", gain=2.0)["weight"].bits_lost < 2
    assert sk.drift(fused, "weight", blocks=(4, 8)).keys() == {"weight"}
    for blocks in (3, (4, 4, 4)):
        assert sk.drift(fused, "weight", blocks=blocks)["weight"].bits_lost < 2
    with pytest.raises(errors.ShapeError, match="view="):
        sk.drift(conv, "weight")


def test_a_model_of_frames_without_a_map_says_so():
    net: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(4, 4))
    parametrizations.orthogonal(net[0])
    nn.init.orthogonal_(net[1].weight)
    with pytest.warns(UserWarning, match=r"0\.weight, 1\.weight look like frames") as caught:
        assert sk.drift(net) == {}
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sk.drift(nn.Linear(4, 4)) == {}
