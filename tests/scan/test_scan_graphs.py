"""The scan with captured chunks: on the CPU, a stand-in for the graph that runs the captured function again."""

import functools
from typing import Any

import pytest
import torch

from stiefelkit.scan.checks import PLAIN, Recurrence
from stiefelkit.scan.engines.graphs import GraphLoops, Graphs
from stiefelkit.scan.engines.inplace import InPlace
from stiefelkit.scan.engines.problem import Outcome, Problem
from stiefelkit.testing import seeds

NAMES = ("x", "w", "h0", "u", "bias", "activation_bias")


def stand_in(captured):
    """A capture that counts, and whose replays fill the tensors of the first run."""

    def capture(run, device):
        captured.append(device)
        results = run()

        def replay():
            for kept, new in zip(results, run(), strict=True):
                kept.copy_(new)

        return replay, results

    return capture


def problem(dtype, activation, reverse=False, steps=8, batch=4, n=6, sizes=None):
    def random(*shape, dtype=dtype):
        return torch.randn(shape, dtype=dtype)

    x = random(steps, batch, 3) if sizes is None else random(sum(sizes), 3)
    b = random(n, dtype=dtype.to_real()) if activation == "modrelu" else None
    w = torch.linalg.qr(random(n, n))[0]
    recurrence = Recurrence(PLAIN, activation, sizes, reverse, False, False, "cuda_graphs")
    return Problem(recurrence, x, w, random(batch, n), random(n, 3), random(n), b)


def results(engine, p):
    """States and gradients, the latter from random ones by states and last states and from the last alone."""
    out, last, saved = engine.forward(p, True)
    seeds.reseed(3)
    g_out, g_last = torch.randn_like(out), torch.randn_like(last)
    for outer in (g_out, None):
        found = engine.backward(p, Outcome(out, saved, outer, g_last), [t is not None for t in _arguments(p)])
        yield from (getattr(found, name) for name in NAMES)
    yield from (out, last, saved)


def _arguments(p) -> list[Any]:
    return [p.x, p.w, p.h0, p.u, p.bias, p.activation_bias]


@pytest.fixture
def _three_steps(monkeypatch):
    monkeypatch.setattr("stiefelkit.scan.engines.problem.CHUNK_BYTES", 1)
    monkeypatch.setattr("stiefelkit.scan.engines.problem.CHUNK_ROWS", 12)


def same(found, expected):
    return all(
        (a is b is None) or (a is not None and b is not None and torch.allclose(a, b, rtol=1e-12, atol=1e-12))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("dtype", "activation"),
    [
        *((torch.float64, name) for name in ("identity", "tanh", "relu", "leaky_relu(0.3)", "abs", "oplu", "modrelu")),
        *((torch.complex128, name) for name in ("identity", "modrelu")),
    ],
)
@pytest.mark.usefixtures("_three_steps")
def test_replays_on_other_tensors_are_the_steps_themselves(dtype, activation, reverse):
    captured = []
    graphs = Graphs(stand_in(captured))
    engine = InPlace(functools.partial(GraphLoops, graphs=graphs))
    for _ in range(3):
        p = problem(dtype, activation, reverse)
        assert [chunk.steps for chunk in p.chunks] == ([2, 3, 3] if reverse else [3, 3, 2])
        assert same(results(engine, p), results(InPlace(), p))
    # Forward, back with gradients by all states, back without.
    assert len(captured) == len(graphs) == 3


@pytest.mark.usefixtures("_three_steps")
def test_results_are_not_overwritten_by_the_next_replay():
    engine = InPlace(functools.partial(GraphLoops, graphs=Graphs(stand_in([]))))
    p = problem(torch.float64, "tanh")
    first = list(results(engine, p))
    kept = [None if t is None else t.clone() for t in first]
    list(results(engine, problem(torch.float64, "tanh")))
    assert same(first, kept)


@pytest.mark.usefixtures("_three_steps")
def test_shapes_that_may_not_come_again_are_not_captured():
    captured = []
    engine = InPlace(functools.partial(GraphLoops, graphs=Graphs(stand_in(captured))))
    for p in (
        problem(torch.float64, "tanh", steps=2),
        problem(torch.float64, "tanh", sizes=[4, 4, 4, 4, 4, 4, 2, 2, 1]),
    ):
        assert same(results(engine, p), results(InPlace(), p))
    assert not captured


@pytest.mark.usefixtures("_three_steps")
def test_the_least_recently_used_graph_is_dropped():
    captured = []
    graphs = Graphs(stand_in(captured), most=2)
    engine = InPlace(functools.partial(GraphLoops, graphs=graphs))

    def run(n):
        engine.forward(problem(torch.float64, "tanh", n=n), False)
        return len(captured)

    assert [run(n) for n in (4, 5, 4, 6, 4, 5)] == [1, 2, 2, 3, 3, 4]
    assert len(graphs) == 2


@pytest.mark.usefixtures("_three_steps")
def test_graphs_made_in_inference_mode_serve_outside_it():
    engine = InPlace(functools.partial(GraphLoops, graphs=Graphs(stand_in([]))))
    with torch.inference_mode():
        engine.forward(problem(torch.float64, "modrelu"), True)
    p = problem(torch.float64, "modrelu")
    assert same(engine.forward(p, True), InPlace().forward(p, True))
