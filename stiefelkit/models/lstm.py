"""LSTM, the baseline of the orthogonal papers."""

from functools import partial

from torch import nn

from stiefelkit.models.gates import gated
from stiefelkit.models.sequence import named, recurrent


@recurrent(partial(gated, nn.LSTM), activation=None)
def lstm(rnn: nn.Module, *, forget_bias: float = 1.0) -> None:
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
    # Gates stand in the order input, forget, cell, output.
    for bias in named(rnn, "bias_ih"):
        nn.init.constant_(bias.unflatten(0, (4, -1))[1], forget_bias)
