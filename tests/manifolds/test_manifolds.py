"""The manifold as geoopt sees it: laws, logarithms, random frames, names, and what is refused."""

import subprocess
import sys
from typing import Any

import geoopt
import pytest
import torch
from drawn_frames import drawn

from stiefelkit import errors, init
from stiefelkit.manifolds import Stiefel
from stiefelkit.metrics import working_dtype
from stiefelkit.testing import seeds


def parameter(*arguments, **options) -> Any:
    return geoopt.ManifoldParameter(*arguments, **options)


def test_logmap_has_no_derivative_rather_than_a_wrong_one():
    w, u = drawn((5, 2), torch.float64)
    end = Stiefel().expmap(w, u).requires_grad_()
    with pytest.raises(NotImplementedError, match="derivative"):
        Stiefel().dist(w, end).backward()


def test_logmap_refuses_what_it_cannot_do():
    w = init.haar((4, 4))
    mirrored = torch.cat([-w[:, :1], w[:, 1:]], dim=1)
    with pytest.raises(errors.ImageError, match="determinants"):
        Stiefel("euclidean").logmap(w, mirrored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_random_frames_are_haar_and_reproducible(dtype):
    manifold = Stiefel()
    one = manifold.random(3, 5, 2, dtype=dtype, generator=seeds.generator(1))
    two = manifold.random((3, 5, 2), dtype=dtype, generator=seeds.generator(1))
    assert isinstance(one, geoopt.ManifoldTensor)
    assert one.manifold is manifold
    assert one.dtype == dtype
    assert torch.equal(one, two)
    assert manifold.check_point_on_manifold(one)
    expected = init.haar((3, 5, 2), working_dtype(dtype), seeds.generator(1))
    assert torch.equal(one, expected.to(dtype))
    assert torch.equal(manifold.origin(5, 2, dtype=dtype), torch.eye(5, 2, dtype=dtype))


def test_manifolds_match_by_metric_and_retraction():
    assert Stiefel() == Stiefel("canonical", "cayley") != Stiefel("euclidean")
    assert Stiefel() != geoopt.CanonicalStiefel()
    assert len({Stiefel(), Stiefel(), Stiefel(retraction="qr")}) == 2
    assert repr(Stiefel()) == "Stiefel(canonical, cayley) manifold"


def test_what_is_no_frame_is_refused():
    manifold: Any = Stiefel()
    ok, reason = manifold.check_vector_on_tangent(torch.eye(4, 2), torch.eye(4, 2), explain=True)
    assert not ok
    assert "2.83" in reason
    with pytest.raises(errors.NotAFrameError):
        manifold.assert_check_point_on_manifold(2 * torch.eye(4, 2))
    with pytest.raises(errors.ShapeError):
        parameter(torch.eye(2, 4), manifold)
    with pytest.raises(errors.DtypeError):
        parameter(torch.eye(4, 2, dtype=torch.bfloat16), manifold)
    assert not manifold.check_point_on_manifold(torch.eye(4, 2, dtype=torch.int64))


def test_unknown_options_are_refused():
    for options in ({"metric": "stiefel:canonical"}, {"retraction": "pollar"}):
        with pytest.raises(errors.OptionError):
            Stiefel(**options)
    with pytest.raises(errors.ShapeError):
        Stiefel().random(2, 3)
    with pytest.raises(errors.DtypeError):
        Stiefel().random(3, 2, dtype=torch.float16)


@pytest.mark.slow
def test_importing_the_package_leaves_geoopt_alone():
    code = "import sys, stiefelkit; assert 'geoopt' not in sys.modules; stiefelkit.manifolds.Stiefel()"
    subprocess.run([sys.executable, "-c", code], check=True)
