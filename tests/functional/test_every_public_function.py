"""Every public function of functional and scan stands in a table here, and keeps the laws of its row."""

from functools import cache
from typing import Any

import pytest
import torch

from stiefelkit import errors, functional, init, scan
from stiefelkit.functional import mesh_size, skew_size, trapezoid_size
from stiefelkit.testing.seeds import generator

R, C = torch.float64, torch.complex128


def drawn(*shape, dtype=R, number=0):
    return torch.randn(*shape, dtype=dtype, generator=generator(number))


def skew(n, dtype):
    a = drawn(n, n, dtype=dtype)
    return a - a.mH


@cache  # vmap draws nothing
def frame(n, p, dtype=R):
    return init.haar((n, p), dtype, generator(5))


def _scan(steps, activation, backend="auto"):
    def run(x, w, h0):
        return scan.scan(x, w, h0, activation=activation, backend=backend)[0]

    return run, lambda dtype: (drawn(steps, 2, 3, dtype=dtype), drawn(3, 3, dtype=dtype), drawn(2, 3, dtype=dtype))


def _angles(n, layers):
    return drawn(mesh_size(n, layers), number=3)


def _pair(n, p):
    return lambda dtype: (drawn(n, p, dtype=dtype), drawn(n, p, dtype=dtype, number=1))


def _moving(step, n=4):
    """A frame moved along U, and V there, as a function of both."""
    return lambda u, v: torch.cat(step(frame(n, 2, u.dtype).to(u.device), u, v)), _pair(n, 2)


SMOOTH: dict[str, Any] = {
    "butterfly": (
        lambda t, f: functional.butterfly(t, torch.ones(4, dtype=R, device=t.device), f, n=4),
        lambda dtype: (drawn(4), drawn(4, number=1) if dtype == C else None),
    ),
    "rotate_butterfly": (
        functional.rotate_butterfly,
        lambda dtype: (drawn(3, 4, dtype=dtype), drawn(4, number=1), drawn(4, number=2) if dtype == C else None),
    ),
    "brickwall": (
        lambda x, t: functional.brickwall(x, t, layers=3),
        lambda dtype: (drawn(4, 2, dtype=dtype), _angles(4, 3)),
    ),
    "cayley": (
        lambda v, f: functional.cayley(v, 3, 3, phase=f),
        lambda dtype: (drawn(skew_size(3, 3, dtype == C)), drawn(3, number=1) if dtype == C else None),
    ),
    "cayley tall": (
        lambda v, f: functional.cayley(v, 4, 2, phase=f),
        lambda dtype: (drawn(skew_size(4, 2, dtype == C)), drawn(2, number=1) if dtype == C else None),
    ),
    "cayley_retraction": _moving(functional.cayley_retraction),
    "diagonal": (lambda f: functional.diagonal(phase=f), lambda dtype: (drawn(3),)),
    "exponential": (functional.exponential, lambda dtype: (drawn(3, 3, dtype=dtype),)),
    "geodesic": _moving(functional.geodesic),
    "geodesic of few columns": _moving(functional.geodesic, n=7),
    "householder": (
        lambda v, f: functional.householder(v, 4, 2, 3, dtype=R if f is None else C, phase=f),
        lambda dtype: (drawn(trapezoid_size(4, 2, dtype == C)), drawn(3, number=1) if dtype == C else None),
    ),
    "householder of panels": (
        lambda v: functional.householder(v, 35, 34, 35)[:2],
        lambda dtype: (drawn(trapezoid_size(35, 34, False)),),
    ),
    "householder_linear": (
        lambda x, v: functional.householder_linear(x, v, 4, 2),
        lambda dtype: (drawn(3, 4, dtype=dtype), drawn(trapezoid_size(4, 2, dtype == C), number=1)),
    ),
    "inner_product": (
        lambda u, v: functional.inner_product(frame(4, 2, u.dtype).to(u.device), u, v, keepdim=True),
        _pair(4, 2),
    ),
    "hadamard_transform": (functional.hadamard_transform, lambda dtype: (drawn(2, 12, dtype=dtype),)),
    "leaky_relu": (functional.leaky_relu, lambda dtype: (drawn(5),)),
    "matrix_exp": (
        lambda v: functional.matrix_exp(v, 3, 3, v.numel() == 9),
        lambda dtype: (drawn(skew_size(3, 3, dtype == C)),),
    ),
    "matrix_exp tall": (
        lambda v: functional.matrix_exp(v, 5, 2, v.numel() == 16),
        lambda dtype: (drawn(skew_size(5, 2, dtype == C)),),
    ),
    "modrelu": (
        functional.modrelu,
        lambda dtype: (2 * torch.sgn(drawn(5, dtype=dtype)), 0.3 * torch.rand(5, dtype=R, generator=generator(1))),
    ),
    "nearest_frame": (functional.nearest_frame, lambda dtype: (frame(4, 2, dtype) @ (2 * torch.eye(2, dtype=dtype)),)),
    "nearest_frame wide": (functional.nearest_frame, lambda dtype: (2 * frame(4, 2, dtype).mH.resolve_conj(),)),
    "oplu": (functional.oplu, lambda dtype: (drawn(6),)),
    "pack_skew": (functional.pack_skew, lambda dtype: (drawn(3, 3, dtype=dtype),)),
    "pack_skew_gradient": (functional.pack_skew_gradient, lambda dtype: (drawn(3, 3, dtype=dtype),)),
    "pack_trapezoid": (functional.pack_trapezoid, lambda dtype: (drawn(4, 2, dtype=dtype),)),
    "polar_factor": (
        lambda x: functional.polar_factor(x, well_conditioned=True),
        lambda dtype: (frame(4, 2, dtype) @ (2 * torch.eye(2, dtype=dtype)),),
    ),
    "polar_retraction": _moving(functional.polar_retraction),
    "product": (functional.product, lambda dtype: (drawn(2, 3, dtype=dtype), drawn(4, 3, 2, dtype=dtype))),
    "qr_retraction": _moving(functional.qr_retraction),
    "riemannian_hessian": (
        lambda g, h: functional.riemannian_hessian(frame(4, 2, g.dtype).to(g.device), g, h, g - h),
        _pair(4, 2),
    ),
    "scan": _scan(3, "tanh"),
    "scan of many steps": _scan(9, "tanh"),
    "scan of many linear steps": _scan(9, "identity"),
    "tangent_part": (
        lambda u: functional.tangent_part(frame(4, 2, u.dtype).to(u.device), u),
        lambda dtype: (drawn(4, 2, dtype=dtype),),
    ),
    "unpack_skew": (
        lambda v: functional.unpack_skew(v, 3, 3, v.numel() == 9)[0],
        lambda dtype: (drawn(skew_size(3, 3, dtype == C)),),
    ),
    "unpack_trapezoid": (
        lambda v: functional.unpack_trapezoid(v, 4, 2, v.numel() == 14),
        lambda dtype: (drawn(trapezoid_size(4, 2, dtype == C)),),
    ),
}
"""Differentiable: the function of tensors, and what makes them, of a field."""
REAL_ONLY = {"leaky_relu", "oplu", "diagonal", "householder of panels", "scan", "scan of many steps"}

