"""Unitary RNN in coordinates of the Lie algebra u(n)."""

from stiefelkit.models.sequence import recurrent
from stiefelkit.nn import OrthogonalRNN


@recurrent(OrthogonalRNN, "matrix_exp", is_complex=True, init="gaussian")
def lie_urnn(rnn: OrthogonalRNN) -> None:
    """Builds the unitary RNN :math:`W = exp(∑_e l_e T_e)`, :math:`T_e` a basis of :math:`u(n)`, complex modReLU.

    As in the authors' code the :math:`n^2` coefficients :math:`l_e`, the coordinate `skew`, are :math:`N(0, 1)`
    ("gaussian"), and no first state is trained: here it is zero, there it is drawn anew for each batch. Their code has
    tanh of real and imaginary part and a fixed gain; modReLU keeps the phase. Input weights are Glorot-uniform on their
    real shape (m, 2n), the read-out of :math:`[Re h, Im h]` too; biases are zero.

    Parameters: :math:`n^2 + 2nm + n + 2np + p`.

    References:
        Hyland, Ratsch, Learning unitary operators with help from u(n), AAAI 2017.
    """
