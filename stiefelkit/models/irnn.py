"""IRNN: a free recurrent matrix that starts as the identity."""

from torch import nn

from stiefelkit.models.sequence import draw_, recurrent
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.numbers import above, optional


@recurrent(OrthogonalRNN, activation="relu", trainable_h0=True, init="identity")
def irnn(rnn: OrthogonalRNN, *, input_std: float | None = None) -> None:
    """Builds IRNN: :math:`h_t = relu(U x_t + W h_{t-1} + b)` with :math:`W = I` at first, and free.

    Biases are zero, :math:`h_0` is trained from zero, input and read-out weights are Glorot-uniform, as in the code
    that the orthogonal papers compare with, which also clips gradients. Nothing keeps W near the identity.

    Parameters: :math:`n^2 + nm + n + np + p + n`.

    `input_std` is the standard deviation of normal input weights, 0.001 in the paper; they are Glorot-uniform when
    None. `init=` is "identity" if left out.

    References:
        Le, Jaitly, Hinton, A simple way to initialize recurrent networks of rectified linear units, 2015.
    """
    input_std = optional(above(0)).require("irnn", "input_std", input_std)
    if input_std is not None:
        draw_(rnn, "weight_ih", nn.init.normal_, std=input_std)
    draw_(rnn, "h0", nn.init.zeros_)
