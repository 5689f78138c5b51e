"""A step from a matrix that is no frame is refused on the CPU and ends in NaN where no value may be read."""

import math

import pytest
import torch

from stiefelkit import errors, init
from stiefelkit.manifolds import RETRACTIONS, Stiefel
from stiefelkit.metrics import orthogonality_error, permitted_error, working_dtype
from stiefelkit.testing.seeds import generator

DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
MANIFOLDS = [Stiefel(metric, retraction) for metric in ("canonical", "euclidean") for retraction in RETRACTIONS]
METHODS = ("retr", "expmap", "retr_transp", "expmap_transp", "transp_follow_retr", "transp_follow_expmap")


def drawn(shape, dtype, number=0):
    return torch.randn(shape, dtype=working_dtype(dtype), generator=generator(number)).to(dtype)


def frame(shape, dtype):
    return init.haar(shape, working_dtype(dtype), generator(7)).to(dtype)


def vectors(method, x):
    count = 2 if "transp" in method else 1
    return [drawn(x.shape, x.dtype, k + 1) for k in range(count)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("manifold", MANIFOLDS, ids=repr)
def test_what_is_no_frame_is_refused(manifold, dtype, method):
    w = frame((2, 6, 3), dtype)
    broken = w.clone()
    broken[1, 2, 0] = math.nan
    for x in (10 * drawn((2, 6, 3), dtype), w * 2, w * 1.001, torch.zeros_like(w), broken):
        with pytest.raises(errors.NotAFrameError, match="projx gives the nearest"):
            getattr(manifold, method)(x, *vectors(method, x))


@pytest.mark.parametrize("method", ["retr", "expmap"])
@pytest.mark.parametrize("retraction", ["cayley", "qr"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_under_vmap_it_ends_in_nan_and_its_neighbour_does_not(dtype, retraction, method):
    step = getattr(Stiefel(retraction=retraction), method)
    w, u = frame((2, 6, 3), dtype), drawn((2, 6, 3), dtype)
    torch.testing.assert_close(torch.vmap(step)(w, u), step(w, u))
    w[1] *= 1.5
    found = torch.vmap(step)(w, u)
    assert orthogonality_error(found[0]) <= permitted_error(3, dtype)
    assert found[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (6, 3), (40, 1), (64, 64)])
def test_what_is_off_by_little_is_mended(shape, dtype):
    # ||W^H W - I||_F = 2e-5 sqrt(p)
    w = frame(shape, dtype) * (1 + 1e-5)
    for method in ("retr", "expmap"):
        moved = getattr(Stiefel(), method)(w, 0.1 * drawn(shape, dtype))
        assert orthogonality_error(moved) <= permitted_error(shape[-1], dtype)
