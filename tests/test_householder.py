"""Products of reflectors against the plain product and the oRNN paper."""

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.functional import householder, trapezoid_size, unpack_trapezoid

Householder = sk.parametrizations.Householder

DTYPES = [torch.float64, torch.complex128]


def product(u, p):
    """H(u_1) H(u_2) ... applied to the first p columns of the identity, last column of U first."""
    n, k = u.shape
    w = torch.eye(n, p, dtype=u.dtype)
    for j in reversed(range(k)):
        v = u[:, j : j + 1]
        w = w - 2 * v @ (v.mH @ w) / (v.mH @ v).real
    return w


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize(("n", "k", "p"), [(1, 1, 1), (6, 6, 6), (6, 2, 6), (9, 4, 4), (9, 3, 5)])
def test_compact_wy_is_the_product_of_reflectors(n, k, p, is_complex):
    v = torch.randn(trapezoid_size(n, k, is_complex), dtype=torch.float64)
    u = unpack_trapezoid(v, n, k, is_complex)
    assert torch.equal(u, u.tril())
    assert torch.allclose(householder(v, n, k, p, dtype=DTYPES[is_complex]), product(u, p), atol=1e-13)


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_the_scale_of_a_reflector_means_nothing(scale):
    v = torch.randn(trapezoid_size(5, 5, False))
    w = Householder((5, 5), dtype=torch.float32)
    leaf = (v * scale).requires_grad_()
    out = w(leaf)
    assert torch.allclose(out, w(v), atol=1e-6)
    out.sum().backward()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
    along = (leaf.grad.double() * leaf.detach().double()).sum()
    size = leaf.grad.double().norm() * leaf.detach().double().norm()
    assert abs(along) <= 1e-6 * size


def test_a_zero_reflector_is_the_identity_with_gradient_zero():
    u = torch.randn(4, 4).tril()
    u[:, 1] = 0
    i, j = torch.tril_indices(4, 4)
    v = u[i, j].requires_grad_()
    w = householder(v, 4, 4, 4)
    keep = u.double()[:, [0, 2, 3]]
    assert torch.allclose(w, product(keep, 4), atol=1e-12)
    (g,) = torch.autograd.grad(w.sum(), v)
    assert torch.equal(unpack_trapezoid(g, 4, 4, False)[:, 1], torch.zeros(4))


def test_the_count_is_the_papers():
    # nk - k(k - 1)/2, Mhammedi et al. 2017: n = 128 with 16 reflections.
    layer = sk.orthogonal(torch.nn.Linear(128, 128), "weight", "householder", reflections=16)
    assert sk.coordinates(layer, "weight")["reflectors"].numel() == 128 * 16 - 16 * 15 // 2


def test_both_components_are_reached_by_the_signs():
    for sign in (1.0, -1.0):
        w = torch.diag(torch.tensor([sign, 1.0, 1.0]))
        layer = sk.orthogonal(torch.nn.Linear(3, 3), "weight", "householder", init=w)
        assert torch.allclose(layer.weight, w, atol=1e-6)


def test_fewer_reflectors_refuse_a_frame_outside_their_image():
    layer = sk.orthogonal(torch.nn.Linear(6, 6), "weight", "householder", reflections=2)
    with pytest.raises(errors.ImageError, match="reflections=6"):
        layer.weight = sk.init.haar((6, 6)).float()
    for seed in range(20):
        sk.reset_(layer, "weight", generator=torch.Generator().manual_seed(seed))
        kept = layer.weight.detach().clone()
        layer.weight = kept
        assert torch.allclose(layer.weight, kept, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_identity_trains_with_fewer_reflectors_too(dtype):
    layer = sk.orthogonal(torch.nn.Linear(6, 6, dtype=dtype), "weight", "householder", reflections=3, init="identity")
    assert torch.allclose(layer.weight, torch.eye(6, dtype=dtype), atol=1e-6)
    target = torch.randn(6, 6, dtype=dtype)
    (layer.weight * target).sum().abs().backward()
    gradient = sk.coordinates(layer, "weight")["reflectors"].grad
    assert gradient is not None
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("reflections", [0, 4, True, 1.5, "all"])
def test_reflections_are_between_one_and_p(reflections):
    with pytest.raises(errors.OptionError, match="between 1 and p = 3"):
        sk.orthogonal(torch.nn.Linear(3, 3), "weight", "householder", reflections=reflections)


def test_a_checkpoint_with_other_reflections_is_refused():
    few = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "householder", reflections=2)
    more = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "householder", reflections=3)
    with pytest.raises(errors.CheckpointError, match="options"):
        more.load_state_dict(few.state_dict())
    cayley = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "cayley")
    with pytest.raises(errors.CheckpointError, match="householder"):
        few.load_state_dict(cayley.state_dict())
