"""RNN whose singular values stay within a margin of 1."""

from torch import nn

from stiefelkit.contract.param import Parametrization
from stiefelkit.models.sequence import SequenceModel, draw_, layer_options, read_out
from stiefelkit.nn import OrthogonalRNN


def margin_rnn(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    parametrization: Parametrization | None = "margin",
    activation: str = "leaky_relu",
    **options: object,
) -> SequenceModel:
    """Builds the RNN with :math:`W = U diag(s) V^T`, :math:`1 - m < s < 1 + m`, leaky ReLU of slope 0.1.

    As in the authors' code W starts orthogonal (:math:`s = 1`) and :math:`h_0` is trained, here from zero. Input and
    read-out weights are Glorot-uniform, biases zero. Their frames U and V are moved along the manifold, `u="stiefel",
    v="stiefel"` here; by default both are Cayley transforms, which train with any optimizer. Coordinates: `u.skew`,
    `v.skew` and `spectrum`, whose learning rate they divide by 2m.

    Parameters: n(n - 1) + n + nm + n + np + p + n.

    Their code has "oplu" as well. `margin=` is 0.1 if left out.

    References:
        Vorontsov, Trabelsi, Kadoury, Pal, On orthogonality and learning recurrent networks with long term dependencies,
        ICML 2017.
    """
    given = layer_options(parametrization, activation, options)
    rnn = OrthogonalRNN(input_size, hidden_size, trainable_h0=True, **given)
    draw_(rnn, "h0", nn.init.zeros_)
    return SequenceModel(rnn, read_out(rnn, output_size))
