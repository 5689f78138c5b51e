"""Cayley transforms where LU is a GPU's: it may heed lowered products, and leave NaN out of an inverse."""

import pytest
import torch

from stiefelkit.functional import cayley, skew_size
from stiefelkit.functional._arithmetic.devices import without_reads
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing import lowered_products, seeds

PLACES = [(n, p, is_complex) for n, p in [(20, 20), (130, 130), (9, 4), (140, 70)] for is_complex in (False, True)]


@pytest.fixture(autouse=True)
def _lu_of_a_gpu(monkeypatch):
    invert = torch.linalg.inv_ex

    def lowered(m):
        return invert(m.nan_to_num() * (1.001 if m.dtype in (torch.float32, torch.complex64) else 1))

    monkeypatch.setattr(torch.linalg, "inv_ex", lowered)
    with without_reads():
        yield


def drawn(n, p, is_complex):
    v = seeds.normal((skew_size(n, p, is_complex),), 0, torch.float32)
    return v, seeds.normal((p,), 1, torch.float32) if is_complex else None


@pytest.mark.parametrize(("n", "p", "is_complex"), PLACES)
def test_fast_frames_are_exact_and_heed_no_lowered_product(n, p, is_complex):
    v, phase = drawn(n, p, is_complex)
    w = cayley(v, n, p, phase=phase, precision="fast")
    assert orthogonality_error(w) <= permitted_error(p, w.dtype)
    with lowered_products():
        assert torch.equal(cayley(v, n, p, phase=phase, precision="fast"), w)


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize(("n", "p", "is_complex"), PLACES)
def test_nan_in_any_coordinate_is_nan_in_the_frame(n, p, is_complex, precision):
    for place in (0, -1):
        v, phase = drawn(n, p, is_complex)
        v[place] = torch.nan
        assert cayley(v, n, p, phase=phase, precision=precision).isnan().any()
