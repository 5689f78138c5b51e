"""`OrthogonalRNN.from_torch`: a trained torch.nn.RNN goes on as an orthogonal one, or is refused whole."""

import copy
import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.nn import OrthogonalRNN

DOUBLE = torch.float64


def framed(*sizes: Any, **options: Any) -> Any:
    """A torch.nn.RNN whose recurrent matrices are frames."""
    rnn = nn.RNN(*sizes, **options)
    for name, weight in rnn.named_parameters():
        if name.startswith("weight_hh"):
            nn.init.orthogonal_(weight)
    return rnn


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("init", ["project", None])
def test_frames_are_taken_over_to_rounding(nonlinearity, bidirectional, batch_first, bias, layers, init):
    options = dict(nonlinearity=nonlinearity, bidirectional=bidirectional, batch_first=batch_first, bias=bias)
    source = framed(3, 5, layers, dtype=DOUBLE, **options)
    hidden = {key: options[key] for key in ("nonlinearity", "batch_first")}
    h = torch.randn(layers * (1 + bidirectional), 4 if batch_first else 6, 5, dtype=DOUBLE)
    x = torch.randn(4, 6, 3, dtype=DOUBLE)
    for taken in (
        OrthogonalRNN.from_torch(source, init=init),
        OrthogonalRNN.from_torch(source.state_dict(), init=init, **hidden),
    ):
        for arguments in ((x,), (x, h), (x[0],)):
            for ours, torchs in zip(taken(*arguments), source(*arguments), strict=True):
                assert torch.allclose(ours, torchs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed_sequences_go_on_as_before(enforce_sorted):
    source = framed(3, 5, 2, bidirectional=True)
    taken = OrthogonalRNN.from_torch(source)
    packed = pack_padded_sequence(torch.randn(6, 3, 3), [6, 4, 1], enforce_sorted=enforce_sorted)
    h = torch.randn(4, 3, 5)
    for arguments in ((packed,), (packed, h)):
        (ours, last), (torchs, expected) = taken(*arguments), source(*arguments)
        assert torch.allclose(pad_packed_sequence(ours)[0], pad_packed_sequence(torchs)[0], rtol=0, atol=1e-5)
        assert torch.allclose(last, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("parametrization", ["cayley", "householder", "givens", "rebased", "stiefel", None])
def test_a_bidirectional_net_of_two_layers_takes_its_nearest_frames(parametrization):
    source = nn.RNN(3, 6, num_layers=2, bidirectional=True, batch_first=True)
    taken: Any = OrthogonalRNN.from_torch(source, parametrization=parametrization)
    for suffix in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        weight = getattr(source, f"weight_hh{suffix}")
        near = weight if parametrization is None else sk.functional.nearest_frame(weight)
        assert torch.allclose(getattr(taken, f"weight_hh{suffix}"), near, atol=1e-5)
        assert torch.equal(getattr(taken, f"weight_ih{suffix}"), getattr(source, f"weight_ih{suffix}"))
        bias = getattr(source, f"bias_ih{suffix}") + getattr(source, f"bias_hh{suffix}")
        assert torch.allclose(getattr(taken, f"bias{suffix}"), bias)
    assert len(sk.drift(taken)) == (0 if parametrization is None else 4)
    out, h_n = taken(torch.randn(2, 7, 3))
    assert out.shape == (2, 7, 12)
    assert h_n.shape == (4, 2, 6)
    out.square().mean().backward()
    assert all(p.grad is not None for p in taken.parameters())


def test_every_option_is_taken_over():
    source = nn.RNN(3, 4, 3, "relu", False, True, 0.25, True, dtype=DOUBLE).eval()  # type: ignore[call-overload]
    source.weight_ih_l1.requires_grad_(False)
    source.weight_hh_l2.requires_grad_(False)
    taken: Any = OrthogonalRNN.from_torch(source)
    for name in ("input_size", "hidden_size", "num_layers", "batch_first", "dropout", "bidirectional", "training"):
        assert getattr(taken, name) == getattr(source, name)
    assert taken.nonlinearity == "relu"
    assert taken.has_bias is False
    assert taken.weight_hh_l0.dtype is DOUBLE
    assert not taken.weight_ih_l1.requires_grad
    assert not taken.weight_hh_l2.requires_grad
    assert taken.weight_hh_l2_reverse.requires_grad
    asked = OrthogonalRNN.from_torch(source, batch_first=False, dropout=0.0, nonlinearity="tanh", backend="reference")
    assert (asked.batch_first, asked.dropout, asked.activation, asked.backend) == (False, 0.0, "tanh", "reference")


def test_the_source_stays_as_it_is_and_nothing_is_shared():
    source = nn.RNN(3, 4, 2)
    before = copy.deepcopy(source.state_dict())
    taken: Any = OrthogonalRNN.from_torch(source)
    with torch.no_grad():
        for p in taken.parameters():
            p.zero_()
    assert all(torch.equal(value, before[key]) for key, value in source.state_dict().items())


def state(**changes: Any) -> dict[str, Any]:
    """The state dict of nn.RNN(3, 4, 2) with other entries; None takes one out."""
    return {key: value for key, value in {**nn.RNN(3, 4, 2).state_dict(), **changes}.items() if value is not None}


SINGULAR = torch.ones(4, 4)
REFLECTION = torch.diag(torch.tensor([-1.0, 1, 1, 1]))


@pytest.mark.parametrize(
    ("source", "options", "error", "word"),
    [
        (nn.LSTM(3, 4), {}, errors.OptionError, "FrameGates"),
        (nn.GRU(3, 4).state_dict(), {}, errors.ShapeError, "FrameGates"),
        (OrthogonalRNN(3, 4).state_dict(), {}, errors.CheckpointError, "weight_ih_l0"),
        (state(weight_hh_l0=None), {}, errors.CheckpointError, "weight_hh_l0"),
        (state(weight_ih_l3=torch.zeros(4, 4)), {}, errors.CheckpointError, "weight_ih_l2"),
        ({f"rnn.{key}": value for key, value in state().items()}, {}, errors.CheckpointError, "one net alone"),
        (state(weight_ih_l1=torch.zeros(4, 8)), {}, errors.ShapeError, "weight_ih_l1"),
        (state(bias_ih_l0=torch.zeros(4, dtype=DOUBLE)), {}, errors.DtypeError, "one dtype"),
        (state(weight_hh_l1=SINGULAR * torch.nan), {}, errors.NonFiniteError, "weight_hh_l1"),
        (state(weight_hh_l1=SINGULAR), {}, errors.RankError, "weight_hh_l1"),
        (state(weight_hh_l0=REFLECTION), {"parametrization": "matrix_exp"}, errors.ImageError, "weight_hh_l0"),
        (state(), {"init": "haar"}, errors.OptionError, "project"),
        (nn.RNN(3, 4), {"field": "complex"}, errors.OptionError, "field"),
        (nn.RNN(3, 4).to("meta"), {}, errors.OptionError, "meta"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_with_its_name(source, options, error, word):
    with pytest.raises(error, match=word):
        OrthogonalRNN.from_torch(source, **options)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.bfloat16])
def test_the_dtype_stays(dtype):
    taken: Any = OrthogonalRNN.from_torch(nn.RNN(3, 4, dtype=dtype))
    assert taken.weight_hh_l0.dtype is taken.weight_ih_l0.dtype is taken.bias_l0.dtype is dtype
    assert taken(torch.zeros(5, 2, 3, dtype=dtype))[0].dtype is dtype


def mask(rnn: nn.RNN, name: str) -> nn.Module:
    return prune.random_unstructured(rnn, name, 0.5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("put", "remove"),
    [
        (parametrizations.weight_norm, "parametrize.remove_parametrizations"),
        (parametrizations.spectral_norm, "parametrize.remove_parametrizations"),
        (nn.utils.weight_norm, "remove_weight_norm"),
        (nn.utils.spectral_norm, "remove_spectral_norm"),
        (mask, "prune.remove"),
    ],
)
def test_a_weight_under_something_is_refused_until_it_is_removed(put, remove):
    rnn = nn.RNN(3, 4, 2)
    put(rnn, "weight_hh_l1")
    for source in (rnn, rnn.state_dict()):
        with pytest.raises(errors.CheckpointError, match="weight_hh_l1"):
            OrthogonalRNN.from_torch(source)
    operator.attrgetter(remove)(nn.utils)(rnn, "weight_hh_l1")
    OrthogonalRNN.from_torch(rnn)