ELSEWHERE = {
    "Factored": "tests/scan/test_factored.py",
    "reflector_scan": "tests/scan/test_reflector_scan.py",
    "rotation_scan": "tests/scan/test_rotation_scan.py",
    "pick_band": "tests/parametrizations/test_cayley.py",
    "spread_band": "tests/parametrizations/test_cayley.py",
}
"""Differentiable, with their laws in a file of their own."""
TO_FIRST_ORDER = {"polish"}
"""The gradient passes straight through."""
VALUES = {
    "brickwall_inverse", "butterfly_inverse", "cayley_inverse", "cayley_increment", "geodesic_logarithm", "haar_angles",
    "haar_indices", "householder_inverse", "layer_inverse", "msign", "norms_of", "polar_increment",
    "riemannian_gradient", "skew_logarithm", "spectral_direction", "split_defect", "tall_logarithm",
}  # fmt: skip
"""Of tensors, and used for their values only."""
NO_TENSORS = {
    "Activation", "BACKENDS", "METRICS", "REFLECTOR_BACKENDS", "RETRACTIONS", "ROTATION_BACKENDS", "Tangent",
    "activations", "band_size", "find_activation", "mesh_size", "scan_backend", "skew_size", "trapezoid_size",
}  # fmt: skip


def test_every_public_name_is_in_a_row():
    rows = {name.split()[0] for name in SMOOTH} | set(ELSEWHERE) | TO_FIRST_ORDER | VALUES | NO_TENSORS
    assert rows == {*functional.__all__, *scan.__all__}


