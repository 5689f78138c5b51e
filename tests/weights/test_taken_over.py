"""`from_torch`: a trained RNN goes on as an orthogonal one, an LSTM or GRU with a frame a gate, or is refused whole."""

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
from stiefelkit.models import FrameGates
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.testing import seeds

DOUBLE = torch.float64
every_kind = pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.RNN, {"nonlinearity": "tanh"}), (nn.RNN, {"nonlinearity": "relu"}), (nn.LSTM, {}), (nn.GRU, {})],
)
both_kinds = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])


@pytest.fixture(autouse=True)
def _seed() -> None:
    seeds.reseed()


def framed(kind: Any, *sizes: int, **options: Any) -> Any:
    """A net of torch's whose recurrent matrices, or the blocks in them, are frames."""
    rnn = kind(*sizes, **options)
    for name, weight in rnn.named_parameters():
        if name.startswith("weight_hh"):
            for block in weight.detach().split(rnn.hidden_size):
                nn.init.orthogonal_(block)
    return rnn


def take(source: Any, kind: Any, **options: Any) -> Any:
    return (OrthogonalRNN if kind is nn.RNN else FrameGates).from_torch(source, **options)


def tensors(found: Any) -> list[Any]:
    """Outputs and last states in one list."""
    out, last = found
    out = pad_packed_sequence(out)[0] if not isinstance(out, torch.Tensor) else out
    return [out, *(last if isinstance(last, tuple) else [last])]


def states(kind: Any, *shape: int) -> Any:
    h, c = torch.randn(2, *shape, dtype=DOUBLE)
    return (h, c) if kind is nn.LSTM else h


def require_same(taken: Any, source: Any, *calls: Any) -> None:
    for arguments in calls:
        for ours, torchs in zip(tensors(taken(*arguments)), tensors(source(*arguments)), strict=True):
            assert torch.allclose(ours, torchs, rtol=0, atol=1e-12)


@every_kind
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("init", ["project", None])
def test_frames_are_taken_over_to_rounding(kind, options, bidirectional, batch_first, bias, layers, init):
    source = framed(
        kind, 3, 5, layers, bidirectional=bidirectional, batch_first=batch_first, bias=bias, dtype=DOUBLE, **options
    )
    x, rows = torch.randn(4, 6, 3, dtype=DOUBLE), layers * (1 + bidirectional)
    calls = [(x,), (x, states(kind, rows, 4 if batch_first else 6, 5)), (x[0],), (x[0], states(kind, rows, 5))]
    require_same(take(source, kind, init=init), source, *calls)


@every_kind
@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed_sequences_go_on_as_before(kind, options, enforce_sorted):
    source = framed(kind, 3, 5, 2, bidirectional=True, dtype=DOUBLE, **options)
    lengths = [6, 4, 1] if enforce_sorted else [1, 6, 4]
    packed = pack_padded_sequence(torch.randn(6, 3, 3, dtype=DOUBLE), lengths, enforce_sorted=enforce_sorted)
    require_same(take(source, kind), source, (packed,), (packed, states(kind, 4, 3, 5)))


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
    before = copy.deepcopy(source.state_dict())
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
    with torch.no_grad():
        for p in taken.parameters():
            p.zero_()
    assert all(torch.equal(value, before[key]) for key, value in source.state_dict().items())


def changed(**weights: Any) -> nn.RNN:
    """An nn.RNN(3, 4, 2) with other values."""
    rnn = nn.RNN(3, 4, 2)
    rnn.load_state_dict(weights, strict=False)
    return rnn


SINGULAR = torch.ones(4, 4)
SINGULAR_GATES: Any = nn.GRU(3, 4)
nn.init.zeros_(SINGULAR_GATES.weight_hh_l0)
REFLECTION = torch.diag(torch.tensor([-1.0, 1, 1, 1]))


