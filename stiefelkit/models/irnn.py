"""IRNN: a free recurrent matrix that starts as the identity."""

from torch import nn

from stiefelkit.contract.param import Parametrization
from stiefelkit.models.sequence import SequenceModel, draw_, layer_options, read_out
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.numbers import above, optional


def irnn(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    parametrization: Parametrization | None = None,
    activation: str = "relu",
    input_std: float | None = None,
    **options: object,
) -> SequenceModel:
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
    given = layer_options(parametrization, activation, {"init": "identity", **options})
    rnn = OrthogonalRNN(input_size, hidden_size, trainable_h0=True, **given)
    if input_std is not None:
        draw_(rnn, "weight_ih", nn.init.normal_, std=input_std)
    draw_(rnn, "h0", nn.init.zeros_)
    return SequenceModel(rnn, read_out(rnn, output_size))
