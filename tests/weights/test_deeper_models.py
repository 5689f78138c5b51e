"""Models of several layers and of both directions: beyond the papers, whose nets have one layer."""

from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit.models import sequence
from stiefelkit.nn.recurrent import Layers

BLOCKS = ("lru", "reflector", "rotrnn")  # which read one way
each_model = pytest.mark.parametrize("name", [name for name in sk.models.names() if name not in BLOCKS])


@each_model
@pytest.mark.parametrize("bidirectional", [False, True])
def test_every_model_stacks_and_trains_every_parameter(name, bidirectional):
    net: Any = sk.models.create(name, 3, 8, 5, num_layers=2, bidirectional=bidirectional, dropout=0.1)
    assert (net.rnn.num_layers, net.rnn.bidirectional, net.rnn.dropout) == (2, bidirectional, 0.1)
    net.rnn.dropout = 0.0
    x = torch.randn(2, 6, 3)
    every = net(x)
    assert every.shape == (2, 6, 5)
    assert net(x, last_only=True).shape == (2, 5)
    every.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters() if p.requires_grad)


@each_model
def test_the_last_output_is_that_of_both_ends(name):
    net: Any = sk.models.create(name, 3, 8, 5, num_layers=2, bidirectional=True)
    x = torch.randn(2, 6, 3)
    assert torch.allclose(net(x, last_only=True), _output(net, x), atol=1e-6)
    one: Any = sk.models.create(name, 3, 8, 5, num_layers=2)
    assert torch.allclose(one(x, last_only=True), one(x)[:, -1], atol=1e-6)


@each_model
def test_without_gradients_the_last_output_is_the_same_and_no_states_are_kept(name, monkeypatch):
    monkeypatch.setattr(sequence, "MIN_DROPPED_STATES", 1)
    net: Any = sk.models.create(name, 3, 8, 5, num_layers=2)
    x = torch.randn(2, 6, 3)
    kept = []
    net.rnn.register_forward_hook(lambda rnn, inputs, output: kept.append(output[0] is not None))
    with_graph = net(x, last_only=True)
    with torch.no_grad():
        assert torch.allclose(net(x, last_only=True), with_graph, atol=1e-6)
    assert kept == [True, not isinstance(net.rnn, Layers)]


def _output(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads the states that one direction has after the last step, and the other after the first."""
    states, _ = net.rnn(x)
    forth, back = states.chunk(2, dim=-1)
    ends = torch.cat([forth[:, -1], back[:, 0]], dim=-1)
    if ends.is_complex():
        ends = ends.real if net.real_part else torch.cat([ends.real, ends.imag], dim=-1)
    return net.output(ends)


@each_model
def test_further_layers_start_as_the_first_does(name):
    net: Any = sk.models.create(name, 200, 128, 2, num_layers=2, bidirectional=True)
    pairs = 0
    for key, first in net.rnn.named_parameters(recurse=False):
        if not key.endswith("_l0"):
            continue
        for suffix in ("_l0_reverse", "_l1", "_l1_reverse"):
            other = net.rnn.get_parameter(key.removesuffix("_l0") + suffix)
            # Fan-in and fan-out are of another size in the second layer.
            assert other.abs().mean().item() == pytest.approx(first.abs().mean().item(), rel=0.35)
            pairs += 1
    assert pairs >= 3


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_stacked_frame_gates_are_torchs_kernel(name):
    net: Any = sk.models.create(name, 3, 4, 2, parametrization="cayley", num_layers=2, bidirectional=True)
    kind = nn.LSTM if name == "lstm" else nn.GRU
    twin = kind(3, 4, 2, batch_first=True, bidirectional=True)
    with torch.no_grad():
        for key, p in twin.named_parameters():
            p.zero_() if key.startswith("bias_hh") else p.copy_(getattr(net.rnn, key).reshape(p.shape))
    x = torch.randn(2, 6, 3)
    ours, torchs = net.rnn(x), twin(x)
    assert torch.allclose(ours[0], torchs[0], atol=1e-6)
    assert "batch_first=True, num_layers=2, bidirectional=True" in repr(net.rnn)
    assert len(sk.drift(net)) == 4
