"""Block-diagonal frames: k maps at once, and nothing outside of the blocks."""

from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors, init
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing import random_coordinates, seeds


def layer(rows=12, columns=12, dtype=torch.float32, **options) -> Any:
    return sk.orthogonal(nn.Linear(columns, rows, bias=False, dtype=dtype), "weight", "block_diagonal", **options)


@pytest.mark.parametrize("inner", ["cayley", "householder", "givens", "matrix_exp", "rebased", "stiefel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_blocks_are_the_inner_maps_frames_and_the_rest_is_zero(inner, dtype):
    map = sk.parametrizations.BlockDiagonal((12, 12), dtype=dtype, blocks=3, inner=inner)
    coordinates = random_coordinates(map, 0.5, seeds.generator())
    w = map(*coordinates)
    assert torch.equal(w, torch.block_diag(*map.inner(*coordinates)))
    assert orthogonality_error(w).item() <= permitted_error(12, dtype)


def test_no_matrix_of_the_whole_size_is_made_to_apply_it():
    map = sk.parametrizations.BlockDiagonal((64, 64), dtype=torch.float32, blocks=16)
    x = torch.randn(3, 64)
    skew = random_coordinates(map, 1.0, seeds.generator())[0].requires_grad_()
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        map.linear(x, skew).square().sum().backward()
    assert max(sizes) < 64 * 64
    assert map.linear(x[:0], skew).shape == (0, 64)
    with pytest.raises(RuntimeError):
        map.linear(x.double(), skew)


def test_a_block_diagonal_frame_is_kept_and_another_refused_or_projected():
    w = torch.block_diag(*init.haar((3, 4, 4), generator=seeds.generator())).float()
    one = layer(blocks=3, init=w)
    assert torch.dist(one.weight, w) < 1e-6
    whole = init.haar((12, 12), generator=seeds.generator()).float()
    with pytest.raises(errors.ImageError, match="zero"):
        one.weight = whole
    assert torch.dist(one.weight, w) < 1e-6
    host: Any = nn.Linear(12, 12)
    with torch.no_grad():
        host.weight.copy_(whole)
    sk.orthogonal(host, "weight", "block_diagonal", blocks=3, init="project")
    blocks = whole.double().view(3, 4, 3, 4).diagonal(dim1=0, dim2=2).unbind(-1)
    nearest = [sk.functional.nearest_frame(block) for block in blocks]
    assert torch.dist(host.weight, torch.block_diag(*nearest).float()) < 1e-6


@pytest.mark.parametrize(("blocks", "scheme"), [(1, None), (1, "project"), (3, "project")])
def test_blocks_of_rotations_take_the_nearest_rotation_of_a_weight_that_is_no_frame(blocks, scheme):
    size = 12 // blocks
    weights = torch.randn(blocks, size, size, generator=seeds.generator())
    weights[..., 0] *= -torch.linalg.det(weights).sign()[:, None]
    host: Any = nn.Linear(12, 12)
    with torch.no_grad():
        host.weight.copy_(torch.block_diag(*weights))
    sk.orthogonal(host, "weight", "block_diagonal", blocks=blocks, inner="matrix_exp", init=scheme)
    # The rotation R nearest to M, det M < 0, has tr(R^T M) = s_1 + ... - s_n.
    s = torch.linalg.svdvals(weights)
    torch.testing.assert_close((host.weight * torch.block_diag(*weights)).sum(), s.sum() - 2 * s[:, -1].sum())


def test_blocks_divide_both_sizes_and_a_checkpoint_of_others_is_refused():
    with pytest.raises(errors.OptionError, match="divide"):
        layer(blocks=5)
    with pytest.raises(errors.CheckpointError):
        layer(blocks=3).load_state_dict(layer(blocks=2).state_dict())
    with pytest.raises(errors.CheckpointError, match="matrix_exp"):
        layer(blocks=3).load_state_dict(layer(blocks=3, inner="matrix_exp").state_dict())


def test_a_kernel_of_depth_has_a_frame_of_one_column_in_each_group():
    conv: Any = nn.Conv2d(6, 6, 3, groups=6, bias=False)
    sk.orthogonal(conv, "weight", "block_diagonal", view="group_out_by_rest")
    assert torch.allclose(conv.weight.flatten(1).norm(dim=1), torch.ones(6), atol=1e-6)
