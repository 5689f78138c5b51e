"""The gated layer against its formula, and the laws of packed and reversed input, transforms and precision."""

from typing import Any

import pytest
import torch

from stiefelkit.nn import GORU
from stiefelkit.scan import activations, find_activation
from stiefelkit.testing import lowered_products

DOUBLE = torch.float64
NAMES = [*activations.names(), "leaky_relu(0.3)"]


def layer(activation: str = "modrelu", dtype: torch.dtype = DOUBLE, **options: Any) -> GORU:
    rnn = GORU(3, 4, activation=activation, dtype=dtype, **options)
    for name, p in rnn.named_parameters():
        if name.startswith("bias"):
            torch.nn.init.normal_(p, std=0.3)
    return rnn


def stepped(rnn: GORU, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """The states by the formula, gate by gate."""
    read: Any = rnn
    act = find_activation(rnn.activation, False)
    (w_r, w_g), (u_r, u_g, u_c) = read.weight_gates_l0.chunk(2), read.weight_ih_l0.chunk(3)
    (b_r, b_g), q, outputs = read.bias_gates_l0.chunk(2), read.weight_hh_l0, []
    for row in x:
        r, g = torch.sigmoid(row @ u_r.T + h @ w_r.T + b_r), torch.sigmoid(row @ u_g.T + h @ w_g.T + b_g)
        c = act(r * (h @ q.T) + row @ u_c.T, read.bias_l0)
        h = g * h + (1 - g) * c
        outputs.append(h)
    return torch.stack(outputs)


def drawn(steps: int = 9, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(steps, batch, 3, dtype=DOUBLE), torch.randn(1, batch, 4, dtype=DOUBLE)


@pytest.mark.parametrize("activation", NAMES)
def test_the_gated_recurrence_is_its_formula_and_so_are_its_gradients(activation):
    rnn, (x, h) = layer(activation), drawn()
    leaves = [x.requires_grad_(), *rnn.parameters()]
    out, last = rnn(x, h)
    expected, g = stepped(rnn, x, h[0]), torch.randn_like(out)
    assert torch.allclose(out, expected)
    assert torch.equal(last[0], out[-1])
    pairs = zip(torch.autograd.grad(out, leaves, g), torch.autograd.grad(expected, leaves, g), strict=True)
    assert all(torch.allclose(a, b) for a, b in pairs)
    assert torch.equal(rnn(x, h, last_only=True)[1], last)


def test_derivatives_of_any_order_and_forward_mode():
    rnn, (x, _) = layer("tanh"), drawn(3)

    def last(x: torch.Tensor) -> torch.Tensor:
        return rnn(x)[1]

    assert torch.autograd.gradcheck(last, x.requires_grad_(), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(last, x, fast_mode=True)


def test_autocast_and_lowered_products_leave_the_gated_recurrence_in_full_precision():
    rnn = GORU(3, 64)
    x = torch.randn(9, 32, 3)
    expected = rnn(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(rnn(x)[0], expected, atol=1e-6)
        assert rnn(x.bfloat16())[0].dtype == torch.float32
    with lowered_products():
        assert torch.allclose(rnn(x)[0], expected, atol=1e-6)


def test_bfloat16_states_are_rounded_once():
    rnn, x = layer(dtype=torch.bfloat16, parametrization=None), torch.randn(50, 2, 3).bfloat16()
    wide = layer(dtype=torch.float32, parametrization=None)
    wide.load_state_dict({key: value.float() for key, value in rnn.state_dict().items()})
    assert torch.equal(rnn(x)[0], wide(x.float())[0].bfloat16())


def test_no_sequences_and_nan_stay_where_they_are():
    rnn, (x, h) = layer(), drawn()
    assert rnn(x[:, :0], h[:, :0])[0].shape == (9, 0, 4)
    x[2, 1, 0] = float("nan")
    out, last = rnn(x, h)
    assert out[:2].isfinite().all()
    assert out[2:, 1].isnan().all()
    assert last[0, 0].isfinite().all()
