"""Every parametrization and every optimizer of frames keeps the laws, the day that it is registered."""

import pytest
import torch

import stiefelkit as sk
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing import parametrize_optimizers_with_checks, parametrize_with_checks, random_coordinates, seeds


@pytest.mark.slow
@parametrize_with_checks(sk.available().values())
def test_every_parametrization_keeps_the_laws(check):
    check()


@pytest.mark.slow
@pytest.mark.parametrize(("n", "dtype"), [(1024, torch.float32), (512, torch.complex64)])
@pytest.mark.parametrize("name", sk.available())
def test_exact_frames_are_exact_at_large_sizes(name, n, dtype):
    cls = sk.available()[name]
    if cls.supports((n, n), dtype) is not None:
        return
    map = cls((n, n), dtype=dtype)
    generator = seeds.generator(n)
    for scale in (n**-0.5, 1.0):
        w = map(*random_coordinates(map, scale, generator))
        if map.traits.exact:
            assert orthogonality_error(w).item() <= permitted_error(n, dtype)


@parametrize_optimizers_with_checks(
    [cls for cls in sk.optim.available().values() if getattr(cls, "moves_frames", False)]
)
def test_every_optimizer_keeps_the_laws(check):
    check()
