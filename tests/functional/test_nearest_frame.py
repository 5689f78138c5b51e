"""The nearest frame: of wide, tall, huge, tiny, and of what has none; and its derivatives of every order."""

import math

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors, init
from stiefelkit.functional import nearest_frame, polar_factor
from stiefelkit.metrics import orthogonality_error, permitted_error, working_dtype
from stiefelkit.testing.seeds import generator

FIELDS = (torch.float64, torch.complex128)
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, *FIELDS)
SHAPES = [(3, 3), (6, 3), (2, 5, 2), (4, 1), (2, 5), (2, 1, 3), (1, 1)]


def drawn(shape, dtype, number=0):
    return torch.randn(shape, dtype=working_dtype(dtype), generator=generator(number)).to(dtype)


def singular(shape, dtype, values):
    """A matrix with the given singular values."""
    n, p = shape[-2:]
    short = min(n, p)
    u = init.haar((*shape[:-2], n, short), dtype, generator(1))
    v = init.haar((*shape[:-2], p, short), dtype, generator(2))
    return u * torch.tensor(values, dtype=torch.float64)[:short] @ v.mH


def tall(w):
    return w.mH if w.shape[-2] < w.shape[-1] else w


def by_svd(x):
    u, _, vh = torch.linalg.svd(x.to(working_dtype(x.dtype)), full_matrices=False)
    return u @ vh


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (40, 30), (30, 40), (3, 20, 20)])
@pytest.mark.parametrize("tracked", [False, True])
def test_of_any_shape(shape, dtype, tracked):
    x = drawn(shape, dtype).requires_grad_(tracked)
    for found in (nearest_frame(x), polar_factor(x), nearest_frame(nearest_frame(x))):
        assert found.dtype == dtype
        assert found.shape == x.shape
        assert found.is_contiguous()
        assert not found.is_conj()
        p = min(shape[-2:])
        assert orthogonality_error(tall(found)).max() <= permitted_error(p, dtype)
        bound = 4 * torch.finfo(dtype).eps * math.sqrt(p) + 1e-9
        assert torch.linalg.matrix_norm((found - by_svd(x)).to(torch.complex128)).max() <= bound


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(3, 3), (5, 2), (2, 5)])
def test_of_adjoints_that_torch_has_not_worked_out_yet(shape, dtype):
    x = drawn(shape, dtype).mH
    assert x.is_conj()
    assert torch.equal(nearest_frame(x), nearest_frame(x.resolve_conj()))
    layer = nn.Linear(shape[0], shape[1], dtype=dtype)
    layer.weight = nn.Parameter(x)
    assert torch.allclose(sk.orthogonal(layer, "weight").weight, nearest_frame(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, *FIELDS], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (6, 3), (3, 6)])
def test_of_any_size(shape, dtype):
    w = singular(shape, working_dtype(dtype), [1.0, 2.0, 3.0, 4.0, 5.0]).to(dtype)
    sizes = [1e30, 1e-30] if torch.finfo(dtype).max < 1e300 else [1e200, 1e-200, 2.0**1020, 2.0**-1060]
    for size in sizes:
        for factor in (nearest_frame, polar_factor, lambda x: polar_factor(x, well_conditioned=True)):
            # Entries near 2^-1060 have 14 bits: an error of 2^-15 each, 2.2e-4 in the norm of a complex 5 x 5 matrix.
            atol = 3e-4 if size < 1e-307 else 1e-12 if dtype == working_dtype(dtype) else 2e-5
            torch.testing.assert_close(factor(w * size), factor(w), atol=atol, rtol=0)
    largest = torch.full(shape, torch.finfo(dtype).max, dtype=dtype)
    largest[tuple(torch.triu_indices(shape[-2], shape[-1], 1))] *= -1
    assert orthogonality_error(tall(nearest_frame(largest))).max() <= permitted_error(min(shape), dtype)


@pytest.mark.parametrize("spread", [0.0, 1e-12, 1e-8, 1e-6, 1e-4, 1e-2, 0.04, 0.06, 0.3])
@pytest.mark.parametrize("dtype", FIELDS)
@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12), (64, 64)])
def test_from_near_and_from_far(shape, dtype, spread):
    w = init.haar((max(shape), min(shape)), dtype, generator(3))
    x = w + spread * drawn(w.shape, dtype, 4) / min(shape) ** 0.5
    x = x if shape[-2] >= shape[-1] else x.mH
    found = nearest_frame(x)
    assert orthogonality_error(tall(found)) <= permitted_error(min(shape), dtype)
    assert torch.linalg.matrix_norm(found - by_svd(x)) <= 2e-14 * min(shape) ** 0.5 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5), (2, 4, 3)])
def test_what_has_no_nearest_frame_is_refused(shape, dtype):
    x = drawn(shape, dtype)
    for value in (math.nan, math.inf):
        broken = x.clone()
        broken[..., 0, 1] = value
        for factor in (nearest_frame, polar_factor, lambda x: polar_factor(x, well_conditioned=True)):
            with pytest.raises(errors.NonFiniteError):
                factor(broken.requires_grad_())
    x[..., 0, :] = x[..., 1, :]
    x[..., :, 0] = x[..., :, 1]
    for dependent in (torch.zeros_like(x), x):
        for factor in (nearest_frame, polar_factor):
            with pytest.raises(errors.RankError, match=factor.__name__):
                factor(dependent)


@pytest.mark.parametrize("name", ["cayley", "stiefel"])
@pytest.mark.parametrize("sizes", [(4, 4), (3, 5), (5, 3)])
def test_a_weight_without_a_nearest_frame_is_not_projected(name, sizes):
    layer = nn.Linear(*sizes)
    for value, error in ((0.0, errors.RankError), (1.0, errors.RankError), (math.nan, errors.NonFiniteError)):
        nn.init.constant_(layer.weight, value)
        with pytest.raises(error):
            sk.orthogonal(layer, "weight", name, init="project")
        assert not hasattr(layer, "parametrizations")


@pytest.mark.parametrize("dtype", FIELDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "values", [(0.5, 1.2, 2.5), (1.0, 1.0, 1.0), (2.0, 2.0, 0.7)], ids=["any", "frame", "repeated"]
)
def test_first_and_second_derivatives(shape, dtype, values):
    x = singular(shape, dtype, values).requires_grad_()
    for factor in (nearest_frame, lambda x: polar_factor(x, well_conditioned=True)):
        assert torch.autograd.gradcheck(factor, x, fast_mode=True)
        assert torch.autograd.gradgradcheck(factor, x, fast_mode=True)


def test_third_derivatives():
    x = singular((4, 2), torch.float64, [0.5, 1.5]).requires_grad_()

    def gradient(x):
        return torch.autograd.grad(polar_factor(x)[0, 0], x, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(gradient, x)


def test_the_loop_leaves_no_graph():
    w = (init.haar((6, 3), torch.float64, generator(0)) * 1.01).requires_grad_()
    found = nearest_frame(w)
    node, depth = found.grad_fn, 0
    while node is not None:
        node, depth = (node.next_functions[0][0] if node.next_functions else None), depth + 1
    assert depth <= 8


@pytest.mark.parametrize("factor", [nearest_frame, polar_factor])
def test_what_is_no_matrix_is_refused_and_an_empty_one_stays(factor):
    with pytest.raises(errors.ShapeError):
        factor(torch.ones(3))
    for shape in ((0, 3, 2), (3, 0), (0, 3)):
        assert factor(torch.ones(shape)).shape == shape
