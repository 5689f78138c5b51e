"""Products of fewer reflectors than columns: what is taken comes back, what is outside the image is refused."""

import pytest
import torch

from stiefelkit import errors, init
from stiefelkit.contract.param import load_chart_, rounded
from stiefelkit.metrics import rounding_limit, working_dtype
from stiefelkit.parametrizations import Householder
from stiefelkit.testing.seeds import generator

CASES = [((6, 6), 1), ((8, 8), 3), ((9, 5), 2), ((2, 7, 4), 3), ((72, 12), 2), ((100, 100), 40)]


def inside(map, number=0):
    coordinates, chart = map.initial("haar", generator(number))
    load_chart_(map, chart)
    with torch.no_grad():
        return map(*rounded(map, coordinates))


def law(map):
    n, p = map.shape[-2:]
    double = map.dtype in (torch.float64, torch.complex128)
    return (100 * max(1.0, n / 64) if double else 8) * rounding_limit(p, map.dtype)


@pytest.mark.parametrize(("shape", "k"), CASES)
@pytest.mark.parametrize("off", [1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_is_taken_comes_back(dtype, off, shape, k):
    map = Householder(shape, dtype=dtype, reflections=k)
    for number in range(4):
        w = inside(map, number).to(working_dtype(dtype))
        a = torch.randn(*w.shape[:-2], w.shape[-2], w.shape[-2], dtype=w.dtype, generator=generator(number + 9))
        # A turn by `off` out of the image.
        a = off * (a - a.mT) / torch.linalg.matrix_norm(a - a.mT)[..., None, None]
        w = (torch.linalg.matrix_exp(a) @ w).to(dtype)
        try:
            found = map.right_inverse(w)
        except errors.ImageError:
            assert off > 0 or dtype != torch.float64
            continue
        with torch.no_grad():
            back = map(*found)
        gap = torch.linalg.matrix_norm(back.double() - w.double())
        w = w.double()
        defect = torch.linalg.matrix_norm(w.mT @ w - torch.eye(shape[-1], dtype=torch.float64))
        assert (gap <= law(map) + defect).all()


@pytest.mark.parametrize(("shape", "k"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128], ids=str)
def test_what_is_outside_is_refused(dtype, shape, k):
    map = Householder(shape, dtype=dtype, reflections=k)
    w = init.haar(shape, working_dtype(dtype), generator(3)).to(dtype)
    with pytest.raises(errors.ImageError, match=f"reflections={shape[-1]}"):
        map.right_inverse(w)


def test_a_float64_frame_near_the_image_is_refused():
    map = Householder((8, 8), dtype=torch.float64, reflections=3)
    w = inside(map)
    a = torch.randn(8, 8, dtype=torch.float64, generator=generator(1))
    with pytest.raises(errors.ImageError):
        map.right_inverse(torch.linalg.matrix_exp(1e-8 * (a - a.mT)) @ w)