@pytest.mark.parametrize(
    ("layer", "source", "options", "error", "word"),
    [
        (OrthogonalRNN, nn.LSTM(3, 4), {}, errors.OptionError, "FrameGates"),
        (OrthogonalRNN, OrthogonalRNN(3, 4), {}, errors.OptionError, "torch.nn.RNN"),
        (OrthogonalRNN, nn.RNN(3, 4).state_dict(), {}, errors.OptionError, "load_state_dict"),
        (OrthogonalRNN, changed(weight_hh_l1=SINGULAR * torch.nan), {}, errors.NonFiniteError, "weight_hh_l1"),
        (OrthogonalRNN, changed(weight_hh_l1=SINGULAR), {}, errors.RankError, "weight_hh_l1"),
        (
            OrthogonalRNN,
            changed(weight_hh_l0=REFLECTION),
            {"parametrization": "matrix_exp"},
            errors.ImageError,
            "weight_hh_l0",
        ),
        (OrthogonalRNN, nn.RNN(3, 4), {"init": "haar"}, errors.OptionError, "project"),
        (OrthogonalRNN, nn.RNN(3, 4), {"field": "complex"}, errors.OptionError, "field"),
        (OrthogonalRNN, nn.RNN(3, 4).to("meta"), {}, errors.OptionError, "meta"),
        (FrameGates, nn.RNN(3, 4), {}, errors.OptionError, "OrthogonalRNN"),
        (FrameGates, nn.LSTM(3, 4, proj_size=2), {}, errors.CheckpointError, "weight_hr_l0"),
        (FrameGates, SINGULAR_GATES, {}, errors.RankError, "weight_hh_l0"),
        (FrameGates, nn.LSTM(3, 4), {"init": None}, errors.NotAFrameError, "project"),
        (FrameGates, nn.LSTM(3, 4), {"num_layers": 2}, errors.OptionError, "num_layers"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_with_its_name(layer, source, options, error, word):
    with pytest.raises(error, match=word):
        layer.from_torch(source, **options)


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
    with pytest.raises(errors.CheckpointError, match="weight_hh_l1"):
        OrthogonalRNN.from_torch(rnn)
    operator.attrgetter(remove)(nn.utils)(rnn, "weight_hh_l1")
    OrthogonalRNN.from_torch(rnn)


@both_kinds
def test_each_block_becomes_its_nearest_frame_and_the_rest_stays_bit_for_bit(kind):
    source = kind(3, 5, 2)
    taken = FrameGates.from_torch(source)
    for name, weight in source.named_parameters():
        ours = getattr(taken, name)
        if not name.startswith("weight_hh"):
            assert torch.equal(ours, weight)
            continue
        for block, frame in zip(weight.split(5), ours, strict=True):
            u, _, vh = torch.linalg.svd(block.detach().double())
            assert torch.allclose(frame.double(), u @ vh, atol=1e-5)
    eps = torch.finfo(torch.float32).eps
    assert all(drift.error <= 1.2 * drift.limit + eps for drift in sk.drift(taken).values())


@both_kinds
def test_mode_dtype_and_what_is_trained_stay_and_nothing_is_shared(kind):
    source = kind(3, 5, 2, dropout=0.5, dtype=torch.bfloat16).eval()
    source.weight_ih_l0.requires_grad_(False)
    taken: Any = FrameGates.from_torch(source)
    assert (taken.training, taken.dropout, taken.batch_first) == (False, 0.5, False)
    assert taken.weight_hh_l0.dtype is taken.weight_ih_l0.dtype is torch.bfloat16
    assert not taken.weight_ih_l0.requires_grad
    assert taken.weight_hh_l0.requires_grad
    before = source.weight_ih_l1.clone()
    with torch.no_grad():
        taken.weight_ih_l1.zero_()
    assert torch.equal(source.weight_ih_l1, before)
    assert FrameGates.from_torch(source, dropout=0.0, batch_first=True).batch_first


@both_kinds
def test_a_net_without_biases_gets_none_that_are_trained(kind):
    taken = FrameGates.from_torch(kind(3, 5, bias=False))
    biases = [p for name, p in taken.named_parameters() if name.startswith("bias")]
    assert not any(p.requires_grad or p.any() for p in biases)


@both_kinds
def test_states_of_another_shape_are_refused(kind):
    taken = FrameGates.from_torch(kind(3, 5))
    for hx in (torch.zeros(1, 4, 4), (torch.zeros(1, 4, 4), torch.zeros(1, 4, 4))):
        with pytest.raises(errors.ShapeError, match="hx"):
            taken(torch.zeros(6, 4, 3), hx)
