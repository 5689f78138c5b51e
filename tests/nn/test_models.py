"""The papers' systems: parameter counts, initial values, choices."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.scan import activations

# name, (input, hidden, output), count: the figures that the papers print, in full.
PAPERS = [
    ("scornn", (2, 170, 1), 15046),  # adding, Helfrich et al.
    ("scornn", (1, 360, 10), 68950),  # pixel MNIST, "69k"
    ("scurnn", (1, 116, 10), 16482),  # pixel MNIST, Maduranga et al.
    ("scurnn", (2, 116, 1), 14617),  # adding
    ("scurnn", (129, 128, 129), 83073),  # TIMIT
    ("full_urnn", (1, 116, 10), 116**2 + 116 * (2 + 20 + 3) + 10),  # pixel MNIST, Wisdom et al., "16k"
    ("full_urnn", (10, 128, 9), 128**2 + 128 * (20 + 18 + 3) + 9),  # copying, "22k"
    ("lstm", (10, 68, 9), 4 * 68 * (68 + 10 + 1) + 68 * 9 + 9),
    ("gru", (1, 128, 10), 3 * 128 * (128 + 1 + 1) + 1280 + 10),
    ("ornn:reflections=32", (1, 256, 10), 11034),  # pixel MNIST, "11k"
    ("ornn", (1, 20, 10), 20 * 21 // 2 + 20 + 20 + 200 + 10 + 20),
    ("restricted_urnn", (10, 470, 9), 10 * 470 + 2 * 470 * (10 + 9) + 9),  # copying, "22k", Wisdom et al.
    ("eurnn:layers=2", (2, 512, 1), 1534 + 512 * 2 * 2 + 512 + 512 + 1),  # 1534 = 2 (n - 1) + n in W
    ("eurnn:layout=fft", (2, 512, 1), 5120 + 512 * 2 * 2 + 512 + 512 + 1),  # 5120 = n log2(n) + n in W
    ("eurnn", (2, 16, 1), 16**2 + 16 * 2 * 2 + 16 + 16 + 1),  # as many layers as units: the whole of U(n)
    ("exprnn", (1, 360, 10), 68950),  # pixel MNIST, as scoRNN, "69k"
    ("lie_urnn", (2, 30, 1), 900 + 2 * 60 + 30 + 60 + 1),
    ("margin_rnn", (10, 128, 9), 128 * 127 + 128 + 1280 + 128 + 9 * 128 + 9 + 128),
    ("irnn", (1, 100, 10), 100**2 + 100 + 100 + 1000 + 10 + 100),
    ("henaff_rnn", (10, 80, 9), 80**2 + 800 + 80 + 720 + 9),
    # Of a block: norm; moduli, angles, scales; B, C; D; gated linear unit.
    ("lru:width=32,num_layers=3", (1, 128, 10), 64 + 3 * (64 + 3 * 64 + 4 * 64 * 32 + 32 + 64 * 33) + 330),
    ("goru", (10, 128, 9), 64 * 7 + 2 * 128**2 + 3 * 1280 + 3 * 128 + 9 * 128 + 9),
]


def parsed(name: str) -> tuple[str, dict[str, Any]]:
    """A model and its options, "lru:width=32,num_layers=3"."""
    name, _, options = name.partition(":")
    given = dict(option.split("=") for option in options.split(",") if option)
    return name, {key: int(value) if value.isdigit() else value for key, value in given.items()}


@pytest.mark.parametrize(("name", "sizes", "count"), PAPERS)
def test_parameter_counts_are_the_papers(name, sizes, count):
    name, options = parsed(name)
    assert sk.models.count_parameters(sk.models.create(name, *sizes, **options)) == count


REAL = ["scornn", "ornn", "exprnn", "margin_rnn", "irnn", "henaff_rnn", "goru"]
COMPLEX = ["scurnn", "full_urnn", "restricted_urnn", "eurnn", "lie_urnn"]
GATED = ["lstm", "gru"]
BLOCKS = ["lru", "reflector", "rotrnn"]
MAPS = ["cayley", "householder", "givens", "matrix_exp", "margin", "rebased", "stiefel"]


def test_the_lists_here_hold_every_model():
    assert sorted(REAL + COMPLEX + GATED + BLOCKS) == sk.models.names()


@pytest.mark.parametrize(
    ("name", "parametrization"),
    [
        *((name, parametrization) for name in REAL + GATED for parametrization in (*MAPS, None)),
        *((name, parametrization) for name in COMPLEX for parametrization in (*MAPS, "fourier", None)),
    ],
)
def test_every_model_takes_every_map_of_its_field(name, parametrization):
    net: Any = sk.models.create(name, 2, 4, 3, parametrization=parametrization)
    if parametrization is None:
        assert not sk.drift(net)
        assert isinstance(net.rnn.weight_hh_l0, nn.Parameter)
    else:
        assert type(net.rnn.parametrizations.weight_hh_l0.param) is sk.available()[parametrization]
        assert all(found.error <= 1e-5 for found in sk.drift(net).values())
    out = net(torch.randn(2, 5, 2))
    assert out.shape == (2, 5, 3)
    out.square().sum().backward()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "activation"),
    [*((name, key) for name in REAL for key in activations.names()), *((name, "identity") for name in COMPLEX)],
)
def test_every_model_takes_every_activation_of_its_field(name, activation):
    net: Any = sk.models.create(name, 2, 4, 3, activation=activation)
    assert net.rnn.activation == activation
    assert torch.isfinite(net(torch.randn(2, 5, 2))).all()
    if name in REAL:
        assert sk.models.count_parameters(net) == sk.models.count_parameters(sk.models.create(name, 2, 4, 3))
    else:
        with pytest.raises(errors.DtypeError, match="tanh"):
            sk.models.create(name, 2, 4, 3, activation="tanh")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*REAL, *COMPLEX])
def test_models_read_sequences_in_sixteen_bits(name, dtype):
    net = sk.models.create(name, 2, 4, 3)
    x = torch.randn(2, 5, 2)
    exact = net(x)
    half = net.to(dtype)(x.to(dtype))
    assert half.dtype is dtype
    assert torch.allclose(half.float(), exact, rtol=0.05, atol=0.05)


def test_options_of_another_map_apply():
    net: Any = sk.models.create("scornn", 2, 8, 3, parametrization="householder", reflections=2, init="identity")
    assert net.rnn.parametrizations.weight_hh_l0.param.reflections == 2
    net = sk.models.create("eurnn", 2, 8, 3, parametrization="cayley", init="helfrich")
    assert net.rnn.parametrizations.weight_hh_l0.scheme == "helfrich"
    net = sk.models.create("irnn", 2, 8, 3, init="haar", backend="reference")
    assert "backend='reference'" in repr(net.rnn)
    assert sk.metrics.orthogonality_error(net.rnn.weight_hh_l0) < 1e-5
    net = sk.models.create("lstm", 2, 8, 3, parametrization="householder", reflections=2)
    assert net.rnn.parametrizations.weight_hh_l0.param.shape == (4, 8, 8)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_gates_of_frames_take_one_sequence_as_other_models_do(name):
    net: Any = sk.models.create(name, 2, 4, 3, parametrization="cayley", bidirectional=True)
    x = torch.randn(5, 2)
    assert torch.equal(net(x), net(x[None])[0])
    assert torch.equal(net(x, last_only=True), net(x[None], last_only=True)[0])
    for wrong in (torch.randn(3, 5, 1), torch.randn(2), torch.randn(1, 3, 5, 2)):
        with pytest.raises(errors.ShapeError, match="FrameGates"):
            net(wrong)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_take_the_options_of_their_layer(name):
    own = {"normalize": False} if name == "rotrnn" else {}
    net: Any = sk.models.create(name, 2, 8, 3, backend="reference", trainable_h0=True, **own)
    for block in net.rnn.blocks:
        assert block.rnn.backend == "reference"
        assert block.rnn.h0_l0.requires_grad
        assert name == "reflector" or block.rnn.normalize == (name != "rotrnn")
    assert torch.isfinite(net(torch.randn(2, 5, 2))).all()


@pytest.mark.parametrize(
    ("name", "n", "options", "error", "word"),
    [
        ("scorn", 2, {}, errors.UnknownNameError, 'did you mean "scornn"'),
        ("scornn", 0, {}, errors.OptionError, "hidden_size"),
        ("scornn", 2, {"negativ": 1}, errors.OptionError, 'did you mean "negative"'),
        ("full_urnn", 2, {"bias_bound": -1.0}, errors.OptionError, "bias_bound"),
        ("scornn", 4, {"parametrization": "householder", "negative": 2}, errors.OptionError, "householder"),
        ("scornn", 4, {"parametrization": None, "negative": 2}, errors.OptionError, "without a parametrization"),
        ("eurnn", 4, {"output_init": "theirs"}, errors.OptionError, "authors"),
        ("goru", 6, {}, errors.DtypeError, "power of two"),
        ("irnn", 4, {"input_std": 0.0}, errors.OptionError, "input_std"),
        ("lstm", 4, {"backend": "reference"}, errors.OptionError, "backend"),
        ("lstm", 4, {"activation": "relu"}, errors.OptionError, "part of the model"),
        ("lstm", 4, {"num_layers": 0, "parametrization": "cayley"}, errors.OptionError, "num_layers"),
        ("gru", 4, {"bidirectional": "yes", "parametrization": "cayley"}, errors.OptionError, "bidirectional"),
        ("reflector", 4, {"additive": False, "width": 2}, errors.OptionError, "width"),
        ("gru", 4, {"init": "haar"}, errors.OptionError, "parametrization"),
    ],
)
def test_bad_models_are_refused_by_name(name, n, options, error, word):
    with pytest.raises(error, match=word):
        sk.models.create(name, 1, n, 3, **options)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("name", sk.models.names())
def test_packed_sequences_are_the_sequences_one_by_one(name, last_only):
    net: Any = sk.models.create(name, 2, 8, 3)
    each = [torch.randn(length, 2) for length in (3, 5, 4)]
    out = net(pack_sequence(each, enforce_sorted=False), last_only)
    alone = [net(x[None], last_only)[0] for x in each]
    outs = out if last_only else unpack_sequence(out)
    for ours, expected in zip(outs, alone, strict=True):
        torch.testing.assert_close(ours, expected)
