"""The RNN with linear transitions of Henaff, Szlam and LeCun."""

from stiefelkit.models.sequence import recurrent
from stiefelkit.nn import LinearTransitionRNN


@recurrent(LinearTransitionRNN, activation="relu")
def henaff_rnn(rnn: LinearTransitionRNN) -> None:
    """Builds the linear-transition RNN :math:`h_t = relu(U x_t + b) + W h_{t-1}`, W free, orthogonal at the start.

    W is drawn from the Haar measure, or is the identity with `init="identity"`: the paper's two nets. Input and
    read-out weights are Glorot-uniform, biases and :math:`h_0` zero, :math:`h_0` not trained. With a parametrization W
    stays orthogonal. Nothing bounds the states of a free W: clip its gradients.

    Parameters: :math:`n^2 + nm + n + np + p`.

    References:
        Henaff, Szlam, LeCun, Recurrent orthogonal networks and long-memory tasks, ICML 2016.
    """
