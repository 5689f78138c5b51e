"""LSTM, the baseline of the orthogonal papers."""

from torch import nn

from stiefelkit.contract.param import Parametrization
from stiefelkit.models.gates import gated
from stiefelkit.models.sequence import SequenceModel, named, read_out


def lstm(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    parametrization: Parametrization | None = None,
    forget_bias: float = 1.0,
    num_layers: int = 1,
    bidirectional: bool = False,
    dropout: float = 0.0,
    **options: object,
) -> SequenceModel:
    """Builds the LSTM that the papers compare with: one bias vector a gate, forget bias 1.

    torch's LSTM has two bias vectors; the second is zero and not trained here, so that the count is the papers'.
    Weights are Glorot-uniform, the read-out too, with zero bias. With a parametrization each of the four n x n
    recurrent blocks is a frame. The activations are those of torch's kernel.

    Parameters: 4n(n + m + 1) + np + p.

    `forget_bias` is the initial bias of the forget gate.

    References:
        Hochreiter, Schmidhuber, Long short-term memory, 1997; Jozefowicz, Zaremba, Sutskever, An empirical exploration
        of recurrent network architectures, ICML 2015 (forget bias).
    """
    stack = {"num_layers": num_layers, "bidirectional": bidirectional, "dropout": dropout}
    rnn = gated(nn.LSTM, input_size, hidden_size, parametrization, stack, options)
    # Gates stand in the order input, forget, cell, output.
    for bias in named(rnn, "bias_ih"):
        nn.init.constant_(bias[hidden_size : 2 * hidden_size], forget_bias)
    return SequenceModel(rnn, read_out(rnn, output_size))
