"""`FrameGates.from_torch`: a trained LSTM or GRU goes on with a frame for each gate, or is refused whole."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.models import FrameGates
from stiefelkit.testing import seeds

DOUBLE = torch.float64
both_kinds = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])


@pytest.fixture(autouse=True)
def _seed() -> None:
    seeds.reseed()


def framed(kind: Any, *sizes: int, **options: Any) -> Any:
    """A net of torch's whose recurrent blocks are frames."""
    rnn = kind(*sizes, **options)
    for name, weight in rnn.named_parameters():
        if name.startswith("weight_hh"):
            for block in weight.detach().split(rnn.hidden_size):
                nn.init.orthogonal_(block)
    return rnn


def tensors(found: Any) -> list[Any]:
    """Outputs and last states in one list."""
    out, last = found
    return [out, *(last if isinstance(last, tuple) else [last])]


def states(kind: Any, *shape: int) -> Any:
    h, c = torch.randn(2, *shape, dtype=DOUBLE)
    return (h, c) if kind is nn.LSTM else h


@both_kinds
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_frames_are_taken_over_to_rounding(kind, bidirectional, batch_first, bias, layers):
    source = framed(kind, 3, 5, layers, bidirectional=bidirectional, batch_first=batch_first, bias=bias, dtype=DOUBLE)
    x, rows = torch.randn(4, 6, 3, dtype=DOUBLE), layers * (1 + bidirectional)
    calls = [(x,), (x, states(kind, rows, 4 if batch_first else 6, 5)), (x[0],), (x[0], states(kind, rows, 5))]
    for taken in (
        FrameGates.from_torch(source, init=None),
        FrameGates.from_torch(source.state_dict(), batch_first=batch_first),
    ):
        for arguments in calls:
            for ours, torchs in zip(tensors(taken(*arguments)), tensors(source(*arguments)), strict=True):
                assert torch.allclose(ours, torchs, rtol=0, atol=1e-12)


@both_kinds
@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed_sequences_go_on_as_before(kind, enforce_sorted):
    source = framed(kind, 3, 5, 2, bidirectional=True, dtype=DOUBLE)
    taken = FrameGates.from_torch(source)
    lengths = [6, 4, 1] if enforce_sorted else [1, 6, 4]
    packed = pack_padded_sequence(torch.randn(6, 3, 3, dtype=DOUBLE), lengths, enforce_sorted=enforce_sorted)
    for arguments in ((packed,), (packed, states(kind, 4, 3, 5))):
        (ours, *last), (torchs, *expected) = tensors(taken(*arguments)), tensors(source(*arguments))
        for a, b in zip(
            [pad_packed_sequence(ours)[0], *last], [pad_packed_sequence(torchs)[0], *expected], strict=True
        ):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)


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


SINGULAR: Any = nn.GRU(3, 4)
nn.init.zeros_(SINGULAR.weight_hh_l0)


@pytest.mark.parametrize(
    ("source", "options", "error", "word"),
    [
        (nn.RNN(3, 4), {}, errors.OptionError, "OrthogonalRNN"),
        (nn.RNN(3, 4).state_dict(), {}, errors.ShapeError, "weight_hh_l0"),
        (nn.LSTM(3, 4, proj_size=2), {}, errors.CheckpointError, "weight_hr_l0"),
        (SINGULAR, {}, errors.RankError, "weight_hh_l0"),
        (nn.LSTM(3, 4), {"init": None}, errors.NotAFrameError, "project"),
        (nn.LSTM(3, 4), {"num_layers": 2}, errors.OptionError, "num_layers"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_by_name(source, options, error, word):
    with pytest.raises(error, match=word):
        FrameGates.from_torch(source, **options)


@both_kinds
def test_states_of_another_shape_are_refused(kind):
    taken = FrameGates.from_torch(kind(3, 5))
    for hx in (torch.zeros(1, 4, 4), (torch.zeros(1, 4, 4), torch.zeros(1, 4, 4))):
        with pytest.raises(errors.ShapeError, match="hx"):
            taken(torch.zeros(6, 4, 3), hx)
