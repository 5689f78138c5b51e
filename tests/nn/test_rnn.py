"""The scan and the recurrent layers against torch's own and against a plain loop."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import stiefelkit as sk
from stiefelkit import errors, models
from stiefelkit.functional import modrelu
from stiefelkit.nn import ModReLU, OrthogonalRNN, OrthogonalRNNCell
from stiefelkit.scan import scan

DOUBLE = torch.float64


def taken_over(*sizes: int, **options: Any) -> tuple[Any, Any]:
    """A torch.nn.RNN whose recurrent matrices are frames, and the layer that takes it over."""
    source = nn.RNN(*sizes, dtype=DOUBLE, **options)
    for name, parameter in source.named_parameters():
        if name.startswith("weight_hh"):
            nn.init.orthogonal_(parameter)
    return OrthogonalRNN.from_torch(source), source


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_layers_shapes_and_values_are_torchs(activation, bidirectional, batch_first, layers):
    options = {"nonlinearity": activation, "bidirectional": bidirectional, "batch_first": batch_first}
    rnn, twin = taken_over(3, 5, layers, **options)
    x = torch.randn(4, 7, 3, dtype=DOUBLE)
    h_0 = torch.randn(layers * (1 + bidirectional), 4 if batch_first else 7, 5, dtype=DOUBLE)
    for arguments in ((x,), (x, h_0), (x[0],), (x[0], h_0[:, 0])):
        out, h_n = rnn(*arguments)
        expected, expected_n = twin(*arguments)
        assert torch.allclose(out, expected)
        assert torch.allclose(h_n, expected_n)


@pytest.mark.parametrize("enforce_sorted", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences_are_torchs(bidirectional, enforce_sorted):
    rnn, twin = taken_over(3, 5, 2, bidirectional=bidirectional)
    lengths = [6, 4, 4, 1] if enforce_sorted else [4, 6, 1, 4]
    packed = pack_padded_sequence(torch.randn(6, 4, 3, dtype=DOUBLE), lengths, enforce_sorted=enforce_sorted)
    h_0 = torch.randn(2 * (1 + bidirectional), 4, 5, dtype=DOUBLE)
    for arguments in ((packed,), (packed, h_0)):
        out, h_n = rnn(*arguments)
        expected, expected_n = twin(*arguments)
        assert torch.allclose(pad_packed_sequence(out)[0], pad_packed_sequence(expected)[0])
        assert torch.allclose(h_n, expected_n)


def test_the_cell_is_torchs_and_takes_unbatched_input():
    cell: Any = OrthogonalRNNCell(3, 4, activation="tanh", dtype=DOUBLE)
    twin = nn.RNNCell(3, 4, dtype=DOUBLE)
    with torch.no_grad():
        twin.weight_ih.copy_(cell.weight_ih)
        twin.weight_hh.copy_(cell.weight_hh)
        twin.bias_ih.copy_(cell.bias)
        twin.bias_hh.zero_()
    x, h = torch.randn(2, 3, dtype=DOUBLE), torch.randn(2, 4, dtype=DOUBLE)
    assert torch.allclose(cell(x, h), twin(x, h))
    assert torch.allclose(cell(x), twin(x))
    assert torch.allclose(cell(x[0], h[0]), twin(x[0], h[0]))
    assert cell(x[:0]).shape == (0, 4)


def test_steps_of_the_cell_are_the_layer():
    layer: Any = OrthogonalRNN(3, 4, field="complex", trainable_h0=True, dtype=DOUBLE)
    cell: Any = OrthogonalRNNCell(3, 4, field="complex", trainable_h0=True, dtype=DOUBLE)
    cell.load_state_dict({key.replace("_l0", ""): value for key, value in layer.state_dict().items()})
    x = torch.randn(5, 2, 3, dtype=DOUBLE)
    out, _ = layer(x)
    h = None
    for t in range(5):
        h = cell(x[t], h)
        assert torch.allclose(h, out[t])


def test_modrelu_keeps_the_phase_and_shifts_the_modulus():
    z = torch.randn(50, dtype=torch.complex128)
    b = torch.randn(50, dtype=DOUBLE)
    out = modrelu(z, b)
    assert torch.allclose(out.abs(), torch.relu(z.abs() + b))
    alive = out.abs() > 0
    assert torch.allclose(out[alive].angle(), z[alive].angle())
    assert torch.autograd.gradcheck(modrelu, (z.requires_grad_(), b.requires_grad_()))


@pytest.mark.parametrize("dtype", [DOUBLE, torch.complex128])
def test_modrelu_with_an_epsilon_is_that_of_equation_5(dtype):
    z, b, epsilon = torch.randn(50, dtype=dtype), torch.randn(50, dtype=DOUBLE), 1e-5
    s = (z.abs().square() + epsilon).sqrt()
    expected = torch.where(s + b >= 0, (s + b) * z / (s + epsilon), 0)
    assert torch.allclose(modrelu(z, b, epsilon), expected, rtol=1e-14)
    assert torch.allclose(ModReLU(50, epsilon=epsilon)(z), modrelu(z, torch.zeros(50, dtype=DOUBLE), epsilon))
    assert torch.autograd.gradcheck(lambda z, b: modrelu(z, b, 0.1), (z.requires_grad_(), b.requires_grad_()))
    zero = torch.zeros(1, dtype=dtype, requires_grad=True)
    (gain,) = torch.autograd.grad(modrelu(zero, torch.tensor([0.01]), epsilon).real.sum(), zero)
    assert gain.real.item() == pytest.approx((epsilon**0.5 + 0.01) / (epsilon**0.5 + epsilon))
    with pytest.raises(errors.OptionError, match="epsilon"):
        modrelu(z, b, float("nan"))


def test_a_model_takes_the_modrelu_of_its_paper():
    model: Any = models.create("scurnn", 1, 6, 2, activation="modrelu_epsilon")
    rnn = model.rnn.double()
    x = torch.randn(2, 9, 1, dtype=DOUBLE)
    h0, w, b = torch.randn(1, 2, 6, dtype=torch.complex128), rnn.weight_hh_l0, rnn.bias_l0
    h, u = h0[0], torch.complex(*rnn.weight_ih_l0.chunk(2))
    for t in range(9):
        h = modrelu(h @ w.mT + x[:, t].to(u.dtype) @ u.mT, b, 1e-5)
    assert torch.allclose(rnn(x, h0)[0][:, -1], h)


def test_a_complex_layer_is_the_real_one_of_blocks():
    # [Re h | Im h] moves by [[Re W, -Im W], [Im W, Re W]].
    rnn: Any = OrthogonalRNN(3, 4, field="complex", activation="identity", bias=False, dtype=DOUBLE)
    w, u = rnn.weight_hh_l0, rnn.weight_ih_l0
    block = torch.cat([torch.cat([w.real, -w.imag], 1), torch.cat([w.imag, w.real], 1)])
    x = torch.randn(6, 2, 3, dtype=DOUBLE)
    out, _ = rnn(x)
    expected, _ = scan(x, block, torch.zeros(2, 8, dtype=DOUBLE), u=u, activation="identity")
    assert expected is not None
    assert torch.allclose(torch.cat([out.real, out.imag], -1), expected)


def test_complex_layers_stack_and_every_parameter_is_real():
    rnn: Any = OrthogonalRNN(3, 4, 2, field="complex", bidirectional=True, dropout=0.5, trainable_h0=True)
    assert not any(p.is_complex() for p in rnn.parameters())
    out, h_n = rnn(torch.randn(5, 2, 3))
    assert out.shape == (5, 2, 8)
    assert h_n.shape == (4, 2, 4)
    assert out.dtype == torch.complex64
    assert rnn(torch.zeros(5, 0, 3))[0].shape == (5, 0, 8)
    out.abs().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in rnn.parameters())


def test_w_is_evaluated_once_a_forward(monkeypatch):
    rnn: Any = OrthogonalRNN(2, 3)
    param = rnn.parametrizations.weight_hh_l0.param
    calls = []
    evaluate = type(param).forward
    monkeypatch.setattr(type(param), "forward", lambda self, *c: calls.append(1) or evaluate(self, *c))
    rnn(torch.randn(9, 2, 2))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("x", "h", "word"),
    [
        (torch.zeros(5, 2, 4), None, "width"),
        (torch.zeros(5), None, "dimensions"),
        (torch.zeros(0, 2, 3), None, "one step"),
        (torch.zeros(5, 2, 3), torch.zeros(1, 3, 4), "hx"),
        (pack_padded_sequence(torch.zeros(5, 2, 3), [3, 5], enforce_sorted=False), torch.zeros(1, 3, 4), "hx"),
        (torch.zeros(5, 2, 3), torch.zeros(2, 4), "hx"),
        (torch.zeros(5, 2, 3, dtype=DOUBLE), None, "float32"),
        (torch.zeros(5, 2, 3), torch.zeros(1, 2, 4, dtype=torch.complex64), "hx"),
    ],
)
def test_input_or_state_of_the_wrong_shape_or_dtype_is_refused(x, h, word):
    with pytest.raises((errors.ShapeError, errors.DtypeError), match=word):
        OrthogonalRNN(3, 4)(x, h)
    with pytest.raises(errors.ShapeError, match="hx"):
        OrthogonalRNNCell(3, 4)(torch.zeros(2, 3), torch.zeros(3, 4))


def test_a_complex_net_follows_casts_of_its_real_parameters():
    net: Any = sk.models.create("scurnn", 2, 4, 3).double()
    assert net(torch.zeros(1, 5, 2, dtype=DOUBLE)).dtype == DOUBLE
    assert net.rnn.weight_hh_l0.dtype == torch.complex128
    assert next(iter(sk.drift(net).values())).error < 1e-14
    net = net.to(torch.float32)
    assert net(torch.zeros(1, 5, 2)).dtype == torch.float32
    rnn: Any = OrthogonalRNN(2, 4, field="complex").bfloat16()
    assert rnn(torch.zeros(5, 1, 2, dtype=torch.bfloat16))[0].dtype == torch.complex64
    for options, error, word in (
        ({"dtype": torch.bfloat16}, errors.DtypeError, "float64"),
        ({"activation": "tanh"}, errors.DtypeError, "tanh"),
        ({"field": "quaternion"}, errors.OptionError, "quaternion"),
    ):
        with pytest.raises(error, match=word):
            OrthogonalRNN(2, 4, **{"field": "complex", **options})
