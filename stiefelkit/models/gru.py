"""GRU, the gated baseline with one state."""

from typing import Any

from torch import nn

from stiefelkit.models.gates import gated
from stiefelkit.models.parts import Map, read_out
from stiefelkit.models.sequence import SequenceModel

__all__ = ["gru"]


def gru(
    input_size: int, hidden_size: int, output_size: int, *, parametrization: Map = None, **options: Any
) -> SequenceModel:
    """Builds torch's GRU with one bias vector a gate.

    torch's GRU has two bias vectors; the second is zero and not trained here, as in `lstm`. Weights are Glorot-uniform,
    the read-out too, and biases zero. With a parametrization each of the three n x n recurrent blocks is a frame. The
    activations are those of torch's kernel.

    Parameters: 3n(n + m + 1) + np + p.

    Args:
        input_size: m.
        hidden_size: n.
        output_size: p.
        parametrization: of each gate's recurrent block, any real one; None for free weights.
        **options: of the parametrization, and `init=`.

    References:
        Cho, van Merrienboer, Gulcehre, Bahdanau, Bougares, Schwenk, Bengio, Learning phrase representations using RNN
        encoder-decoder for statistical machine translation, EMNLP 2014.
    """
    return SequenceModel(
        gated(nn.GRU, input_size, hidden_size, parametrization, options), read_out(hidden_size, output_size)
    )
