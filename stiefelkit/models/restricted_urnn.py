"""Restricted-capacity uRNN: the first unitary RNN, a product of cheap factors."""

from torch import nn

from stiefelkit.models.sequence import draw_, recurrent
from stiefelkit.nn import OrthogonalRNN


@recurrent(OrthogonalRNN, "fourier", is_complex=True, trainable_h0=True)
def restricted_urnn(rnn: OrthogonalRNN) -> None:
    """Builds the restricted-capacity uRNN: :math:`W = D_3 R_2 F^{-1} D_2 P R_1 F D_1`, 7n parameters, complex modReLU.

    As in the authors' code: phases :math:`U(-π, π)`, reflectors :math:`U(-b, b)` with :math:`b^2 = 6 / (2 + 2n)`, P
    uniform; input weights Glorot-uniform on their real shape (m, 2n), modReLU's bias :math:`U(-0.01, 0.01)`,
    :math:`h_0` trained from :math:`U(-b, b)`, :math:`b^2 = 3 / 2n`, read-out of :math:`[Re h, Im h]` Glorot-uniform
    with zero bias. The modReLU has no epsilon (`stiefelkit.functional.modrelu`); theirs has 1e-5, with a gradient that
    is no number at 0. The permutation is in the state dict; they never save it. Coordinates: `phase` and `reflectors`.

    Parameters: 7n + 2nm + 3n + 2np + p.

    References:
        Arjovsky, Shah, Bengio, Unitary evolution recurrent neural networks, ICML 2016.
    """
    bound = (3 / (2 * rnn.hidden_size)) ** 0.5
    draw_(rnn, "weight_ih", nn.init.xavier_uniform_)
    draw_(rnn, "bias", nn.init.uniform_, -0.01, 0.01)
    draw_(rnn, "h0", nn.init.uniform_, -bound, bound)
