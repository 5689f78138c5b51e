"""What every recurrent layer shares: stacks, directions, packed sequences, first states; and free matrices."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.nn import GORU, LinearTransitionRNN, OrthogonalRNN, RotationRNN
from stiefelkit.testing import seeds

DOUBLE = torch.float64
KINDS = [OrthogonalRNN, LinearTransitionRNN, GORU]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def layer(kind, *sizes, **options) -> Any:
    """A layer in float64 with biases that are not zero."""
    seeds.reseed()
    rnn = kind(*sizes, dtype=DOUBLE, **options)
    for name, parameter in rnn.named_parameters():
        if name.startswith("bias"):
            nn.init.normal_(parameter)
    return rnn


def single(rnn, kind, width, suffix, **options) -> Any:
    """The net of one layer and direction that has the weights of a suffix."""
    one = layer(kind, width, rnn.hidden_size, **options)
    state = {key.replace(suffix, "_l0"): value for key, value in rnn.state_dict().items() if key_of(key) == suffix}
    one.load_state_dict(state)
    return one


def key_of(key: str) -> str:
    """The suffix of a weight's name in a state dict."""
    name = key.split(".")[1] if key.startswith("parametrizations") else key
    return name[name.index("_l") :]


@each_kind
def test_a_net_of_several_layers_is_its_layers_one_after_the_other(kind):
    rnn = layer(kind, 3, 4, 2, bidirectional=True)
    x = torch.randn(6, 2, 3, dtype=DOUBLE)
    out, last = rnn(x)
    lasts = []
    for depth, width in enumerate((3, 8)):
        forward, h_forward = single(rnn, kind, width, f"_l{depth}")(x)
        backward, h_backward = single(rnn, kind, width, f"_l{depth}_reverse")(x.flip(0))
        lasts += [h_forward[0], h_backward[0]]
        x = torch.cat([forward, backward.flip(0)], -1)
    assert torch.allclose(out, x)
    assert torch.allclose(last, torch.stack(lasts))


@each_kind
def test_batch_first_and_given_first_states_are_as_torch_has_them(kind):
    rnn = layer(kind, 3, 4, 2)
    x, h_0 = torch.randn(6, 2, 3, dtype=DOUBLE), torch.randn(2, 2, 4, dtype=DOUBLE)
    out, last = rnn(x, h_0)
    assert torch.equal(last[1], out[-1])
    assert torch.allclose(rnn(x[3:], rnn(x[:3], h_0)[1])[0], out[3:])
    other = layer(kind, 3, 4, 2, batch_first=True)
    other.load_state_dict(rnn.state_dict())
    assert torch.allclose(other(x.transpose(0, 1), h_0)[0].transpose(0, 1), out)


@each_kind
def test_gradients_are_those_of_finite_differences(kind):
    rnn = layer(kind, 2, 4, trainable_h0=True, activation="tanh")
    names = [name for name, _ in rnn.named_parameters()]

    def run(x, *values) -> Any:
        return torch.func.functional_call(rnn, dict(zip(names, values, strict=True)), (x,))

    x = torch.randn(3, 2, 2, dtype=DOUBLE, requires_grad=True)
    values = [p.detach().clone().requires_grad_() for p in rnn.parameters()]
    assert torch.autograd.gradcheck(run, (x, *values))


@each_kind
def test_a_free_matrix_is_drawn_as_a_frame_and_moves_as_it_likes(kind):
    rnn: Any = kind(3, 6, parametrization=None)
    assert isinstance(rnn.weight_hh_l0, nn.Parameter)
    assert sk.metrics.orthogonality_error(rnn.weight_hh_l0) < 1e-5
    # FSDP2 takes no others.
    assert rnn.weight_hh_l0.is_contiguous()
    assert not sk.drift(rnn)
    rnn(torch.randn(4, 2, 3))[0].square().sum().backward()
    torch.optim.SGD(rnn.parameters(), lr=0.1).step()
    assert sk.metrics.orthogonality_error(rnn.weight_hh_l0) > 1e-3
    twin = copy.deepcopy(rnn)
    assert torch.equal(twin.weight_hh_l0, rnn.weight_hh_l0)
    assert torch.equal(kind(3, 6, parametrization=None, init="identity").weight_hh_l0, torch.eye(6))
    drawn = [kind(3, 6, parametrization=None, generator=seeds.generator(1)) for _ in range(2)]
    assert torch.equal(*(net.weight_hh_l0 for net in drawn))


@pytest.mark.parametrize("kind", [OrthogonalRNN, LinearTransitionRNN], ids=lambda kind: kind.__name__)
def test_a_free_complex_matrix_is_held_as_real_and_imaginary_part(kind):
    free: Any = kind(3, 4, parametrization=None, field="complex")
    w = torch.complex(*free.weight_hh_l0.chunk(2))
    assert sk.metrics.orthogonality_error(w) < 1e-5
    bound: Any = kind(3, 4, field="complex")
    bound.weight_hh_l0 = w.detach()
    state = {key: value for key, value in free.state_dict().items() if key != "weight_hh_l0"}
    bound.load_state_dict(state, strict=False)
    x = torch.randn(5, 2, 3)
    assert torch.allclose(free(x)[0], bound(x)[0], atol=1e-5)
    assert free.double()(x.double())[0].dtype == torch.complex128
    assert not any(p.is_complex() for p in free.parameters())


