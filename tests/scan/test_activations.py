"""Activations: what one more costs, and what the kernels refuse."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_laws_of_activations import Softsign

from stiefelkit import errors
from stiefelkit.nn import GORU, OrthogonalRNN, OrthogonalRNNCell
from stiefelkit.scan import Activation, activations, find_activation, scan, scan_backend
from stiefelkit.scan.checks import Recurrence, Tensors
from stiefelkit.scan.engines import triton
from stiefelkit.scan.engines.problem import Outcome, Problem
from stiefelkit.scan.engines.triton import Triton

DOUBLE = torch.float64


@pytest.fixture
def own(monkeypatch):
    """Gives a test a table of names of its own, with softsign in it."""
    monkeypatch.setattr(activations, "_activations", activations._activations.copy())
    monkeypatch.setattr(activations, "_by_name", {})
    monkeypatch.setattr(activations, "_found", SimpleNamespace())
    activations.register("softsign", Softsign)


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
    recurrence = Recurrence("softsign", None, False, False, False, "triton")
    p = Problem(recurrence, Tensors(z, torch.eye(4), torch.zeros(1, 4)))
    with pytest.raises(Exception, match="without a branch"):
        Triton().forward(p, True)
    with pytest.raises(Exception, match="without a branch"):
        Triton().deltas(p, Outcome(z, p.saved_like(True), z, None))


@pytest.mark.usefixtures("own")
def test_what_is_no_activation_or_a_name_that_is_taken_is_refused():
    with pytest.raises(errors.OptionError, match="subclass"):
        activations.register("other", torch.tanh)  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="taken"):
        activations.register("tanh", Softsign)
    with pytest.raises(errors.OptionError, match="function"):
        activations.register("half", type("Half", (Activation,), {"step": None, "factors": None}))
