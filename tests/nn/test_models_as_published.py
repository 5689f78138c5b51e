"""Every model starts, and moves its states, as its paper or its code does."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit.testing import seeds


def test_ornn_starts_as_its_code_does():
    net: Any = sk.models.create("ornn", 2, 10, 3, reflections=4)
    rnn = net.rnn
    u = sk.functional.unpack_trapezoid(rnn.parametrizations.weight_hh_l0.reflectors.detach(), 10, 4, False)
    assert torch.allclose(torch.linalg.vector_norm(u, dim=0), torch.ones(4))
    assert rnn.parametrizations.weight_hh_l0.signs.tolist() == [1] * 10
    eye, w = torch.eye(10), torch.eye(10)
    for j in range(4):
        w = w @ (eye - 2 * torch.outer(u[:, j], u[:, j]))
    assert torch.allclose(rnn.weight_hh_l0, w, atol=1e-6)
    assert torch.equal(rnn.bias_l0, torch.zeros(10))
    assert 0.05 < rnn.h0_l0.abs().max() <= math.sqrt(3 / 20)
    assert rnn.activation == "leaky_relu"


def test_the_last_of_n_reflectors_of_ornn_is_a_random_sign():
    seen = set()
    for seed in range(8):
        seeds.reseed(seed)
        net: Any = sk.models.create("ornn", 1, 6, 1)
        coordinate_list = net.rnn.parametrizations.weight_hh_l0
        u = sk.functional.unpack_trapezoid(coordinate_list.reflectors.detach(), 6, 6, False)
        assert coordinate_list.signs.tolist()[:5] == [1] * 5
        # Five reflections have determinant -1; the paper's last factor is the single entry.
        assert torch.linalg.det(net.rnn.weight_hh_l0).sign() == -u[5, 5].sign()
        seen.add(u[5, 5].item())
    assert len(seen) == 2


def test_eurnn_starts_as_its_code_does_and_reads_the_real_part():
    net: Any = sk.models.create("eurnn", 2, 8, 3, layers=2)
    rnn = net.rnn
    for angles in rnn.parametrizations.weight_hh_l0.coordinates.values():
        assert 1 < angles.abs().max() <= math.pi
    assert 0 < rnn.weight_ih_l0.abs().max() <= 0.01
    assert torch.equal(rnn.bias_l0, torch.zeros(8))
    assert not rnn.trainable_h0
    x = torch.randn(2, 5, 2)
    assert torch.allclose(net(x), net.output(rnn(x)[0].real))
    assert torch.equal(net.output.bias, torch.zeros(3))
    theirs: Any = sk.models.create("eurnn", 2, 200, 3, layers=2, output_init="authors")
    assert math.sqrt(6 / 203) < theirs.output.weight.abs().max() <= math.sqrt(6 / 5)
    assert torch.equal(theirs.output.bias, torch.full((3,), 0.01))


def test_exprnn_starts_as_its_code_does():
    net: Any = sk.models.create("exprnn", 2, 200, 100)
    rnn = net.rnn
    w = rnn.weight_hh_l0
    blocks = torch.block_diag(*(w[i : i + 2, i : i + 2] for i in range(0, 200, 2)))
    assert torch.equal(w, blocks)
    assert torch.linalg.eigvals(w).angle().abs().max() > 3
    assert rnn.weight_ih_l0.std().item() == pytest.approx(1, rel=0.2)
    assert net.output.weight.std().item() == pytest.approx(0.1, rel=0.2)
    assert 0 < rnn.bias_l0.abs().max() <= 0.01
    assert not rnn.trainable_h0


def test_restricted_urnn_starts_as_its_code_does():
    net: Any = sk.models.create("restricted_urnn", 2, 10, 3)
    rnn = net.rnn
    coordinates = rnn.parametrizations.weight_hh_l0.coordinates
    assert 1 < coordinates["phase"].abs().max() <= math.pi
    assert 0.1 < coordinates["reflectors"].abs().max() <= math.sqrt(6 / 22)
    assert rnn.weight_ih_l0.abs().max() <= math.sqrt(6 / 22)
    assert 0 < rnn.bias_l0.abs().max() <= 0.01
    assert 0.1 < rnn.h0_l0.abs().max() <= math.sqrt(3 / 20)


def test_lie_urnn_starts_with_normal_coefficients():
    net: Any = sk.models.create("lie_urnn", 2, 50, 3)
    skew = net.rnn.parametrizations.weight_hh_l0.skew
    assert skew.mean().item() == pytest.approx(0, abs=0.1)
    assert skew.std().item() == pytest.approx(1, abs=0.1)


def test_margin_rnn_starts_orthogonal_with_a_trained_zero_state():
    net: Any = sk.models.create("margin_rnn", 2, 10, 3, margin=0.3)
    coordinate_list = net.rnn.parametrizations.weight_hh_l0
    assert coordinate_list.param.margin == 0.3
    assert torch.equal(coordinate_list.coordinates["spectrum"], torch.zeros(10))
    assert sk.metrics.orthogonality_error(net.rnn.weight_hh_l0) < 1e-5
    assert torch.equal(net.rnn.h0_l0, torch.zeros(10))


def test_irnn_starts_at_the_identity():
    net: Any = sk.models.create("irnn", 2, 300, 3, input_std=0.001)
    assert torch.equal(net.rnn.weight_hh_l0, torch.eye(300))
    assert torch.equal(net.rnn.bias_l0, torch.zeros(300))
    assert torch.equal(net.rnn.h0_l0, torch.zeros(300))
    assert net.rnn.weight_ih_l0.std().item() == pytest.approx(0.001, rel=0.2)
    x = torch.rand(2, 5, 2)
    states = net.rnn(x)[0]
    assert torch.allclose(states[:, -1], (x @ net.rnn.weight_ih_l0.mT).relu().sum(1), atol=0.01)


@pytest.mark.parametrize("parametrization", [None, "cayley"])
def test_henaff_rnn_moves_its_states_linearly(parametrization):
    net: Any = sk.models.create("henaff_rnn", 2, 6, 3, parametrization=parametrization).double()
    rnn = net.rnn
    nn.init.normal_(rnn.bias_l0)
    x = torch.randn(2, 5, 2, dtype=torch.float64)
    h = torch.zeros(2, 6, dtype=torch.float64)
    for t in range(5):
        h = (x[:, t] @ rnn.weight_ih_l0.mT + rnn.bias_l0).relu() + h @ rnn.weight_hh_l0.mT
    assert torch.allclose(rnn(x)[1][0], h)
    other: Any = sk.models.create("henaff_rnn", 2, 6, 3, init="identity")
    assert torch.equal(other.rnn.weight_hh_l0, torch.eye(6))


def test_goru_starts_as_its_code_does():
    net: Any = sk.models.create("goru", 2, 8, 3)
    rnn = net.rnn
    coordinate_list = rnn.parametrizations.weight_hh_l0
    assert coordinate_list.param.layout == "fft"
    assert coordinate_list.signs.tolist() == [1] * 8
    assert 1 < coordinate_list.angle.abs().max() <= math.pi
    assert max(rnn.weight_ih_l0.abs().max(), rnn.weight_gates_l0.abs().max()) <= 0.01
    assert rnn.bias_gates_l0.tolist() == [2.0] * 8 + [0.0] * 8
    assert torch.equal(rnn.bias_l0, torch.full((8,), 0.01))


def test_scornn_starts_as_its_code_does():
    net: Any = sk.models.create("scornn", 2, 10, 1, negative=4)
    rnn = net.rnn
    assert rnn.parametrizations.weight_hh_l0.signs.tolist() == [1] * 6 + [-1] * 4
    assert rnn.weight_ih_l0.abs().max() <= 0.01
    assert torch.equal(rnn.bias_l0, torch.zeros(10))
    assert torch.equal(net.output.bias, torch.zeros(1))
    assert net.output.weight.abs().max() <= math.sqrt(6 / 11)
    assert not rnn.trainable_h0
    angles = torch.linalg.eigvals(rnn.weight_hh_l0 * rnn.parametrizations.weight_hh_l0.signs).angle().abs()
    assert angles.max() <= math.pi / 2 + 1e-5


def test_scurnn_starts_as_its_code_does():
    net: Any = sk.models.create("scurnn", 2, 10, 3)
    rnn = net.rnn
    coordinates = rnn.parametrizations.weight_hh_l0.coordinates
    table = coordinates["skew"].view(10, 10)
    assert torch.equal(table.triu(), torch.zeros(10, 10))
    assert torch.all((coordinates["phase"] >= 0) & (coordinates["phase"] <= 2 * math.pi))
    assert rnn.bias_l0.abs().max() <= 0.01
    assert rnn.bias_l0.abs().max() > 0
    assert rnn.h0_l0.shape == (20,)
    assert 0 < rnn.h0_l0.abs().max() <= 0.01
    assert net.output.weight.shape == (3, 20)


def test_the_bias_of_scurnn_begins_within_its_bound():
    net: Any = sk.models.create("scurnn", 2, 10, 3, bias_bound=0)
    assert torch.equal(net.rnn.bias_l0, torch.zeros(10))
    with pytest.raises(sk.errors.OptionError, match="bias_bound"):
        sk.models.create("scurnn", 2, 10, 3, bias_bound=-0.1)
    rnn = net.double().rnn  # which passes gradients on as they are
    states, _ = rnn(torch.randn(1, 700, 2, dtype=torch.float64))
    seed = torch.randn_like(states[:, -1])
    (gradient,) = torch.autograd.grad(states[:, -1], rnn.h0_l0, seed)
    torch.testing.assert_close(gradient.norm(), seed.norm())


def test_full_urnn_starts_as_its_code_does():
    net: Any = sk.models.create("full_urnn", 2, 10, 3)
    rnn = net.rnn
    assert list(rnn.parametrizations.weight_hh_l0.coordinates) == ["stiefel"]
    assert rnn.parametrizations.weight_hh_l0.scheme == "restricted"
    assert sk.drift(rnn)["weight_hh_l0"].error <= 1e-6
    assert rnn.weight_ih_l0.shape == (20, 2)
    assert 0.1 < rnn.weight_ih_l0.abs().max() <= math.sqrt(6 / 22)
    assert 0 < rnn.bias_l0.abs().max() <= 0.01
    assert rnn.bias_l0.shape == (10,)
    assert rnn.h0_l0.shape == (20,)
    assert 0.1 < rnn.h0_l0.abs().max() <= math.sqrt(3 / 20)
    assert net.output.weight.abs().max() <= math.sqrt(6 / 23)
    assert torch.equal(net.output.bias, torch.zeros(3))
    assert torch.equal(sk.models.create("full_urnn", 2, 4, 3, bias_bound=0.0).rnn.bias_l0, torch.zeros(4))  # type: ignore[union-attr]


def test_full_urnn_draws_the_same_by_the_class_as_by_its_name():
    nets: list[Any] = []
    for given in ("stiefel", sk.parametrizations.StiefelPoint):
        seeds.reseed()
        nets.append(sk.models.create("full_urnn", 2, 8, 3, parametrization=given))
    assert {net.rnn.parametrizations.weight_hh_l0.scheme for net in nets} == {"restricted"}
    assert torch.equal(*(net.rnn.weight_hh_l0 for net in nets))


def test_gated_nets_have_one_bias_and_gates_that_keep_the_state():
    net: Any = sk.models.create("lstm", 2, 4, 3, forget_bias=2.0)
    assert net.rnn.bias_ih_l0.tolist() == [0.0] * 4 + [2.0] * 4 + [0.0] * 8
    assert not net.rnn.bias_hh_l0.requires_grad
    net = sk.models.create("gru", 2, 4, 3)
    assert net.rnn.bias_ih_l0.tolist() == [1.0] * 8 + [0.0] * 4
    assert not net.rnn.bias_hh_l0.requires_grad
    framed: Any = sk.models.create("gru", 2, 4, 3, parametrization="cayley", gate_bias=2.0)
    assert framed.rnn.bias_ih_l0.tolist() == [2.0] * 8 + [0.0] * 4
