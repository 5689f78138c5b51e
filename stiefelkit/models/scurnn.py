"""scuRNN: unitary RNN with the scaled Cayley transform and trained phases."""

from typing import Any

from torch import nn

from stiefelkit.models.parts import each, map_options, read_out, width
from stiefelkit.models.sequence import SequenceModel
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.param import Parametrization

__all__ = ["scurnn"]


def scurnn(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    parametrization: Parametrization | None = "cayley",
    activation: str = "modrelu",
    **options: Any,
) -> SequenceModel:
    """Builds scuRNN: W = (I + A)^-1 (I - A) diag(e^{i theta}), A skew-Hermitian, complex modReLU.

    As in the authors' code: Re A as in scoRNN and Im A = 0, theta uniform on (0, 2 pi), input weights Glorot-uniform
    on their real shape (m, 2n), modReLU's bias U(-0.01, 0.01), h_0 trained from U(-0.01, 0.01), read-out of
    [Re h, Im h] Glorot-uniform with zero bias. The modReLU has no epsilon (`stiefelkit.functional.modrelu`); theirs
    has 1e-5, which overflows on long runs of zero input. Coordinates: `skew` and `phase`, each at its own
    learning rate.

    Parameters: n^2 + n + 2nm + n + 2n + 2np + p.

    Args:
        input_size: m.
        hidden_size: n, complex.
        output_size: p.
        parametrization: of W, any complex one; None for a free W.
        activation: any complex one.
        **options: of the parametrization, and `init=`.

    References:
        Maduranga, Helfrich, Ye, Complex unitary recurrent neural networks using scaled Cayley transform, AAAI 2019.
    """
    rnn = OrthogonalRNN(
        input_size,
        hidden_size,
        parametrization=parametrization,
        field="complex",
        activation=activation,
        batch_first=True,
        trainable_h0=True,
        **map_options(parametrization, "cayley", {"init": "helfrich"}, options),
    )
    for p in each(rnn, "weight_ih"):
        nn.init.xavier_uniform_(p)
    for p in each(rnn, "bias"):
        nn.init.uniform_(p, -0.01, 0.01)
    for p in each(rnn, "h0"):
        nn.init.uniform_(p, -0.01, 0.01)
    return SequenceModel(rnn, read_out(2 * width(rnn), output_size))
