"""A layer of rotations is the recurrence of the W that it stands for, and the linear recurrent unit its paper's."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizers_at_hand import descend

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.measuring.clock import peak_bytes
from stiefelkit.testing import seeds

N = 8


def layer(**options: Any) -> Any:
    seeds.reseed()
    return sk.nn.RotationRNN(3, N, trainable_h0=True, dtype=torch.float64, **options)


@pytest.mark.parametrize("decay", [(0.9, 0.999), None])
@pytest.mark.parametrize("parametrization", ["cayley", "householder", "givens", "stiefel", None])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("field", ["real", "complex"])
def test_states_are_those_of_the_loop_with_w(field, heads, parametrization, decay):
    rnn = layer(field=field, heads=heads, parametrization=parametrization, decay=decay)
    x = torch.randn(40, 2, 3, dtype=torch.float64)
    u, b, h = (rnn._join(t) for t in (rnn.weight_ih_l0, rnn.bias_l0, rnn.h0_l0))
    w, g, s = rnn.weight_hh_l0, torch.ones(heads, dtype=torch.float64), torch.ones(heads, dtype=torch.float64)
    if decay is not None:
        g = torch.exp(-torch.exp(rnn.log_rate_l0))
        s = torch.stack([(1 - gi**2).sqrt() / part.norm() for gi, part in zip(g, u.chunk(heads), strict=True)])
    g, s, h = g.repeat_interleave(N // heads), s.repeat_interleave(N // heads), h.expand(2, N)
    expected = []
    for row in x:
        h = g * (h @ w.mT) + s * (row.to(u.dtype) @ u.mT) + b
        expected.append(h)
    out, last = rnn(x)
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(last[0], expected[-1], rtol=1e-11, atol=1e-11)
    assert (w.mH @ w - torch.eye(N)).norm() < 1e-14
    out.abs().square().sum().backward()
    assert all(p.grad is not None for p in rnn.parameters())


@pytest.mark.parametrize("decay", [(0.9, 0.999), None])
@pytest.mark.parametrize("field", ["real", "complex"])
def test_a_last_state_without_the_others_has_their_value_and_gradients(field, decay):
    rnn = layer(field=field, heads=2, decay=decay, num_layers=2, bidirectional=True)
    x = torch.randn(40, 2, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for last_only in (False, True):
        last = rnn(x, last_only=last_only)[1]
        weights = torch.randn(last.shape, dtype=last.dtype, generator=seeds.generator(1))
        grads = torch.autograd.grad((last * weights).real.sum(), [x, *rnn.parameters()])
        found.append([last, *grads])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


def test_states_keep_their_size_whatever_the_decay():
    rnn = sk.nn.RotationRNN(16, 64, heads=8, decay=(0.5, 0.999), bias=False)
    seeds.reseed()
    out, _ = rnn(torch.randn(6000, 4, 16))
    size = out[3000:].unflatten(-1, (8, 8)).square().sum(-1).mean((0, 1))
    assert ((size - 1).abs() < 0.25).all()


def test_inputs_are_scaled_by_the_decay_that_was_asked_for_where_it_rounds_to_one():
    slow: Any = sk.nn.RotationRNN(3, N, decay=(1 - 1e-9, 1 - 1e-9), bias=False)  # one in float32
    twin = copy.deepcopy(slow).double()
    x = torch.randn(20, 2, 3, generator=seeds.generator())
    out, exact = slow(x)[0], twin(x.double())[0]
    assert exact.norm() > 0
    assert torch.allclose(out.double(), exact, rtol=1e-4, atol=1e-5 * exact.abs().max().item())
    for rnn, y in ((slow, out), (twin, exact)):
        y.square().sum().backward()
        assert rnn.log_rate_l0.grad.isfinite().all()
    assert torch.allclose(slow.log_rate_l0.grad.double(), twin.log_rate_l0.grad, rtol=1e-3)


def test_without_decay_states_are_only_turned():
    rnn = sk.nn.RotationRNN(3, N, decay=None, bias=False)
    h = torch.randn(1, 2, N)
    out, _ = rnn(torch.zeros(5000, 2, 3), h)
    # One chunk of 16 steps multiplies by a rounded factor at each step; the others by powers that are rounded once.
    assert (out.norm(dim=-1) / h.norm(dim=-1) - 1).abs().max() < 16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("rnn", "parts"), [(layer(), "basis, angle, log_rate"), (sk.nn.LRU(3, N), "log_rate, log_angle, log_scale")]
)
def test_w_is_read_and_not_set(rnn, parts):
    w = rnn.weight_hh_l0
    with pytest.raises(errors.OptionError, match=parts):
        rnn.weight_hh_l0 = torch.eye(N)
    assert torch.equal(rnn.weight_hh_l0, w)


def test_a_block_goes_on_from_its_last_states():
    seeds.reseed()
    block = sk.nn.RotationBlock(4, N, heads=2).double()
    x = torch.randn(2, 30, 4, dtype=torch.float64)
    whole, last = block(x)
    first, h = block(x[:, :11])
    second, end = block(x[:, 11:], h)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(end, last)


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


@pytest.mark.parametrize(
    "decay", [(0.9, 0.999), (1e-3, 0.6), (0.99, 0.99), (0, 1), (0.0, 0.99), (0.9, 1.0), (1.0, 1.0)]
)
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
    assert rnn(torch.randn(50, 2, m, dtype=torch.float64))[0].isfinite().all()
    assert rnn.weight_ih_l0.square().mean().item() * 2 * m == pytest.approx(1, abs=0.05)
    block = sk.nn.LRUBlock(32, 256)
    assert block.output.weight.square().mean().item() * 128 == pytest.approx(1, abs=0.1)
    assert block.skip.square().mean().item() == pytest.approx(1, abs=0.9)


@pytest.mark.parametrize(
    ("layer", "options", "word"),
    [
        (sk.nn.RotationRNN, {"hidden_size": 7}, "multiple of 2"),
        (sk.nn.RotationRNN, {"heads": 3}, "multiple of 6"),
        *((sk.nn.RotationRNN, {"decay": decay}, "decay") for decay in ((0.9, 1.0), 0.9, (0.9,), ("a", 0.9))),
        (sk.nn.RotationRNN, {"parametrization": None, "init": "haar"}, "basis"),
        (sk.nn.RotationRNN, {"activation": "tanh"}, "linear"),
        (sk.nn.RotationRNN, {"head": 2}, 'did you mean "heads"'),
        (sk.nn.LRU, {"hidden_size": 7}, "even"),
        (sk.nn.LRU, {"heads": 4}, "of its own"),
        (sk.nn.LRUBlock, {"decay": (0.0, 1.1)}, "decay"),
    ],
)
def test_bad_options_are_refused_by_name(layer, options, word):
    with pytest.raises(errors.OptionError, match=word):
        layer(3, **{"hidden_size": N, **options})


STREAMS = [
    (sk.nn.RotationRNN, {"heads": 2, "trainable_h0": True}),
    (sk.nn.RotationRNN, {"field": "complex"}),
    (sk.nn.RotationRNN, {"parametrization": None, "decay": None, "bias": False}),
    (sk.nn.LRU, {}),
]


@pytest.mark.parametrize(("kind", "options"), STREAMS)
def test_steps_of_a_stream_are_those_of_the_sequence(kind, options):
    seeds.reseed()
    rnn = kind(3, N, 2, dtype=torch.float64, **options)
    x = torch.randn(30, 4, 3, dtype=torch.float64)
    h0 = torch.randn(2, 4, N, dtype=rnn(x)[1].dtype)
    for first in (None, h0):
        (out, _), state, found = rnn(x, first), first, []
        for row in x:
            y, state = rnn.step(row, state)
            found.append(y)
        torch.testing.assert_close(torch.stack(found), out)
    weights = [p for name, p in rnn.named_parameters() if not name.startswith("h0")]
    pairs = zip(*(torch.autograd.grad(t.abs().sum(), weights) for t in (torch.stack(found), out)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(errors.OptionError, match="direction"):
        kind(3, N, bidirectional=True, **options).step(x[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "options"), [STREAMS[0], *STREAMS[2:]])
def test_sixteen_bits_round_neither_coordinates_nor_states(kind, options, dtype):
    seeds.reseed()
    rnn = kind(3, 64, **options)
    x = torch.randn(300, 4, 3).to(dtype)
    exact, half = rnn(x.float())[0], copy.deepcopy(rnn).to(dtype)
    out, last = half(x)
    assert (out.float() - exact).norm() <= 0.01 * exact.norm()
    assert (out.dtype, last.dtype) == (dtype, torch.float32)
    h = None
    for row in x.split(1):
        h = half(row, h)[1]
    torch.testing.assert_close(h, last, rtol=1e-3, atol=1e-3 * last.abs().max().item())
    assert (names := half.coordinate_keys())
    for made in (half, kind(3, 64, dtype=dtype, **options), copy.deepcopy(rnn).half().bfloat16()):
        assert {made.get_parameter(name).dtype for name in names} == {torch.float32}
    assert all(torch.equal(half.get_parameter(name), rnn.get_parameter(name)) for name in names)
    rnn.double()
    assert {rnn.get_parameter(name).dtype for name in names} == {torch.float64}
    with pytest.raises(errors.CheckpointError, match="float32"):
        rnn.load_state_dict({key: t.to(dtype) if t.is_floating_point() else t for key, t in half.state_dict().items()})


@pytest.mark.parametrize("kind", [sk.nn.RotationRNN, sk.nn.LRU])
@pytest.mark.parametrize("slow", [1e-3, 1e-6])
def test_a_decay_next_to_one_is_as_precise_as_its_rate(kind, slow):
    rnn = kind(1, 32, decay=(1 - slow, 1 - slow), max_angle=1e-9)
    x = torch.ones(20000, 1, 1)
    exact = copy.deepcopy(rnn).double()(x.double())[1]
    for last_only in (False, True):
        assert (rnn(x, last_only=last_only)[1] - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("field", ["real", "complex"])
def test_scaled_inputs_depend_on_no_scale_of_their_weights(field):
    rnn = sk.nn.RotationRNN(3, N, heads=2, bias=False, field=field)
    x, outs = torch.randn(20, 2, 3), []
    for scale in (1.0, 2.0**-100, 2.0**100, 0.0, 2.0**-149, 2.0**127):
        twin: Any = copy.deepcopy(rnn)
        with torch.no_grad():
            twin.weight_ih_l0.sign_().mul_(scale) if abs(math.log2(scale or 1)) > 100 else twin.weight_ih_l0.mul_(scale)
        outs.append(twin(x)[0])
        outs[-1].abs().square().mean().backward()
        # The gradient by the smallest numbers is larger than any of float32.
        assert scale == 2.0**-149 or all(p.grad.isfinite().all() for p in twin.parameters())
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert not outs[3].any()
    assert torch.equal(outs[4], outs[5])


@pytest.mark.parametrize("kind", [sk.nn.RotationRNN, sk.nn.LRU])
@pytest.mark.parametrize("rate", [-1000.0, -104.0, 90.0, 1000.0])
def test_rates_beyond_every_decay_have_finite_gradients(kind, rate):
    rnn = kind(3, N)
    torch.nn.init.constant_(rnn.log_rate_l0, rate)
    rnn(torch.randn(40, 2, 3))[0].square().mean().backward()
    assert all(p.grad.isfinite().all() for p in rnn.parameters())


@pytest.mark.parametrize("options", [{"parametrization": "margin"}, {"gain": 0.9}])
def test_a_basis_that_is_no_frame_is_refused(options):
    with pytest.raises(errors.OptionError, match=r"frames|adjoint"):
        sk.nn.RotationRNN(3, N, **options)
    rnn = sk.orthogonal(sk.bake(sk.nn.RotationRNN(3, N)), "basis_l0", **{"parametrization": "cayley", **options})
    if not options.get("gain"):
        with pytest.raises(errors.OptionError, match="frames"):
            rnn(torch.zeros(5, 2, 3))


@pytest.mark.parametrize("field", ["real", "complex"])
def test_a_baked_basis_stays_a_frame_in_training_and_under_casts(field):
    rnn: Any = sk.bake(sk.nn.RotationRNN(3, N, field=field))
    before, optimizer = copy.deepcopy(rnn), torch.optim.SGD(rnn.parameters(), 0.1)
    descend(optimizer, lambda: rnn(torch.randn(20, 2, 3))[0].abs().square().mean(), 3)
    assert not torch.equal(rnn.angle_l0, before.angle_l0)
    for cast in (rnn, copy.deepcopy(rnn).bfloat16(), copy.deepcopy(rnn).to(torch.bfloat16), rnn.to(torch.float64)):
        assert torch.equal(cast.basis_l0, before.basis_l0.to(cast.basis_l0.dtype))
    assert rnn.basis_l0.dtype == (torch.float64 if field == "real" else torch.complex128)


def test_an_angle_with_a_parametrization_of_torchs_is_a_coordinate_still():
    rnn: Any = sk.nn.RotationRNN(3, N)
    angle = rnn.angle_l0.detach().clone()
    torch.nn.utils.parametrize.register_parametrization(rnn, "angle_l0", torch.nn.Identity())
    groups = sk.optim.parameter_groups(rnn, lr=1.0, angle=0.1)
    assert [group["lr"] for group in groups if group.get("name") == "angle"] == [0.1]
    assert torch.equal(rnn.bfloat16().angle_l0, angle)
    with pytest.raises(errors.CheckpointError, match="angle_l0"):
        rnn.load_state_dict({**rnn.state_dict(), "parametrizations.angle_l0.original": angle.half()})


@pytest.mark.parametrize("value", [math.nan, math.inf, 1j])
def test_coordinates_of_recurrences_load_real_and_finite_numbers_alone(value):
    rnn = sk.nn.LRU(3, N)
    state = rnn.state_dict()
    with pytest.raises((errors.CheckpointError, errors.NonFiniteError), match="log_angle_l0"):
        rnn.load_state_dict({**state, "log_angle_l0": torch.full((N // 2,), value)})
    assert all(torch.equal(t, state[key]) for key, t in rnn.state_dict().items())


@pytest.mark.parametrize("steps", [100, 20000])
def test_the_error_of_the_last_state_alone_does_not_grow_with_the_steps(steps):
    rnn, x = sk.nn.RotationRNN(4, 32, decay=None), torch.ones(steps, 2, 4)
    last, exact = rnn(x, last_only=True)[1], copy.deepcopy(rnn).double()(x.double())[1]
    assert (last - exact).norm() <= 3 * torch.finfo(torch.float32).eps * exact.norm()


def test_a_last_state_alone_takes_no_memory_for_others():
    rnn, x, g = sk.nn.RotationRNN(1, 64), torch.randn(4096, 32, 1), torch.randn(1, 32, 64)
    states = 4 * 4096 * 32 * 64
    assert peak_bytes(lambda: rnn(x, last_only=True)[1].backward(g), x.device) < states / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_a_recurrence_trained_elsewhere_is_taken_over(dtype):
    seeds.reseed()
    w = sk.init.haar((N, N), dtype, seeds.generator())
    u, b = torch.randn(N, 3, dtype=dtype), torch.randn(N, dtype=dtype)
    if not dtype.is_complex and torch.linalg.det(w) < 0:
        w[:, 0] *= -1
    flat = torch.diag(torch.tensor([1.0, -1, -1, 1, 1, 1, -1, -1], dtype=dtype))  # planes that are not turned
    for each, of in itertools.product((w, flat, torch.eye(N, dtype=dtype)), ("cayley", "matrix_exp")):
        rnn = sk.nn.RotationRNN.from_orthogonal(each, u, b, decay=0.9, parametrization=of)
        x, h = torch.randn(50, 2, 3, dtype=u.real.dtype), torch.zeros(2, N, dtype=dtype)
        for row in x:
            h = 0.9 * (h @ each.mT) + row.to(dtype) @ u.mT + b
        assert (rnn.weight_hh_l0 - each).abs().max() <= 1e-6
        assert (rnn(x)[1][0] - h).norm() <= 1e-6 * h.norm()
    odd = {(2 * w, u): "orthogonal W", (w.to("meta"), u): "numbers", (w[0, 0], u): "square", (w, None): "weight_ih"}
    mirror = {} if dtype.is_complex else {(w * w.new_tensor([-1] + [1] * (N - 1)), u): "det"}
    for given, word in {**odd, **mirror, (w, u, b[:1]): "bias"}.items():
        with pytest.raises(errors.StiefelkitError, match=word):
            sk.nn.RotationRNN.from_orthogonal(*given)


def test_an_lru_trained_elsewhere_is_taken_over():
    seeds.reseed()
    nu, theta, gamma = torch.randn(3, 4).unbind()
    b, x = torch.randn(4, 3, dtype=torch.complex64), torch.randn(30, 2, 3)
    rnn = sk.nn.LRU.from_parameters(nu, theta, gamma, b)
    z = torch.zeros(2, 4, dtype=torch.complex128)
    step = torch.exp(torch.complex(-nu.exp(), theta.exp()).to(z.dtype))
    for row in x:
        z = step * z + gamma.double().exp() * (row.to(z.dtype) @ b.to(z.dtype).mT)
    found = torch.view_as_complex(rnn(x)[1][0].unflatten(-1, (-1, 2)))
    assert (found - z).norm() <= 1e-6 * z.norm()
    with pytest.raises(errors.NonFiniteError, match="log_rate"):
        sk.nn.LRU.from_parameters(1e300 * nu.double(), theta, gamma, b)


@pytest.mark.parametrize("scale", [0, 1e-4, 1])
def test_a_long_stream_drifts_no_further_than_one_state_is_rounded(scale):
    rnn, state = sk.nn.RotationRNN(2, 8, decay=None), torch.randn(1, 1, 8)
    x, first = scale * torch.randn(3000, 1, 2), state
    with torch.no_grad():
        for row in x:
            h, state = rnn.step(row, state)
        exact = rnn.double()(x.double(), first.double())[0][-1]
    assert (h - exact).norm() < 8 * torch.finfo(torch.float32).eps * exact.norm()
    row, other = x[0].double(), sk.nn.RotationRNN(2, 8, field="complex", dtype=torch.float64)
    wrong: list[Any] = [(rnn, odd, state) for odd in (row.new_zeros(2, 2), torch.zeros(1, 3), torch.tensor(0), None)]
    for layer, odd, given in [*wrong, (rnn, row, (state,)), (other, row, state)]:
        with pytest.raises((errors.OptionError, errors.ShapeError), match=r"input of shape|state of its"):
            layer.step(odd, given)
