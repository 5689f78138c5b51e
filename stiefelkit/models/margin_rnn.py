"""RNN whose singular values stay within a margin of 1."""

from typing import Any

from torch import nn

from stiefelkit.models.parts import each, read_out, width
from stiefelkit.models.sequence import SequenceModel
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.param import Parametrization

__all__ = ["margin_rnn"]


def margin_rnn(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    parametrization: Parametrization | None = "margin",
    activation: str = "leaky_relu",
    **options: Any,
) -> SequenceModel:
    """Builds the RNN with W = U diag(s) V^T, 1 - m < s < 1 + m, leaky ReLU of slope 0.1.

    As in the authors' code W starts orthogonal (s = 1) and h_0 is trained, here from zero. Input and read-out weights
    are Glorot-uniform, biases zero. Their frames U and V are moved along the manifold, `u="stiefel", v="stiefel"` here;
    by default both are Cayley transforms, which train with any optimizer. Coordinates: `u.skew`, `v.skew` and
    `spectrum`, whose learning rate they divide by 2m.

    Parameters: n(n - 1) + n + nm + n + np + p + n.

    Args:
        input_size: m.
        hidden_size: n.
        output_size: p.
        parametrization: of W, any real one; None for a free W.
        activation: any real one; their code has "oplu" as well.
        **options: of the parametrization, and `init=`: `margin=` (0.1 if left out), `u=`, `v=`.

    References:
        Vorontsov, Trabelsi, Kadoury, Pal, On orthogonality and learning recurrent networks with long term dependencies,
        ICML 2017.
    """
    rnn = OrthogonalRNN(
        input_size,
        hidden_size,
        parametrization=parametrization,
        activation=activation,
        batch_first=True,
        trainable_h0=True,
        **options,
    )
    for p in each(rnn, "h0"):
        nn.init.zeros_(p)
    return SequenceModel(rnn, read_out(width(rnn), output_size))
