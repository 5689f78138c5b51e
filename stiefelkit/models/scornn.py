"""scoRNN: orthogonal RNN with the scaled Cayley transform."""

from torch import nn

from stiefelkit.models.sequence import draw_, recurrent
from stiefelkit.nn import OrthogonalRNN


@recurrent(OrthogonalRNN, "cayley", init="helfrich", negative=lambda n: n // 2)
def scornn(rnn: OrthogonalRNN) -> None:
    """Builds scoRNN: :math:`W = (I + A)^{-1} (I - A) D`, modReLU, states as columns.

    As in the authors' code: A block-diagonal with eigenvalues of the transform on a quarter arc ("helfrich"),
    `negative` signs of D equal to -1, input weights :math:`U(-0.01, 0.01)` without input bias, modReLU's bias zero,
    :math:`h_0` zero and not trained, read-out Glorot-uniform with zero bias. Their code applies D last, to row states;
    here states are columns and D is applied first, as in the paper's text: the same family of matrices. Their recipes
    train the coordinate `skew` at a tenth of the other learning rate or less.

    Parameters: n(n - 1)/2 + nm + n + np + p.

    `negative=`, rho, how many signs are -1, is n/2 if left out.

    References:
        Helfrich, Willmott, Ye, Orthogonal recurrent neural networks with scaled Cayley transform, ICML 2018.
    """
    draw_(rnn, "weight_ih", nn.init.uniform_, -0.01, 0.01)
