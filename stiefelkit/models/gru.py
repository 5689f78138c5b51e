"""GRU, the gated baseline with one state."""

from functools import partial

from torch import nn

from stiefelkit.models.gates import gated
from stiefelkit.models.sequence import named, recurrent


@recurrent(partial(gated, nn.GRU), activation=None)
def gru(rnn: nn.Module, *, gate_bias: float = 1.0) -> None:
    """Builds torch's GRU with one bias vector a gate, gate biases 1.

    torch's GRU has two bias vectors; the second is zero and not trained here, as in `lstm`. Weights are Glorot-uniform,
    the read-out too, with zero bias. As in TensorFlow's cell the reset gate starts open, and the update gate keeps the
    state. With a parametrization each of the three n x n recurrent blocks is a frame. The activations are those of
    torch's kernel.

    Parameters: 3n(n + m + 1) + np + p.

    `gate_bias` is the initial bias of the reset and the update gate.

    References:
        Cho, van Merrienboer, Gulcehre, Bahdanau, Bougares, Schwenk, Bengio, Learning phrase representations using RNN
        encoder-decoder for statistical machine translation, EMNLP 2014.
    """
    # Gates stand in the order reset, update, candidate.
    for bias in named(rnn, "bias_ih"):
        nn.init.constant_(bias[: len(bias) // 3 * 2], gate_bias)
