"""Activations: the laws, what one more costs, plugins, and what the kernels refuse."""

from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stiefelkit import errors, registry
from stiefelkit.nn import GORU, OrthogonalRNN, OrthogonalRNNCell
from stiefelkit.scan import Activation, activations, find_activation, scan, scan_backend
from stiefelkit.scan.checks import Recurrence, Tensors
from stiefelkit.scan.engines import triton
from stiefelkit.scan.engines.problem import Outcome, Problem
from stiefelkit.scan.engines.triton import Triton
from stiefelkit.testing import ACTIVATION_LAWS, LawBroken, check_activation

DOUBLE = torch.float64


class Softsign(Activation):
    """z / (1 + |z|), whose derivative is (1 - |h|)^2: all that a new activation has to say."""

    def function(self, z):
        return z / (1 + z.abs())

    def step(self, like, bias):
        return lambda z, saved: z.div_(z.abs().add_(1))

    def factors(self, h, saved):
        return ((1 - h.abs()).square_(),)


class Shifted(Softsign):
    """Softsign of z + b, with the bias inside."""

    bias_inside = True

    def function(self, z, b):
        return super().function(z + b)

    def step(self, like, bias):
        apply = super().step(like, bias)
        return lambda z, saved: apply(z.add_(bias), saved)

    def bias_gradient(self, h, delta):
        return delta


class OffStep(Softsign):
    """A step that is another function."""

    def step(self, like, bias):
        return lambda z, saved: z.tanh_()


class NoFactors(Softsign):
    """A derivative of 1."""

    def factors(self, h, saved):
        return ()


class WrongSign(Shifted):
    """The gradient by the bias with the wrong sign."""

    def bias_gradient(self, h, delta):
        return -delta


class Detached(Softsign):
    """A function that leaves a part out of its derivative."""

    def function(self, z):
        return z / (1 + z.detach().abs())


class NaNAtZero(Softsign):
    """0 / 0 at z = 0."""

    def function(self, z):
        return z * z.abs() / (z.abs() + z.square())


@pytest.fixture
def own(monkeypatch):
    """A table of names of this test's own."""
    monkeypatch.setattr(activations, "_activations", activations._activations.copy())
    monkeypatch.setattr(activations, "_by_name", {})
    monkeypatch.setattr(activations, "_learnt", SimpleNamespace())
    for cls in (Softsign, Shifted, OffStep, NoFactors, WrongSign, Detached, NaNAtZero):
        activations.register(cls.__name__.lower(), cls)


@pytest.mark.parametrize("name", [*activations.names(), "leaky_relu(0.3)", "modrelu_epsilon(0.01)"])
def test_every_activation_keeps_the_laws(name):
    check_activation(name)


@pytest.mark.parametrize("name", ["softsign", "shifted"])
@pytest.mark.usefixtures("own")
def test_another_activation_is_a_class_and_a_line_and_keeps_the_laws(name):
    check_activation(name)


@pytest.mark.parametrize(
    ("name", "law"),
    [("offstep", "step"), ("nofactors", "derivative"), ("wrongsign", "derivative"), ("nanatzero", "zero")],
)
@pytest.mark.usefixtures("own")
def test_each_law_of_activations_catches_one_that_breaks_it(name, law):
    with pytest.raises(LawBroken) as caught:
        check_activation(name)
    assert law in {failure.law for failure in caught.value.failures}
    assert "check_activation(" in str(caught.value)


@pytest.mark.usefixtures("own")
def test_a_loop_whose_derivative_is_wrong_fails_gradcheck():
    with pytest.raises(LawBroken, match=r"^scan: .*the loop fails gradcheck, Jacobian mismatch"):
        check_activation("detached", ["scan"])


def test_the_laws_of_activations_know_their_names():
    assert set(ACTIVATION_LAWS) == {"step", "derivative", "scan", "zero"}
    with pytest.raises(errors.UnknownNameError, match='did you mean "step"'):
        check_activation("tanh", ["stepp"])


@pytest.mark.parametrize("backend", ["reference", "inplace"])
def test_an_installed_plugin_runs_through_the_layers(backend, monkeypatch):
    table = registry.Registry("stiefelkit.activations", "activation", activations._activations._targets)
    monkeypatch.setattr(activations, "_activations", table)
    monkeypatch.setattr(activations, "_by_name", {})
    point = EntryPoint("softsign", f"{__name__}:Softsign", "stiefelkit.activations")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert "softsign" in activations.names()
    rnn: Any = OrthogonalRNN(2, 3, activation="softsign", backend=backend, dtype=DOUBLE)
    x = torch.randn(4, 2, 2, dtype=DOUBLE, requires_grad=True)

    def last(x, *weights):
        return torch.func.functional_call(rnn, dict(zip(dict(rnn.named_parameters()), weights, strict=True)), (x,))[1]

    assert torch.autograd.gradcheck(last, (x, *rnn.parameters()), fast_mode=True)
    assert OrthogonalRNNCell(2, 3, activation="softsign")(torch.ones(1, 2)).abs().max() < 1
    gated: Any = GORU(2, 3, activation="softsign")
    assert gated(torch.ones(9, 1, 2))[0].abs().max() < 1
    with pytest.raises(
        errors.DtypeError, match=r"an activation in \['identity', 'modrelu', 'modrelu_epsilon'\], got 'softsign'"
    ):
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
    reason = triton.unsupported(cuda, torch.float32, 8, find_activation("softsign", False))
    assert reason == "an activation that its programs have, got 'softsign'"
    with pytest.raises(
        errors.OptionError, match=r"'triton' needs an activation that its programs have, got 'softsign'"
    ):
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
    recurrence = Recurrence("softsign", None, False, False, False, "triton")
    p = Problem(recurrence, Tensors(z, torch.eye(4), torch.zeros(1, 4)))
    with pytest.raises(Exception, match="without a branch"):
        Triton().forward(p, True)
    with pytest.raises(Exception, match="without a branch"):
        Triton().deltas(p, Outcome(z, p.saved_like(True), z, None))


@pytest.mark.usefixtures("own")
def test_what_is_no_activation_or_a_name_that_is_taken_is_refused():
    with pytest.raises(errors.OptionError, match=r"subclass of Activation, got <function tanh|got <built-in"):
        activations.register("other", torch.tanh)  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="taken"):
        activations.register("tanh", Softsign)
    with pytest.raises(errors.OptionError, match="needs function, got Half without"):
        activations.register("half", type("Half", (Activation,), {"step": None, "factors": None}))
