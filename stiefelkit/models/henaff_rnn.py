"""The RNN with linear transitions of Henaff, Szlam and LeCun."""

from typing import Any

from stiefelkit.models.parts import read_out, width
from stiefelkit.models.sequence import SequenceModel
from stiefelkit.nn import LinearTransitionRNN
from stiefelkit.param import Parametrization

__all__ = ["henaff_rnn"]


def henaff_rnn(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    parametrization: Parametrization | None = None,
    activation: str = "relu",
    **options: Any,
) -> SequenceModel:
    """Builds the linear-transition RNN h_t = relu(U x_t + b) + W h_{t-1}, W a free matrix that starts orthogonal.

    W is drawn from the Haar measure, or is the identity with `init="identity"`: the paper's two nets. Input and
    read-out weights are Glorot-uniform, biases and h_0 zero, h_0 not trained. With a parametrization W stays
    orthogonal. Nothing bounds the states of a free W: clip its gradients.

    Parameters: n^2 + nm + n + np + p.

    Args:
        input_size: m.
        hidden_size: n.
        output_size: p.
        parametrization: of W, any real one; None, the paper's, for a free W.
        activation: of the projected input, any real one.
        **options: of the parametrization, and `init=`.

    References:
        Henaff, Szlam, LeCun, Recurrent orthogonal networks and long-memory tasks, ICML 2016.
    """
    rnn = LinearTransitionRNN(
        input_size, hidden_size, parametrization=parametrization, activation=activation, batch_first=True, **options
    )
    return SequenceModel(rnn, read_out(width(rnn), output_size))
