"""scuRNN: unitary RNN with the scaled Cayley transform and trained phases."""

from torch import nn

from stiefelkit.models.sequence import draw_, recurrent
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.numbers import at_least


@recurrent(OrthogonalRNN, "cayley", is_complex=True, trainable_h0=True, init="helfrich")
def scurnn(rnn: OrthogonalRNN, *, bias_bound: float = 0.01) -> None:
    """Builds scuRNN: :math:`W = (I + A)^{-1} (I - A) diag(e^{i θ})`, A skew-Hermitian, complex modReLU.

    As in the authors' code: Re A as in scoRNN and :math:`Im A = 0`, θ uniform on :math:`(0, 2π)`, input weights
    Glorot-uniform on their real shape (m, 2n), modReLU's bias U(-bias_bound, bias_bound), :math:`h_0` trained from
    :math:`U(-0.01, 0.01)`, read-out of :math:`[Re h, Im h]` Glorot-uniform with zero bias. The modReLU has no epsilon
    (`stiefelkit.functional.modrelu`); activation="modrelu_epsilon" is theirs, of equation 5, with 1e-5, which overflows
    on long runs of zero input. Coordinates: `skew` and `phase`, each at its own learning rate.

    Parameters: :math:`n^2 + n + 2nm + n + 2n + 2np + p`.

    A unit with a positive bias lengthens its state at every step, and gradients across it by 1 + b / |z|;
    `bias_bound=0` begins with an isometry instead, as scoRNN does.

    References:
        Maduranga, Helfrich, Ye, Complex unitary recurrent neural networks using scaled Cayley transform, AAAI 2019.
    """
    bias_bound = at_least(0).require("scurnn", "bias_bound", bias_bound)
    draw_(rnn, "weight_ih", nn.init.xavier_uniform_)
    draw_(rnn, "bias", nn.init.uniform_, -bias_bound, bias_bound)
    draw_(rnn, "h0", nn.init.uniform_, -0.01, 0.01)
