"""Unitary RNN in coordinates of the Lie algebra u(n)."""

from stiefelkit.contract.param import Parametrization
from stiefelkit.models.sequence import SequenceModel, layer_options, read_out
from stiefelkit.nn import OrthogonalRNN


def lie_urnn(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    parametrization: Parametrization | None = "matrix_exp",
    activation: str = "modrelu",
    **options: object,
) -> SequenceModel:
    """Builds the unitary RNN :math:`W = exp(∑_e l_e T_e)`, :math:`T_e` a basis of :math:`u(n)`, complex modReLU.

    As in the authors' code the :math:`n^2` coefficients :math:`l_e`, the coordinate `skew`, are :math:`N(0, 1)`
    ("gaussian"), and no first state is trained: here it is zero, there it is drawn anew for each batch. Their code has
    tanh of real and imaginary part and a fixed gain; modReLU keeps the phase. Input weights are Glorot-uniform on their
    real shape (m, 2n), the read-out of :math:`[Re h, Im h]` too; biases are zero.

    Parameters: :math:`n^2 + 2nm + n + 2np + p`.

    References:
        Hyland, Ratsch, Learning unitary operators with help from u(n), AAAI 2017.
    """
    given = layer_options(parametrization, activation, options, "matrix_exp", init="gaussian")
    rnn = OrthogonalRNN(input_size, hidden_size, field="complex", **given)
    return SequenceModel(rnn, read_out(rnn, output_size, parts=2))
