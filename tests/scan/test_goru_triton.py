"""The Triton programs of the gated recurrence, in triton's interpreter, against the loop in float64."""

from typing import Any

import pytest
import torch

from stiefelkit import errors
from stiefelkit.scan import goru_scan

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def tensors(n, batch, steps, sizes=None, m=2):
    shapes = {
        "x": (steps, batch, m) if sizes is None else (sum(sizes), m),
        "h0": (batch, n),
        "q": (n, n),
        "w": (2 * n, n),
        "u": (3 * n, m),
        "bias": (2 * n,),
        "activation_bias": (n,),
    }
    given = {name: torch.randn(shape) for name, shape in shapes.items()}
    return given | {"q": torch.linalg.qr(given["q"])[0].contiguous(), "w": given["w"] / n**0.5}


def check(activation, n, steps=3, batch=2, sizes=None, with_out=True, with_last=True, **options):
    """States and all gradients are those of autograd through the loop in float64."""
    batch = batch if sizes is None else sizes[0]
    given = tensors(n, batch, steps, sizes)
    cotangents: Any = None

    def run(backend, to):
        nonlocal cotangents
        leaves = {name: to(t).requires_grad_() for name, t in given.items()}
        results = goru_scan(**leaves, activation=activation, batch_sizes=sizes, backend=backend, **options)
        kept = [t for t, is_asked in zip(results, (with_out, with_last), strict=True) if t is not None and is_asked]
        cotangents = cotangents or [torch.randn_like(t) for t in kept]
        outside = [g.to(t) for g, t in zip(cotangents, kept, strict=True)]
        return [*(t for t in results if t is not None), *torch.autograd.grad(kept, list(leaves.values()), outside)]

    for found, exact in zip(run("triton", torch.clone), run("reference", torch.Tensor.double), strict=True):
        assert found.dtype == torch.float32
        assert (found - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("activation", ["identity", "tanh", "relu", "leaky_relu", "abs", "oplu", "modrelu"])
def test_states_and_gradients_are_those_of_the_loop(activation):
    check(activation, 6)


@pytest.mark.parametrize("n", [1, 32, 33, 63, 64, 65, 127, 128])
def test_vectors_end_where_units_end(n):
    check("modrelu", n, steps=2, batch=1)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("activation", ["oplu", "modrelu"])
def test_sequences_of_different_lengths_begin_and_end_at_their_own_steps(activation, reverse):
    check(activation, 4, sizes=[4, 4, 3, 1], reverse=reverse)


@pytest.mark.parametrize("with_out", [False, True])
def test_gradients_from_outputs_or_from_last_states_alone(with_out):
    check("tanh", 5, with_out=with_out, with_last=not with_out, reverse=with_out)


@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (1, 17), (5, 3)])
def test_edges_of_steps_and_batches(steps, batch):
    check("modrelu", 3, steps, batch)


def test_the_last_states_alone():
    check("modrelu", 4, steps=5, last_only=True)


def test_more_units_than_registers_hold_are_refused():
    with pytest.raises(errors.OptionError, match="'triton' needs at most 128 units, got 129"):
        check("modrelu", 129)
