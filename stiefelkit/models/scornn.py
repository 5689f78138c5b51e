"""scoRNN: orthogonal RNN with the scaled Cayley transform."""

from torch import nn

from stiefelkit.models.sequence import SequenceModel
from stiefelkit.nn import OrthogonalRNN

__all__ = ["scornn"]


def scornn(input_size: int, hidden_size: int, output_size: int, *, negative: int | None = None) -> SequenceModel:
    """Builds scoRNN: W = (I + A)^-1 (I - A) D, modReLU, states as columns.

    As in the authors' code: A block-diagonal with eigenvalues of the transform on a quarter arc ("helfrich"),
    `negative` signs of D equal to -1, input weights U(-0.01, 0.01) without input bias, modReLU's bias zero, h_0 zero
    and not trained, read-out Glorot-uniform with zero bias. Their code applies D last, to row states; here states are
    columns and D is applied first, as in the paper's text: the same family of matrices. Their recipes train the
    coordinate `skew` at a tenth of the other learning rate or less.

    Parameters: n(n - 1)/2 + nm + n + np + p.

    Args:
        input_size: m.
        hidden_size: n.
        output_size: p.
        negative: rho, how many signs are -1; n/2 when None.

    References:
        Helfrich, Willmott, Ye, Orthogonal recurrent neural networks with scaled Cayley transform, ICML 2018.
    """
    rnn = OrthogonalRNN(
        input_size,
        hidden_size,
        parametrization="cayley",
        activation="modrelu",
        batch_first=True,
        negative=hidden_size // 2 if negative is None else negative,
        init="helfrich",
    )
    nn.init.uniform_(rnn.weight_ih_l0, -0.01, 0.01)  # type: ignore[arg-type]
    output = nn.Linear(hidden_size, output_size)
    nn.init.xavier_uniform_(output.weight)
    nn.init.zeros_(output.bias)
    return SequenceModel(rnn, output)
