"""Forward mode, alone and over reverse mode, and batched gradients: of every map and public function."""

import pytest
import torch
from test_every_public_function import CASES, row
from torch.autograd import forward_ad

import stiefelkit as sk
from stiefelkit.errors import OptionError
from stiefelkit.functional import cayley, skew_size
from stiefelkit.scan import scan
from stiefelkit.testing import cases, seeds
from stiefelkit.testing.numerical import of_free


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_functions_have_right_tangents_and_batched_gradients_or_refuse(name, dtype):
    function, inputs = row(name, dtype)
    options = {"check_batched_grad": True, "check_forward_ad": True}
    # torch batches no conjugates of dual numbers.
    options["check_batched_forward_grad"] = dtype == torch.float64
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True, **options)


SMALL = [
    pytest.param(case, id=str(case))
    for cls in sk.available().values()
    for case in cases(cls)
    if case.dtype in (torch.float64, torch.complex128) and torch.Size(case.shape).numel() <= 16
]


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("how", ["dual numbers", "no grad mode"])
def test_products_with_the_hessian_are_right_where_a_backward_pass_runs_without_grad_mode(case, how):
    param, coordinates = case.random(1.0)
    fn, leaves = of_free(param, coordinates)
    leaves = tuple(c.detach().requires_grad_() for c in leaves)
    if not param.traits.twice_differentiable or any(c.is_complex() or not c.numel() for c in leaves):
        return
    g, places = torch.randn(case.shape, generator=seeds.generator(1), dtype=case.dtype), tuple(range(len(leaves)))
    tangents = tuple(torch.randn(c.shape, generator=seeds.generator(2), dtype=c.dtype) for c in leaves)

    def loss(*leaves):
        w = (fn(*leaves) * g.conj()).sum()
        return w.real.sin() + w.real.square()

    gradients = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    expected = torch.autograd.grad(gradients, leaves, tangents)
    if how == "dual numbers":
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(c, t) for c, t in zip(leaves, tangents, strict=True)]
            gradients = torch.autograd.grad(loss(*duals), duals)
            found = [forward_ad.unpack_dual(c).tangent for c in gradients]
    else:
        with torch.no_grad():
            found = torch.func.jvp(torch.func.jacrev(loss, places), leaves, tangents)[1]
    assert any(t.any() for t in expected) or torch.Size(case.shape).numel() == 1
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        assert (ours - theirs).abs().max() <= 1e-9 * (1 + theirs.abs().max())


def test_dual_numbers_have_the_tangents_of_torch_func():
    v, t = (torch.randn(skew_size(5, 3, False), dtype=torch.float64, generator=seeds.generator(k)) for k in (1, 2))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, t)
        found = torch.autograd.forward_ad.unpack_dual(cayley(dual, 5, 3)).tangent
    assert torch.equal(found, torch.func.jvp(lambda v: cayley(v, 5, 3), (v,), (t,))[1])  # type: ignore[arg-type]


def test_what_has_no_tangents_says_so():
    x, w = torch.randn(9, 2, 4, generator=seeds.generator(1)), torch.eye(4)
    with pytest.raises(OptionError, match='backend="reference" for forward mode'):
        torch.func.jvp(lambda w: scan(x, w, torch.zeros(2, 4), backend="inplace", activation="tanh")[0], (w,), (w,))


def test_forward_mode_over_forward_mode_is_refused():
    v = torch.randn(skew_size(4, 4, False), dtype=torch.float64, generator=seeds.generator(1))
    with pytest.raises(NotImplementedError, match="jacrev"):
        torch.func.jacfwd(torch.func.jacfwd(lambda v: cayley(v, 4, 4)))(v)
