"""expRNN: orthogonal RNN with the matrix exponential."""

from torch import nn

from stiefelkit.models.sequence import DrawReadOut, draw_, recurrent
from stiefelkit.nn import OrthogonalRNN


@recurrent(OrthogonalRNN, "matrix_exp", init="henaff")
def exprnn(rnn: OrthogonalRNN) -> DrawReadOut:
    """Builds expRNN: :math:`W = exp A` with A skew, modReLU.

    As in the authors' code: consecutive axes turned by angles :math:`U(-π, π)` ("henaff"), input and read-out weights
    normal with variance :math:`2 / m` and :math:`2 / n` (He), no input bias, modReLU's bias :math:`U(-0.01, 0.01)`, the
    read-out's zero, :math:`h_0` zero and not trained. They train the coordinate `skew` at a tenth of the other learning
    rate.

    Parameters: n(n - 1)/2 + nm + n + np + p.

    "rebased" with `inner="matrix_exp"`, and `sk.rebase_` every so many steps, is the dynamic trivialization of the
    second paper.

    References:
        Lezcano-Casado, Martinez-Rubio, Cheap orthogonal constraints in neural networks, ICML 2019; Lezcano-Casado,
        Trivializations for gradient-based optimization on manifolds, NeurIPS 2019.
    """
    draw_(rnn, "weight_ih", nn.init.kaiming_normal_, nonlinearity="relu")
    draw_(rnn, "bias", nn.init.uniform_, -0.01, 0.01)
    return lambda output: nn.init.kaiming_normal_(output.weight, nonlinearity="relu")
