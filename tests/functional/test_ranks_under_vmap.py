"""Operands of every rank under vmap: what a map of one example gives, a loop over examples gives."""

import copy
import itertools
from functools import partial

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.functional import brickwall, householder, householder_linear, mesh_size, product, trapezoid_size
from stiefelkit.testing.seeds import generator, reseed

DTYPES = (torch.float32, torch.complex64)
BATCHES = ((), (3,), (1,), (2, 3))


def drawn(*shape, dtype=torch.float32, number=0):
    return torch.randn(*shape, dtype=dtype, generator=generator(number))


def equal(found, wanted):
    tolerance = 1e-12 if wanted.dtype in (torch.float64, torch.complex128) else 2e-5
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("left", "right"), itertools.product(BATCHES, BATCHES))
def test_a_product_maps_over_either_operand(left, right, dtype):
    for k, (shape, other) in enumerate((((*left, 4, 5), (*right, 5, 6)), ((*left, 1, 5), (*right, 5, 1)))):
        a, b = drawn(*shape, dtype=dtype, number=k), drawn(*other, dtype=dtype, number=10 + k)
        for dim in range(b.dim() + 1):
            many = torch.stack([b, 2 * b, b - 1, 3 - b, b.flip(-1)], dim=dim)
            found = torch.vmap(lambda m, a=a: product(a, m), in_dims=dim)(many)
            equal(found, torch.stack([a @ m for m in many.unbind(dim)]))
        for dim in range(-a.dim() - 1, 0):
            many = torch.stack([a, 2 * a, a - 1, 3 - a, a.flip(-1)], dim=dim)
            found = torch.vmap(lambda m, b=b: product(m, b), in_dims=dim, out_dims=-1)(many)
            equal(found, torch.stack([m @ b for m in many.unbind(dim)], dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("left", "right"), itertools.product(BATCHES, BATCHES))
def test_a_product_maps_over_both_operands_and_again(left, right, dtype):
    a, b = drawn(2, 5, *left, 4, 5, dtype=dtype), drawn(*right, 5, 6, 2, dtype=dtype, number=1)
    found = torch.vmap(lambda a, b: torch.vmap(product, in_dims=(0, None))(a, b), in_dims=(0, -1))(a, b)
    wanted = [torch.stack([one @ b[..., i] for one in a[i]]) for i in range(2)]
    equal(found, torch.stack(wanted))
    found = torch.vmap(lambda a: torch.vmap(lambda b: product(a, b), in_dims=-1, out_dims=1)(b))(a[:, 0])
    equal(found, torch.stack([torch.stack([a[j, 0] @ b[..., i] for i in range(2)], 1) for j in range(2)]))


def test_a_product_is_of_matrices():
    m = torch.ones(3, 3)
    with pytest.raises(errors.ShapeError, match="matrices"):
        product(m, m[0])
    with pytest.raises(errors.ShapeError, match="matrices"):
        torch.vmap(lambda a: product(a, m))(m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_reflectors_map_with_a_diagonal_of_any_rank(batch, dtype):
    n, k, p = 6, 3, 5
    v = drawn(4, *batch, trapezoid_size(n, k, dtype.is_complex), dtype=dtype.to_real())
    for fewer in range(len(batch) + 1):
        d = drawn(*batch[fewer:], p, dtype=dtype.to_real(), number=1)
        given = {"phase": d} if dtype.is_complex else {"signs": d.sign()}
        key = next(iter(given))
        found = torch.vmap(lambda v, d=given[key], key=key: _by_diagonal(v, n, k, p, dtype, key, d))(v)
        equal(found, torch.stack([_by_diagonal(one, n, k, p, dtype, key, given[key]) for one in v]))
        many = torch.stack([given[key], -given[key]], dim=-1)
        one = partial(_by_diagonal, v[0], n, k, p, dtype, key)
        equal(torch.vmap(one, in_dims=-1)(many), torch.stack([one(d) for d in many.unbind(-1)]))


def _by_diagonal(v, n, k, p, dtype, key, d):
    return householder(v, n, k, p, dtype=dtype, **{key: d})


def test_signs_are_not_written_to():
    signs = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    householder(drawn(6, dtype=torch.float64), 3, 3, 3, signs=signs)
    assert signs.tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(), (3,), (2, 3)])