@each_kind
def test_input_matrices_take_parametrizations_too(kind):
    x = torch.randn(4, 2, 3)
    ours, torchs = kind(3, 6), kind(3, 6)
    sk.orthogonal(ours, "weight_ih_l0")
    nn.utils.parametrizations.weight_norm(torchs, "weight_ih_l0")
    for rnn in (ours, torchs):
        rnn(x)[0].sum().backward()
        assert all(p.grad is not None for p in rnn.parameters())
        assert rnn.double()(x.double())[0].dtype == DOUBLE


@each_kind
def test_dropout_stands_between_layers(kind):
    rnn: Any = kind(3, 4, 2, dropout=0.5)
    x = torch.randn(5, 2, 3)
    assert not torch.equal(rnn(x)[0], rnn(x)[0])
    rnn.eval()
    assert torch.equal(rnn(x)[0], rnn(x)[0])


def test_goru_has_real_states_and_without_biases_open_gates_half_way():
    with pytest.raises(errors.OptionError, match="GORU has no option 'field': its states are real"):
        GORU(3, 4, field="complex")
    rnn: Any = GORU(3, 4, bias=False, activation="tanh", dtype=DOUBLE)
    assert {name.partition("_l0")[0] for name, _ in rnn.named_parameters()} == {
        "weight_ih",
        "weight_gates",
        "parametrizations.weight_hh",
    }
    for weight in (rnn.weight_ih_l0, rnn.weight_gates_l0):
        nn.init.zeros_(weight)
    h_0 = torch.randn(1, 2, 4, dtype=DOUBLE)
    out, _ = rnn(torch.randn(1, 2, 3, dtype=DOUBLE), h_0)
    assert torch.allclose(out, h_0 / 2 + torch.tanh(h_0 @ rnn.weight_hh_l0.mT / 2) / 2)


@each_kind
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(parametrization=None, negative=3), errors.OptionError, "without a parametrization has no option"),
        (dict(parametrization=None, init="har"), errors.OptionError, 'did you mean "haar"'),
        (dict(activation="oplu", hidden_size=5), errors.OptionError, "even hidden_size"),
        (dict(num_layers=0), errors.OptionError, "num_layers >= 1"),
        (dict(hidden_size=0), errors.OptionError, "hidden_size"),
        (dict(dropout=2.0), errors.OptionError, "dropout"),
        (dict(dtype=torch.complex64), errors.DtypeError, "complex64"),
    ],
)
def test_bad_options_are_said_in_one_sentence(kind, options, error, text):
    with pytest.raises(error) as caught:
        kind(**{"input_size": 3, "hidden_size": 4, **options})
    assert text in str(caught.value)
    assert kind.__name__ in str(caught.value) or "init" in options


@each_kind
def test_the_warning_of_dropout_names_the_layer_and_the_line(kind):
    with pytest.warns(UserWarning, match=rf"^{kind.__name__} has dropout=0\.5") as caught:
        kind(3, 4, dropout=0.5)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(3, 4, 2, dropout=0.5)
        kind(3, 4, dropout=0.0)


@pytest.mark.parametrize("options", [{}, {"parametrization": None, "init": "identity"}, {"trainable_h0": True}])
@pytest.mark.parametrize("layer", [OrthogonalRNN, GORU, LinearTransitionRNN])
def test_reset_parameters_fills_a_layer_that_was_made_without_memory(layer, options):
    rnn: Any = layer(3, 8, 2, bidirectional=True, **options).to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for name, p in rnn.named_parameters():
            if "parametrizations" not in name:
                p.fill_(torch.nan)
    rnn.reset_parameters()
    assert torch.isfinite(rnn(torch.randn(9, 2, 3))[0]).all()
    assert all(drift.bits_lost < 1 for drift in sk.drift(rnn).values())


@pytest.mark.parametrize("field", ["real", "complex"])
@pytest.mark.parametrize("made", [(OrthogonalRNN, {}), (RotationRNN, {"heads": 2})], ids=lambda made: made[0].__name__)
def test_a_baked_layer_is_cast_as_a_whole_and_drawn_anew_as_a_frame(made, field):
    layer, options = made
    rnn: Any = sk.bake(layer(3, 8, field=field, **options))
    before = rnn(x := torch.randn(9, 2, 3, generator=seeds.generator()))[0]
    out = rnn.double()(x.double())[0]
    assert {p.dtype.to_real() for p in rnn.parameters()} == {torch.float64}
    assert torch.allclose(out, before.to(out.dtype), atol=1e-5)
    w = getattr(rnn, f"{rnn.frame}_l0")
    was = w.detach().clone()
    rnn.reset_parameters()
    assert torch.dist(w, was) > 0.1
    assert torch.allclose(w.mH @ w, torch.eye(w.shape[-1], dtype=w.dtype), atol=1e-14)
    assert {p.dtype.to_real() for p in rnn.float().parameters()} == {torch.float32}
