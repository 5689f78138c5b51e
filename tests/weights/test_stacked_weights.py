"""Layers that keep several matrices in one weight: a frame of it all is warned about, with `blocks=` as the remedy."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit.metrics import orthogonality_error


class Conv1D(nn.Module):
    """As transformers has it: inputs by outputs."""

    def __init__(self, outputs: int, inputs: int):
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))


class Holder(nn.Module):
    def __init__(self, name: str, layer: nn.Module):
        super().__init__()
        self.add_module(name, layer)


FUSED: dict[str, tuple[Any, str, list[dict[str, Any]]]] = {
    "attention": (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight", [{"blocks": 3}, {"blocks": 6}]),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16), "self_attn.in_proj_weight", [{"blocks": 3}]),
    "GPT-2": (lambda: Conv1D(24, 8), "weight", [{"blocks": 3, "dim": 1}]),
    "GPT-2, across": (lambda: Holder("c_attn", Conv1D(16, 8)), "c_attn.weight", [{"blocks": 2, "dim": 1}]),
    "LSTMCell": (lambda: nn.LSTMCell(4, 8), "weight_hh", [{"blocks": 4}]),
    "LSTMCell, inputs": (lambda: nn.LSTMCell(4, 8), "weight_ih", [{"blocks": 4}]),
    "GRUCell": (lambda: nn.GRUCell(8, 8), "weight_hh", [{"blocks": 3}]),
    "a vision transformer": (lambda: Holder("qkv", nn.Linear(8, 24)), "qkv.weight", [{"blocks": 3}]),
    "shared keys": (lambda: Holder("qkv_proj", nn.Linear(8, 12)), "qkv_proj.weight", [{"blocks": (8, 2, 2)}]),
    "gate and up": (lambda: Holder("gate_up_proj", nn.Linear(8, 20)), "gate_up_proj.weight", [{"blocks": 2}]),
}


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("by", ["name", "where"])
def test_one_frame_of_what_a_layer_holds_side_by_side_is_warned_about_once_with_the_remedy(kind, by):
    make, name, remedies = FUSED[kind]
    chosen: dict[str, Any] = {by: name}
    with pytest.warns(UserWarning, match="became") as caught:
        sk.orthogonal(make(), **chosen)
    (said,) = [str(warning.message) for warning in caught]
    assert name.rpartition(".")[0] in said
    for remedy in [*remedies, {"blocks": 1}]:
        blocks, dim = remedy["blocks"], remedy.get("dim", 0)
        words = "blocks=(size, size, ...)" if isinstance(blocks, tuple) else f"blocks={blocks}"
        assert words + (", dim=1" if dim else "") in said
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model: Any = sk.orthogonal(make(), **chosen, **remedy)
        path, _, last = name.rpartition(".")
        w = getattr(model.get_submodule(path), last).detach()
        for q in w.chunk(blocks, dim) if isinstance(blocks, int) else w.split(blocks, dim):
            assert orthogonality_error(q if q.shape[0] >= q.shape[1] else q.mT) < 1e-6


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(8, 24), nn.RNNCell(8, 8), nn.Bilinear(3, 4, 2)),
        lambda: Conv1D(32, 8),
        lambda: Conv1D(8, 8),
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
        lambda: Holder("mqkvx", nn.Embedding(24, 8)),
    ],
)
def test_what_is_one_matrix_is_not_warned_about(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sk.orthogonal(make(), where="*weight*")
