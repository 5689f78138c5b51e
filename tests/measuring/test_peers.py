"""Peers compute the maps that they are compared with, from the draws that ours get."""

import importlib.util

import pytest
import torch

from stiefelkit import errors
from stiefelkit.functional import cayley, pack_skew
from stiefelkit.measuring.implementations import OPERATIONS, FrameProblem, peers
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.testing import seeds


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [(7, 7), (7, 3), (1, 1), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_peers_give_frames_and_gradients_of_what_they_train(dtype, size, batch):
    n, p = size
    problem = FrameProblem(n, p, batch, dtype, seed=seeds.seed())
    g = problem.gradient()
    for name, peer in peers.items():
        package = name.partition("_")[0]
        if package != "layer" and importlib.util.find_spec(package) is None:
            continue
        if dtype.is_complex and (peer.family in ("householder", "stiefel") or package == "geotorch"):
            with pytest.raises(errors.DtypeError, match="real dtype"):
                peer.enter(problem)
            continue
        entry = peer.enter(FrameProblem(n, p, batch, dtype, seed=seeds.seed()))
        w = entry.weight()
        assert w.shape == problem.shape, name
        assert w.dtype == dtype
        # torch's reflectors with a base are no frame in some draws of 2 x 1, which is what a race then shows.
        if name != "torch_orthogonal_householder_base":
            assert orthogonality_error(w).max() <= 100 * rounding_limit(p, dtype), name
        kept = g.clone()
        for operation in OPERATIONS:
            OPERATIONS[operation](entry, g)()
        assert torch.equal(g, kept)
        assert entry.weight().isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("size", [(6, 6), (6, 2)])
def test_our_cayley_and_the_peers_map_the_same_skew_matrix(dtype, size):
    n, p = size
    x = FrameProblem(n, p, seed=seeds.seed(), dtype=dtype).tangent()
    a = x - torch.cat([x[:p].mH, x.new_zeros(n - p, p)])
    phase = torch.zeros(p, dtype=torch.float64) if dtype.is_complex else None
    ours = cayley(pack_skew(a[:p], a[p:]), n, p, phase=phase)
    found = {
        name: peers[name].enter(FrameProblem(n, p, seed=seeds.seed(), dtype=dtype)).weight()
        for name in ("torch_solve", "torch_orthogonal_cayley")
    }
    assert torch.allclose(found["torch_solve"], ours, atol=1e-12)
    # torch maps by the inverse transform, which is that of -A: the same size of problem
    inverse = cayley(pack_skew(-a[:p], -a[p:]), n, p, phase=phase)
    assert torch.allclose(found["torch_orthogonal_cayley"], inverse, atol=1e-12)


def test_the_layer_loop_is_the_product_of_its_rotations():
    loop = peers["layer_loop"].enter(FrameProblem(3, 3, seed=seeds.seed(), dtype=torch.float64))
    (theta,) = loop.parameters

    def rotation(i, t):
        r = torch.eye(3, dtype=torch.float64)
        r[i, i] = r[i + 1, i + 1] = t.cos()
        r[i + 1, i] = t.sin()
        r[i, i + 1] = -t.sin()
        return r

    first, second, third = theta.detach()
    expected = rotation(0, third) @ rotation(1, second) @ rotation(0, first)
    assert torch.allclose(loop.weight(), expected, atol=1e-14)
