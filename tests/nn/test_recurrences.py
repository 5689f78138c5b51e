"""Who takes part in the race of the scan computes what it says, from the draws that the help names."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stiefelkit import errors
from stiefelkit.measuring.plans import ScanCase, ScanRace
from stiefelkit.measuring.scan import (
    LOOP,
    LOSSES,
    Sequences,
    backward,
    fast_backends,
    limit,
    ours,
    races,
    recurrence_peers,
)
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.scan import activations, find_activation
from stiefelkit.testing import seeds

REAL = ScanCase("real", T=6, n=4, B=3, m=2, matched=5)
COMPLEX = ScanCase("complex", T=5, n=4, B=3, is_complex=True)


def plan(**changes) -> ScanRace:
    return ScanRace(**{"seed": seeds.seed(), "cases": (REAL,), "repeats": 2, "seconds": 1e-3, "peers": True, **changes})


def float64(case: ScanCase, activation: str = "modrelu") -> Sequences:
    return Sequences(case, activation, torch.float64)


@pytest.mark.parametrize("case", [REAL, COMPLEX])
def test_weights_are_drawn_as_the_help_says(case):
    drawn = Sequences(dataclasses.replace(case, n=300))
    assert orthogonality_error(drawn.w) <= 1.2 * rounding_limit(300, drawn.w.dtype) + torch.finfo(torch.float32).eps
    assert drawn.bias.abs().max() <= 0.01
    assert bool((drawn.bias > 0).any()) == case.is_complex
    assert drawn.x.shape == (case.T, case.B, case.m)
    assert not drawn.x.requires_grad
    assert not drawn.h0.any()
    g = drawn.gradient(300, drawn.w.dtype)
    assert g is drawn.gradient(300, drawn.w.dtype)
    assert 0.9 < g.abs().square().mean() * 300 < 1.1
    assert torch.equal(Sequences(dataclasses.replace(case, n=300)).w, drawn.w)


@pytest.mark.parametrize("activation", activations.names())
@pytest.mark.parametrize("case", [REAL, COMPLEX])
def test_our_scan_and_the_loop_compute_the_same_states_and_gradients(case, activation):
    if case.is_complex and find_activation(activation, False).of_complex() is None:
        return
    drawn = float64(case, activation)
    entries = {name: enter(drawn) for name, enter in ours(["reference", *fast_backends(drawn)]).items()}
    entries[LOOP] = recurrence_peers[LOOP](drawn)
    for loss in LOSSES:
        found = {name: backward(entry, drawn, loss)() for name, entry in entries.items()}
        for name, gradients in found.items():
            assert len(gradients) == 3
            for one, other in zip(gradients, found[LOOP], strict=True):
                assert torch.allclose(one, other, rtol=1e-9, atol=1e-12), (name, loss)
    for entry in entries.values():
        assert torch.allclose(entry.sequence()[-1], entry.last_state())
        assert [tuple(p.shape) for p in entry.parameters] == [(4, 4), (4, case.m), (4,)]


@pytest.mark.parametrize("case", [REAL, COMPLEX])
def test_torchs_layers_have_as_many_units_as_a_state_has_numbers_or_as_the_papers_match(case):
    drawn = float64(case)
    widths = {"torch_rnn": 4, "torch_lstm": 4} if case is REAL else {"torch_rnn": 8, "torch_lstm": 8}
    widths |= {"torch_lstm_matched": 5} if case is REAL else {}
    for name, width in widths.items():
        entry = recurrence_peers[name](drawn)
        assert (entry.width, entry.dtype) == (width, torch.float64)
        assert entry.sequence().shape == (case.T, case.B, width)
        assert torch.equal(entry.sequence()[-1], entry.last_state())
        assert all(g.isfinite().all() for loss in LOSSES for g in backward(entry, drawn, loss)())
    if case is COMPLEX:
        with pytest.raises(errors.OptionError, match="LSTM"):
            recurrence_peers["torch_lstm_matched"](drawn)


def test_torchs_rnn_takes_the_activation_if_it_has_it():
    for activation, nonlinearity in (("relu", torch.relu), ("tanh", torch.tanh), ("modrelu", torch.tanh)):
        drawn = float64(dataclasses.replace(REAL, T=1), activation)
        entry = recurrence_peers["torch_rnn"](drawn)
        u, _, b, c = entry.parameters
        assert torch.allclose(entry.sequence()[0], nonlinearity(drawn.x[0] @ u.mT + b + c))


class Products(TorchDispatchMode):
    """Counts matrix products by their sizes."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if name in ("addmm", "addmm_", "mm"):
            a, b = args[-2:]
            self.seen[(a.shape[0], a.shape[1], b.shape[1])] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", [REAL, COMPLEX])
def test_the_limit_is_the_products_that_no_scan_can_do_without(case):
    n, rows = 4 * (1 + case.is_complex), case.T * case.B
    run = limit(Sequences(case))
    with Products() as products:
        run()
        run()
    assert products.seen == {(case.B, n, n): 4 * case.T, (n, rows, n): 2}


def test_the_backends_that_race_are_the_fast_ones_that_can():
    assert fast_backends(Sequences(REAL)) == ["inplace"]
    (race,) = races(plan(backends=("reference", "triton", "inplace"), peers=False))
    assert {row.name for row in race.rows} == {"scan (reference)", "scan (reference), last state", "scan (inplace)"}
    assert "GPU" in race.left_out["scan (triton)"]
