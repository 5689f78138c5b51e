"""Convolutions of several groups: one frame for each, and the layer an isometry."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.metrics import orthogonality_error
from stiefelkit.parametrizations import View

CONVOLUTIONS = {
    "1x1, square groups": (lambda: nn.Conv2d(12, 12, 1, groups=3, bias=False), "group_out_by_rest"),
    "1x1, tall groups": (lambda: nn.Conv1d(6, 12, 1, groups=2, bias=False), "group_out_by_rest"),
    "1x1, by taps": (lambda: nn.Conv2d(6, 12, 1, groups=3, bias=False), "group_per_tap"),
    "1x1, read from the input": (lambda: nn.Conv2d(8, 8, 1, groups=2, bias=False), "group_in_by_rest"),
    "patches": (lambda: nn.Conv2d(4, 18, 2, stride=2, groups=2, bias=False), "group_out_by_rest"),
    "transposed 1x1": (lambda: nn.ConvTranspose2d(6, 12, 1, groups=3, bias=False), "group_out_by_rest"),
    "transposed patches": (lambda: nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2, bias=False), "group_in_by_rest"),
    "transposed, by taps": (lambda: nn.ConvTranspose1d(6, 9, 1, groups=3, bias=False), "group_per_tap"),
}


def matrices(layer: Any):
    """The matrix of each group as a map of vectors: of patches to pixels or, transposed, of pixels to patches."""
    w, g = layer.weight.detach(), layer.groups
    blocks = w.reshape(g, w.shape[0] // g, -1)
    return blocks.mT if layer.transposed else blocks


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_layer_keeps_norms_and_each_group_has_a_frame(name, dtype):
    make, view = CONVOLUTIONS[name]
    layer = make().to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sk.orthogonal(layer, "weight", "householder", view=view)
    found = matrices(layer)
    assert found.shape[0] == layer.groups
    assert found.shape[-2] >= found.shape[-1]
    assert orthogonality_error(found).max() < 1e-6
    assert sk.drift(layer)["weight"].error < 1e-6
    x = torch.randn(2, layer.in_channels, *[6] * (layer.weight.dim() - 2), dtype=dtype)
    y = layer(x)
    assert torch.linalg.vector_norm(y).item() == pytest.approx(torch.linalg.vector_norm(x).item(), rel=1e-5)
    kept = layer.weight.detach().clone()
    layer.weight = kept
    assert torch.allclose(layer.weight, kept, atol=1e-6)


@pytest.mark.parametrize("view", ["group_out_by_rest", "group_in_by_rest", "group_per_tap"])
@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_each_groups_matrix_is_that_of_the_view_of_its_own_part(view, make, groups):
    layer = make(8, 12, (3, 2), groups=groups)
    sk.orthogonal(layer, "weight", view=view)
    parts = layer.weight.detach().chunk(groups)
    plain = View(view.removeprefix("group_"), tuple(parts[0].shape), int(layer.transposed))
    for part in parts:
        assert orthogonality_error(plain.to_frame(part)).max() < 1e-6
    whole = View(view, tuple(layer.weight.shape), int(layer.transposed), groups)
    assert torch.equal(whole.from_frame(whole.to_frame(layer.weight)), layer.weight)


@pytest.mark.parametrize("view", ["out_by_rest", "in_by_rest", "per_tap"])
def test_one_matrix_of_all_groups_is_warned_about_once_with_the_remedy(view):
    def net():
        return nn.Sequential(nn.Conv1d(4, 8, 3, groups=2), nn.Conv1d(8, 8, 3, groups=4), nn.Conv1d(8, 8, 3))

    with pytest.warns(UserWarning, match="is not an isometry") as caught:
        sk.orthogonal(net(), where="*", view=view)
    assert len(caught) == 1
    assert "0.weight, 1.weight: " in str(caught[0].message)
    assert f'view="group_{view}"' in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sk.orthogonal(net(), where="*", view=f"group_{view}")


def test_kernels_of_other_groups_do_not_load():
    one, two = nn.Conv1d(2, 8, 3), nn.Conv1d(4, 8, 3, groups=2)
    assert one.weight.shape == two.weight.shape
    for layer in (one, two):
        sk.orthogonal(layer, "weight", view="group_out_by_rest")
    with pytest.raises(errors.CheckpointError, match="groups"):
        one.load_state_dict(two.state_dict())
