"""Restricted-capacity uRNN: the first unitary RNN, a product of cheap factors."""

from typing import Any

from torch import nn

from stiefelkit.models.parts import each, read_out, width
from stiefelkit.models.sequence import SequenceModel
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.param import Parametrization

__all__ = ["restricted_urnn"]


def restricted_urnn(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    parametrization: Parametrization | None = "fourier",
    activation: str = "modrelu",
    **options: Any,
) -> SequenceModel:
    """Builds the restricted-capacity uRNN: W = D3 R2 F^-1 D2 P R1 F D1 with 7n parameters, complex modReLU.

    As in the authors' code: phases U(-pi, pi), reflectors U(-b, b) with b^2 = 6 / (2 + 2n), P uniform; input weights
    Glorot-uniform on their real shape (m, 2n), modReLU's bias U(-0.01, 0.01), h_0 trained from U(-b, b),
    b^2 = 3 / 2n, read-out of [Re h, Im h] Glorot-uniform with zero bias. The modReLU has no epsilon
    (`stiefelkit.functional.modrelu`); theirs has 1e-5, with a gradient that is no number at 0. The permutation is in
    the state dict; they never save it. Coordinates: `phase` and `reflectors`.

    Parameters: 7n + 2nm + 3n + 2np + p.

    Args:
        input_size: m.
        hidden_size: n, complex.
        output_size: p.
        parametrization: of W, any complex one; None for a free W.
        activation: any complex one.
        **options: of the parametrization, and `init=`.

    References:
        Arjovsky, Shah, Bengio, Unitary evolution recurrent neural networks, ICML 2016.
    """
    rnn = OrthogonalRNN(
        input_size,
        hidden_size,
        parametrization=parametrization,
        field="complex",
        activation=activation,
        batch_first=True,
        trainable_h0=True,
        **options,
    )
    bound = (3 / (2 * hidden_size)) ** 0.5
    for p in each(rnn, "weight_ih"):
        nn.init.xavier_uniform_(p)
    for p in each(rnn, "bias"):
        nn.init.uniform_(p, -0.01, 0.01)
    for p in each(rnn, "h0"):
        nn.init.uniform_(p, -bound, bound)
    return SequenceModel(rnn, read_out(2 * width(rnn), output_size))