def test_rows_of_any_rank_are_reflected_under_vmap(rows, dtype):
    n, k = 5, 2
    v = drawn(4, trapezoid_size(n, k, dtype.is_complex), dtype=dtype.to_real())
    x = drawn(*rows, n, dtype=dtype, number=1)
    found = torch.vmap(lambda v: householder_linear(x, v, n, k))(v)
    equal(found, torch.stack([householder_linear(x, one, n, k) for one in v]))
    found = torch.vmap(lambda x: householder_linear(x, v[0], n, k), in_dims=-1)(torch.stack([x, 2 * x], -1))
    equal(found, torch.stack([householder_linear(m, v[0], n, k) for m in (x, 2 * x)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("left", "right"), itertools.product(BATCHES, BATCHES))
def test_rotations_map_over_matrices_and_angles_of_any_rank(left, right, dtype):
    n, layers = 5, 3
    x, angle = drawn(4, *left, n, 2, dtype=dtype), drawn(4, *right, mesh_size(n, layers), number=1)
    for dims in ((0, None), (None, 0), (0, 0)):
        one, other = (t if d == 0 else t[0] for t, d in zip((x, angle), dims, strict=True))
        found = torch.vmap(lambda x, t: brickwall(x, t, layers=layers), in_dims=dims)(one, other)
        wanted = [
            brickwall(x[i] if dims[0] == 0 else x[0], angle[i] if dims[1] == 0 else angle[0], layers=layers)
            for i in range(4)
        ]
        equal(found, torch.stack(wanted))


def _networks():
    yield "linear_real", lambda: sk.nn.LinearTransitionRNN(3, 6, activation="relu")
    yield "linear_layers", lambda: sk.nn.LinearTransitionRNN(3, 6, num_layers=2, bidirectional=True, batch_first=True)
    yield "linear_complex", lambda: sk.nn.LinearTransitionRNN(3, 6, field="complex", parametrization="matrix_exp")
    yield "orthogonal_real", lambda: sk.nn.OrthogonalRNN(3, 6, num_layers=2)
    yield "orthogonal_complex", lambda: sk.nn.OrthogonalRNN(3, 6, field="complex", parametrization="givens")
    yield "goru", lambda: sk.nn.GORU(3, 6, num_layers=2)


def _by_name(nets, kind):
    pairs = zip(*(getattr(net, kind)() for net in nets), strict=True)
    return [(each[0][0], *(t for _, t in each)) for each in pairs]


@pytest.mark.parametrize("steps", [3, 12])
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in _networks()])
def test_an_ensemble_of_recurrent_layers_equals_the_loop(make, steps):
    reseed()
    nets = [make() for _ in range(3)]
    parameters, buffers = (
        {key: torch.stack([t.detach() for t in many]) for key, *many in _by_name(nets, kind)}
        for kind in ("named_parameters", "named_buffers")
    )
    skeleton = copy.deepcopy(nets[0])
    x = drawn(steps, 4, 3)

    def output(parameters, buffers, x):
        return torch.func.functional_call(skeleton, (parameters, buffers), (x,))[0]

    def loss(parameters, buffers, x):
        return output(parameters, buffers, x).abs().square().sum()

    found = torch.vmap(output, in_dims=(0, 0, None))(parameters, buffers, x)
    equal(found, torch.stack([net(x)[0] for net in nets]))
    many = torch.stack([x, 2 * x, x - 1])
    found = torch.vmap(output, in_dims=(0, 0, 0))(parameters, buffers, many)
    equal(found, torch.stack([net(one)[0] for net, one in zip(nets, many, strict=True)]))
    gradients = torch.vmap(torch.func.grad(loss), in_dims=(0, 0, None))(parameters, buffers, x)
    for i, net in enumerate(nets):
        wanted = torch.autograd.grad(net(x)[0].abs().square().sum(), list(net.parameters()))
        for (name, _), g in zip(net.named_parameters(), wanted, strict=True):
            scale = g.abs().max().clamp(min=1)
            torch.testing.assert_close(gradients[name][i] / scale, g / scale, atol=2e-5, rtol=0)