CASES = [
    pytest.param(name, dtype, id=f"{name}-{dtype}".replace("torch.", ""))
    for name in SMOOTH
    for dtype in (R, C)
    if dtype == R or name not in REAL_ONLY
]
READS = {"nearest_frame", "nearest_frame wide"}
"""Read a value, and say so."""


@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if case.values[0] not in READS])
def test_nothing_is_made_on_another_device_than_the_arguments(name, dtype):
    """The meta device has no values and mixes with no other, so that a tensor made on the CPU is told."""
    function, make = SMOOTH[name]
    here = make(dtype)
    there = [None if t is None else t.to("meta").requires_grad_() for t in here]
    value, out = function(*here), function(*there)
    assert (out.device.type, out.shape, out.dtype) == ("meta", value.shape, value.dtype)
    leaves = [t for t in there if t is not None]
    gradients = torch.autograd.grad(out, leaves, torch.empty_like(out), allow_unused=True)
    assert all(
        g is None or (g.is_meta, g.shape, g.dtype) == (True, t.shape, t.dtype)
        for g, t in zip(gradients, leaves, strict=True)
    )


TALL = {
    "brickwall_inverse": functional.brickwall_inverse,
    "cayley_inverse": functional.cayley_inverse,
    "geodesic": lambda w: functional.geodesic(w, w),
    "geodesic_logarithm": lambda w: functional.geodesic_logarithm(w, w),
    "householder_inverse": lambda w: functional.householder_inverse(w, 2),
    "layer_inverse": functional.layer_inverse,
    "riemannian_gradient": lambda w: functional.riemannian_gradient(w, w),
    "riemannian_hessian": lambda w: functional.riemannian_hessian(w, w, w, w),
    "spectral_direction": lambda w: functional.spectral_direction(w, w),
    "tall_logarithm": functional.tall_logarithm,
} | {f"{name}_retraction": lambda w, step=step: step(w, w) for name, step in functional.RETRACTIONS.items()}
"""Refuse wide matrices."""
SQUARE = {name: getattr(functional, name) for name in ("butterfly_inverse", "exponential", "skew_logarithm")}
EITHER = {name: getattr(functional, name) for name in ("msign", "nearest_frame", "polar_factor", "polish")}


@pytest.mark.parametrize("dtype", [R, C])
def test_wide_matrices_are_done_as_their_adjoint_or_refused(dtype):
    tall = frame(5, 3, dtype)
    for function in TALL.values():
        function(tall)
        for wrong in (tall.mH, tall[:, 0]):
            with pytest.raises(errors.ShapeError):
                function(wrong)
    for function in SQUARE.values():
        for wrong in (tall, tall.mH, tall[:, 0]):
            with pytest.raises(errors.ShapeError):
                function(wrong)
    for function in EITHER.values():
        near = tall * (1 + 1e-9)
        torch.testing.assert_close(function(near.mH), function(near).mH, atol=1e-15, rtol=0)
        assert (function(near.mH) - tall.mH).norm() <= 1e-14
        with pytest.raises(errors.ShapeError):
            function(tall[:, 0])


