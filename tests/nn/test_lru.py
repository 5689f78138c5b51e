"""The linear recurrent unit is that of its paper: its formula in complex numbers, and its draw in a ring."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.testing import seeds


def published(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns x + GLU(GELU(Re(C z) + D x')) by a loop over complex states."""
    rnn = block.rnn
    transition = torch.exp(torch.complex(-rnn.log_rate_l0.exp(), rnn.log_angle_l0.exp()))
    b = torch.complex(rnn.weight_ih_l0[::2], rnn.weight_ih_l0[1::2]) * rnn.log_scale_l0.exp()[:, None]
    c = torch.complex(block.output.weight[:, ::2], -block.output.weight[:, 1::2])
    inner = block.norm(x)
    z, states = torch.zeros(len(x), len(b), dtype=b.dtype), []
    for row in inner.unbind(1):
        z = transition * z + row.to(b.dtype) @ b.mT
        states.append(z)
    y = F.gelu((torch.stack(states, 1) @ c.mT).real + block.skip * inner)
    value, gate = block.gate(y).chunk(2, -1)
    return x + value * gate.sigmoid()


def test_a_block_is_the_published_formula_and_so_are_its_gradients():
    seeds.reseed()
    block = sk.nn.LRUBlock(4, 12, dtype=torch.float64)
    x = torch.randn(2, 70, 4, dtype=torch.float64)
    found, expected = block(x)[0], published(block, x)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    weights, g = list(block.parameters()), torch.randn(found.shape, dtype=torch.float64)
    pairs = zip(torch.autograd.grad(found, weights, g), torch.autograd.grad(expected, weights, g), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("decay", [(0.9, 0.999), (1e-3, 0.6), (0.99, 0.99)])
def test_factors_begin_uniform_in_a_ring_and_inputs_at_the_scale_of_the_paper(decay):
    seeds.reseed()
    low, high = decay
    n, m = 8000, 6
    rnn = sk.nn.LRU(m, n, decay=decay, max_angle=2.0, dtype=torch.float64)
    rnn.reset_parameters()
    modulus, angle, scale = (t.detach().exp() for t in (-rnn.log_rate_l0.exp(), rnn.log_angle_l0, rnn.log_scale_l0))
    assert modulus.min() >= low * (1 - 1e-12)
    assert modulus.max() <= high * (1 + 1e-12)
    assert 0 < angle.min() <= angle.max() <= 2
    # Means of uniform variables are within 4 of their standard deviations.
    bound = 4 / math.sqrt(12 * n / 2)
    assert abs(modulus.square().mean() - (low**2 + high**2) / 2) <= bound * (high**2 - low**2) + 1e-12
    assert abs(angle.mean() - 1) <= 2 * bound
    torch.testing.assert_close(scale, (1 - modulus.square()).sqrt())
    assert rnn.weight_ih_l0.square().mean().item() * 2 * m == pytest.approx(1, abs=0.05)
    block = sk.nn.LRUBlock(32, 256)
    assert block.output.weight.square().mean().item() * 128 == pytest.approx(1, abs=0.1)
    assert block.skip.square().mean().item() == pytest.approx(1, abs=0.9)


def test_a_model_counts_the_parameters_of_the_paper():
    net = sk.models.create("lru", 1, 128, 10, width=32, num_layers=3)
    n, h = 64, 32
    layer = 3 * n + 2 * n * h + 2 * h * n + h  # moduli, angles, scales; B, C; D
    block = 2 * h + layer + 2 * h * (h + 1)  # norm; gated linear unit
    assert sk.models.count_parameters(net) == 2 * h + 3 * block + 10 * (h + 1)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"hidden_size": 7}, "even"),
        ({"decay": None}, "decay"),
        ({"decay": (0.0, 0.9)}, "decay"),
        ({"max_angle": 0.0}, "max_angle"),
    ],
)
def test_bad_options_are_refused_by_name(options, word):
    for layer in (sk.nn.LRU, sk.nn.LRUBlock):
        with pytest.raises(errors.OptionError, match=word):
            layer(3, **{"hidden_size": 8, **options})
