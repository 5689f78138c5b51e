"""Steps along the manifold have forward derivatives: those that reverse mode has, and that differences measure."""

import pytest
import torch

from stiefelkit import init
from stiefelkit.manifolds import RETRACTIONS, Stiefel
from stiefelkit.testing import seeds

# Both results of these two are what the other methods return, one each.
STEPS = [("retr_transp", retraction) for retraction in RETRACTIONS] + [("expmap_transp", "cayley")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(3, 3), (4, 3), (7, 2), (2, 5, 2)])
@pytest.mark.parametrize(("name", "retraction"), STEPS)
@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
def test_forward_derivatives_of_steps_equal_central_differences(metric, name, retraction, shape, dtype):
    manifold, g = Stiefel(metric, retraction), seeds.generator()
    w = init.haar(shape, dtype, g)
    u, v, dw, du, dv = (torch.randn(shape, dtype=dtype, generator=g) / shape[-1] for _ in range(5))
    dw = manifold.proju(w, dw)

    def step(w, u, v):
        return getattr(manifold, name)(w, u, v)

    h, tangents = 2.0**-13, (dw, du, dv)
    _, found = torch.func.jvp(step, (w, u, v), tangents)  # type: ignore[misc]
    ends = []
    for t in (h, -h):
        moved = manifold.expmap(w, t * dw), u + t * du, v + t * dv
        ends.append(step(*moved))
    for slope, after, before in zip(found, *ends, strict=True):
        # The third derivative over 6 times h^2 = 1.5e-8, and rounding of some 100 units over h.
        assert (slope - (after - before) / (2 * h)).norm() <= 1e-6 * (1 + slope.norm())
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(*pair) for pair in zip((w, u, v), tangents, strict=True)]
        for dual, slope in zip(step(*duals), found, strict=True):
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, slope)