def _tensors(made):
    return [t for t in (made if isinstance(made, tuple) else (made,)) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("dtype", [R, C])
def test_a_batch_of_no_matrices_has_no_results(dtype):
    for functions, shape in ((TALL, (5, 3)), (TALL | SQUARE, (4, 4)), (EITHER, (5, 3))):
        for name, function in functions.items():
            one, none = (
                _tensors(function(w)) for w in (frame(*shape, dtype)[None], torch.empty(0, *shape, dtype=dtype))
            )
            assert [t.shape for t in none] == [(0, *t.shape[1:]) for t in one], name
            assert [t.dtype for t in none] == [t.dtype for t in one], name
    for n, p in ((4, 4), (5, 2), (9, 2), (40, 40)):
        v = torch.empty(0, skew_size(n, p, dtype == C), dtype=R, requires_grad=True)
        phase = torch.empty(0, p, dtype=R) if dtype == C else None
        for w in (functional.matrix_exp(v, n, p, dtype == C), functional.cayley(v, n, p, phase=phase)):
            assert w.shape == (0, n, p)
            assert torch.autograd.grad(w.abs().sum(), v)[0].shape == v.shape
    for w in (torch.empty(0, 5, 3, dtype=dtype), torch.empty(0, 4, 4, dtype=dtype)):
        gradient = functional.riemannian_gradient(w, w)
        for step in (functional.cayley_increment, functional.polar_increment):
            assert step(w, gradient, 0.1).shape == w.shape


REFUSED_SHAPES = {
    "brickwall of phases": lambda: functional.brickwall(drawn(4, 4, dtype=C), drawn(6), drawn(7), layers=4),
    "butterfly of six": lambda: functional.butterfly(drawn(6), drawn(6), n=6),
    "cayley": lambda: functional.cayley(drawn(7), 4, 4),
    "householder": lambda: functional.householder(drawn(10), 4, 3, 4),
    "spread_band": lambda: functional.spread_band(drawn(4), 4, 4, False, 1),
}


@pytest.mark.parametrize("call", REFUSED_SHAPES.values(), ids=REFUSED_SHAPES)
def test_another_number_of_coordinates_angles_phases_or_entries_of_a_band_is_refused(call):
    with pytest.raises(errors.ShapeError):
        call()


def test_phases_never_lose_their_imaginary_part():
    """Beside a real dtype they are refused, and a complex D makes a butterfly complex."""
    angle, phase = drawn(4), drawn(4, number=1)
    for call in (
        lambda: functional.householder(drawn(10), 4, 4, 4, phase=phase),
        lambda: functional.householder_linear(drawn(2, 4), drawn(10), 4, 4, phase=phase),
        lambda: functional.brickwall(drawn(4, 2), _angles(4, 3), _angles(4, 3), layers=3),
        lambda: functional.rotate_butterfly(drawn(3, 4), angle, phase),
        lambda: functional.butterfly(angle, drawn(4).sign(), phase, n=4, dtype=torch.float32),
        lambda: functional.butterfly(angle, functional.diagonal(phase=phase), n=4, dtype=torch.float32),
    ):
        with pytest.raises(errors.DtypeError, match="complex dtype for phases"):
            call()
    d = functional.diagonal(phase=phase)
    w = functional.butterfly(angle, d, n=4)
    real = functional.butterfly(angle, torch.ones(4, dtype=R), n=4)
    torch.testing.assert_close(w, d[:, None] * real, rtol=1e-14, atol=1e-14)
    given = (angle.clone().requires_grad_(), d.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda t, d: functional.butterfly(t, d, n=4), given, fast_mode=True)


REFUSALS = (errors.StiefelkitError, NotImplementedError, RuntimeError)


def require_said(refusal):
    assert "second derivatives" in refusal


def row(name, dtype):
    function, make = SMOOTH[name]
    made = make(dtype)
    places = [i for i, t in enumerate(made) if t is not None]

    def of_given(*given):
        full = [None] * len(made)
        for i, t in zip(places, given, strict=True):
            full[i] = t
        return function(*full)

    return of_given, [made[i].clone().requires_grad_() for i in places]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_derivatives_are_right_and_second_ones_right_or_refused(name, dtype):
    function, inputs = row(name, dtype)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    try:
        first = torch.autograd.grad(function(*inputs).abs().square().sum(), inputs, create_graph=True)
        sum(g.abs().square().sum() for g in first).backward()  # type: ignore[union-attr]
    except REFUSALS as error:
        require_said(str(error))
        return
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_hessian_products_by_torch_func_are_those_of_differences_or_refused(name, dtype):
    function, inputs = row(name, dtype)
    point = [t.detach() for t in inputs]
    along = [torch.randn(t.shape, dtype=t.dtype, generator=generator(20 + i)) for i, t in enumerate(point)]
    shape = function(*point).shape
    weight = drawn(*shape, number=11)

    def loss(*given):
        found = function(*given)
        return ((found.real + found.imag if found.is_complex() else found) * weight).sum().sin()

    gradient = torch.func.grad(loss, tuple(range(len(point))))

    def slope(*given):
        pairs = zip(gradient(*given), along, strict=True)
        return sum((g * a.conj()).real.sum() if g.is_complex() else (g * a).sum() for g, a in pairs)

    try:
        found = torch.func.grad(slope, tuple(range(len(point))))(*point)
    except REFUSALS as error:
        require_said(str(error))
        return
    h = 1e-5
    after, before = (gradient(*(t + s * a for t, a in zip(point, along, strict=True))) for s in (h, -h))
    for own, a, b in zip(found, after, before, strict=True):
        wanted = (a - b) / (2 * h)
        assert (own - wanted).norm() <= 1e-5 * (1 + wanted.norm())
