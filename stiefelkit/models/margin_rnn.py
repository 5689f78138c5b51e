"""RNN whose singular values stay within a margin of 1."""

from torch import nn

from stiefelkit.models.sequence import draw_, recurrent
from stiefelkit.nn import OrthogonalRNN


@recurrent(OrthogonalRNN, "margin", "leaky_relu", trainable_h0=True)
def margin_rnn(rnn: OrthogonalRNN) -> None:
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
    draw_(rnn, "h0", nn.init.zeros_)
