"""Every activation keeps the laws of activations, each of which has a saboteur; what one more activation costs."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from stiefelkit import errors
from stiefelkit.nn import GORU, OrthogonalRNN, OrthogonalRNNCell
from stiefelkit.scan import Activation, activations, find_activation, scan, scan_backend
from stiefelkit.scan.activations import in_place
from stiefelkit.scan.checks import Recurrence, Tensors
from stiefelkit.scan.engines import triton
from stiefelkit.scan.engines.problem import Outcome, Problem
from stiefelkit.scan.engines.triton import Triton

DOUBLE = torch.float64
UNITS = 4
CHUNK = (3, 2)
"""Steps and sequences."""


class Drawn:
    """Pre-activations of a chunk, the values of the function, and those of the step."""

    def __init__(self, act: Activation, dtype: torch.dtype, scale: float = 1.0):
        self.act = act
        self.z = (scale * torch.randn(*CHUNK, UNITS, dtype=dtype)).requires_grad_()
        self.bias = (0.5 * torch.randn(UNITS, dtype=torch.float64)).requires_grad_() if act.bias_inside else None
        self.inner = () if self.bias is None else (self.bias,)
        self.h = act.function(self.z, *self.inner)

    @torch.no_grad()
    def stepped(self, is_careful: bool = False) -> tuple[Tensor, Tensor]:
        """Returns states by the step in place, and what it saved."""
        states = rows(self.z).clone()
        width, dtype = self.act.saved_like(UNITS, self.z.dtype)
        saved = states.new_empty(*states.shape[:-1], width, dtype=dtype)
        loop = (self.act.careful if is_careful else self.act.loop)(states[0], self.bias)
        loop(self.act.views(states, saved), states[0], lambda z, h: None)
        return states, saved


def law_loop(act: Activation, dtype: torch.dtype) -> None:
    """The loop in place, the careful one and the function of rows give the values of the function."""
    for scale in (1.0, 1e-3, 1e3):
        drawn = Drawn(act, dtype, scale)
        for is_careful in (False, True):
            require_near(drawn.stepped(is_careful)[0], rows(drawn.h))
        require_near(act.of_rows(rows(drawn.z), *drawn.inner), rows(drawn.h))


def law_derivative(act: Activation, dtype: torch.dtype) -> None:
    """The factors and the gradient by a bias inside are the derivative of the function."""
    drawn = Drawn(act, dtype)
    g = torch.randn_like(drawn.z)
    exact = torch.autograd.grad(drawn.h, (drawn.z, *drawn.inner), g)
    h, saved = drawn.stepped()
    delta, factors = rows(g), act.factors(h, saved)
    if len(factors) == 2:
        delta = factors[0] * delta + factors[1].repeat(1, 1, 2) * delta.roll(delta.shape[-1] // 2, -1)
    elif factors:
        delta = factors[0] * delta
    require_near(delta, rows(exact[0]))
    if drawn.bias is not None:
        require_near(act.bias_gradient(h, saved, delta).sum((0, 1)), exact[1])


def law_scan(act: Activation, dtype: torch.dtype) -> None:
    """States and gradients in place are those of the loop, which has the gradients of finite differences."""
    x, h0 = torch.randn(*CHUNK, UNITS, dtype=dtype), torch.randn(2, UNITS, dtype=dtype)
    w = torch.linalg.qr(torch.randn(UNITS, UNITS, dtype=dtype))[0]
    bias = 0.5 * torch.randn(UNITS, dtype=torch.float64)
    x, w, h0, bias = leaves = [t.contiguous().requires_grad_() for t in (x, w, h0, bias)]

    def states(x: Tensor, w: Tensor, h0: Tensor, bias: Tensor, backend: str = "reference") -> Any:
        return scan(x, w, h0, activation=act.name, activation_bias=bias, backend=backend)[0]

    assert torch.autograd.gradcheck(states, leaves, fast_mode=True)
    g = torch.randn(3, 2, UNITS, dtype=dtype)
    loop, inplace = states(x, w, h0, bias), states(x, w, h0, bias, backend="inplace")
    require_near(inplace, loop)
    for a, b in zip(*(torch.autograd.grad(out, leaves, g) for out in (inplace, loop)), strict=True):
        require_near(a, b)


def law_zero(act: Activation, dtype: torch.dtype) -> None:
    """Values and gradients at z = 0 are finite, and those of the loop."""
    zero, w, b = (
        torch.zeros(1, 1, UNITS, dtype=dtype),
        torch.eye(UNITS, dtype=dtype),
        torch.full((UNITS,), 0.25).double(),
    )
    for bias in (b, -b) if act.bias_inside else (None,):
        results = []
        for backend in ("inplace", "reference"):
            leaf = zero.clone().requires_grad_()
            last = scan(leaf, w, zero[0], activation=act.name, activation_bias=bias, backend=backend)[1]
            results.append((last, torch.autograd.grad(last.real.sum(), leaf)[0]))
        for inplace, loop in zip(*results, strict=True):
            assert torch.isfinite(rows(loop)).all()
            require_near(inplace, loop)


LAWS = {name.removeprefix("law_"): law for name, law in vars().copy().items() if name.startswith("law_")}


def rows(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], -1) if z.is_complex() else z


def require_near(value: Tensor, exact: Tensor) -> None:
    off = (rows(value) - rows(exact)).abs() / rows(exact).abs().clamp(min=1)
    assert off.max() <= 1e-12


def check(name: str, law: str) -> None:
    for dtype in (torch.float64, torch.complex128):
        if not dtype.is_complex or find_activation(name, False).of_complex() is not None:
            LAWS[law](find_activation(name, dtype.is_complex), dtype)


class Softsign(Activation):
    """z / (1 + |z|), whose derivative is (1 - |h|)^2: all that a new activation has to say."""

    def function(self, z):
        return z / (1 + z.abs())

    def loop(self, like, bias):
        return in_place(lambda z: z.div_(z.abs().add_(1)))

    def factors(self, h, saved):
        return ((1 - h.abs()).square_(),)


class Shifted(Softsign):
    """Softsign of z + b, with the bias inside."""

    bias_inside = True

    def function(self, z, b):
        return super().function(z + b)

    def loop(self, like, bias):
        return in_place(lambda z: z.add_(bias).div_(z.abs().add_(1)))

    def bias_gradient(self, h, saved, delta):
        return delta


class OffStep(Softsign):
    """Has a step that is another function."""

    def loop(self, like, bias):
        return in_place(torch.tanh_)


class NoFactors(Softsign):
    """Has a derivative of 1."""

    def factors(self, h, saved):
        return ()


class WrongSign(Shifted):
    """Has the gradient by the bias with the wrong sign."""

    def bias_gradient(self, h, saved, delta):
        return -delta


class Detached(Softsign):
    """Leaves a part out of its derivative."""

    def function(self, z):
        return z / (1 + z.detach().abs())


class NaNAtZero(Softsign):
    """Has 0 / 0 at z = 0."""

    def function(self, z):
        return z * z.abs() / (z.abs() + z.square())


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", [*activations.names(), "leaky_relu(0.3)", "modrelu_epsilon(0.01)"])
def test_every_activation_keeps_the_laws(name, law):
    check(name, law)


@pytest.fixture
def own(monkeypatch):
    """Gives a test a table of names of its own, with softsign in it."""
    monkeypatch.setattr(activations, "_activations", copy.deepcopy(activations._activations))
    monkeypatch.setattr(activations, "_by_name", {})
    monkeypatch.setattr(activations, "_found", SimpleNamespace())
    activations.register("softsign", Softsign)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("cls", [Softsign, Shifted])
@pytest.mark.usefixtures("own")
def test_another_activation_is_a_class_and_a_line_and_keeps_the_laws(cls, law):
    activations.register("another", cls)
    check("another", law)


SABOTEURS = [
    (OffStep, "loop"),
    (NoFactors, "derivative"),
    (WrongSign, "derivative"),
    (Detached, "scan"),
    (NaNAtZero, "zero"),
]


@pytest.mark.parametrize(("cls", "law"), SABOTEURS)
@pytest.mark.usefixtures("own")
def test_the_law_catches_its_saboteur(cls, law):
    activations.register("wrong", cls)
    with pytest.raises((AssertionError, GradcheckError)):
        check("wrong", law)


def test_every_law_has_a_saboteur():
    assert {law for _, law in SABOTEURS} == set(LAWS)


@pytest.mark.parametrize("backend", ["reference", "inplace"])
@pytest.mark.usefixtures("own")
def test_a_registered_activation_runs_through_the_layers(backend):
    rnn: Any = OrthogonalRNN(2, 3, activation="softsign", backend=backend, dtype=DOUBLE)
    x = torch.randn(4, 2, 2, dtype=DOUBLE, requires_grad=True)

    def last(x, *weights):
        return torch.func.functional_call(rnn, dict(zip(dict(rnn.named_parameters()), weights, strict=True)), (x,))[1]

    assert torch.autograd.gradcheck(last, (x, *rnn.parameters()), fast_mode=True)
    assert OrthogonalRNNCell(2, 3, activation="softsign")(torch.ones(1, 2)).abs().max() < 1
    gated: Any = GORU(2, 3, activation="softsign")
    assert gated(torch.ones(9, 1, 2))[0].abs().max() < 1
    with pytest.raises(errors.DtypeError, match="modrelu_epsilon"):
        OrthogonalRNN(2, 3, activation="softsign", field="complex")


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_an_activation_that_only_traced_code_asks_for_is_found():
    w, h0 = torch.eye(3), torch.zeros(2, 3)

    def last(x):
        return scan(x, w, h0, activation="softsign", backend="inplace")[1]

    x = torch.randn(9, 2, 3)
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(last, fullgraph=True, backend="aot_eager")(x), last(x))


@pytest.mark.usefixtures("own")
def test_kernels_refuse_an_activation_that_they_do_not_know():
    cuda = torch.device("cuda")
    assert triton.unsupported(cuda, torch.float32, 8, find_activation("softsign", False))
    with pytest.raises(errors.OptionError, match="softsign"):
        scan_backend(torch.eye(4), activation="softsign", backend="triton")


def test_every_activation_that_comes_with_the_package_is_known_to_the_kernels():
    for name in activations.names():
        cls = type(find_activation(name, False))
        if name == "modrelu_epsilon":  # every other backend runs it
            continue
        assert cls.kernel
        assert cls.of_complex() is None or cls.of_complex().kernel  # type: ignore[union-attr]


@pytest.mark.usefixtures("own")
def test_an_activation_that_a_program_has_no_branch_for_does_not_run_as_another(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(Softsign, "kernel", "softsign")
    z = torch.ones(2, 1, 4)
    recurrence = Recurrence("softsign", None, False, False, "triton")
    p = Problem(recurrence, Tensors(z, torch.eye(4), torch.zeros(1, 4)))
    with pytest.raises(Exception, match="branch"):
        Triton().forward(p, True)
    with pytest.raises(Exception, match="branch"):
        Triton().backward(p, Outcome(z, p.saved_like(True), z, None), [True] * 6)


@pytest.mark.usefixtures("own")
def test_what_is_no_activation_or_a_name_that_is_taken_is_refused():
    with pytest.raises(errors.OptionError, match="subclass"):
        activations.register("other", torch.tanh)  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="taken"):
        activations.register("tanh", Softsign)
    with pytest.raises(errors.OptionError, match="function"):
        activations.register("half", type("Half", (Activation,), {"loop": None, "factors": None}))
