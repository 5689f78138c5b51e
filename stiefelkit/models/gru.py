"""GRU, the gated baseline with one state."""

from torch import nn

from stiefelkit.contract.param import Parametrization
from stiefelkit.models.gates import gated
from stiefelkit.models.sequence import SequenceModel, named, read_out


def gru(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    parametrization: Parametrization | None = None,
    gate_bias: float = 1.0,
    num_layers: int = 1,
    bidirectional: bool = False,
    dropout: float = 0.0,
    **options: object,
) -> SequenceModel:
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
    stack = {"num_layers": num_layers, "bidirectional": bidirectional, "dropout": dropout}
    rnn = gated(nn.GRU, input_size, hidden_size, parametrization, stack, options)
    # Gates stand in the order reset, update, candidate.
    for bias in named(rnn, "bias_ih"):
        nn.init.constant_(bias[: 2 * hidden_size], gate_bias)
    return SequenceModel(rnn, read_out(rnn, output_size))
