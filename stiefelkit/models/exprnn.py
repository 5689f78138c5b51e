"""expRNN: orthogonal RNN with the matrix exponential."""

from typing import Any

from torch import nn

from stiefelkit.models.parts import each, map_options, read_out, width
from stiefelkit.models.sequence import SequenceModel
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.param import Parametrization

__all__ = ["exprnn"]


def exprnn(
    input_size: int,
    hidden_size: int,
    output_size: int,
    *,
    parametrization: Parametrization | None = "matrix_exp",
    activation: str = "modrelu",
    **options: Any,
) -> SequenceModel:
    """Builds expRNN: W = exp A with A skew, modReLU.

    As in the authors' code: consecutive axes turned by angles U(-pi, pi) ("henaff"), input and read-out weights normal
    with variance 2 / m and 2 / n (He), no input bias, modReLU's bias U(-0.01, 0.01), the read-out's zero, h_0 zero and
    not trained. They train the coordinate `skew` at a tenth of the other learning rate.

    Parameters: n(n - 1)/2 + nm + n + np + p.

    Args:
        input_size: m.
        hidden_size: n.
        output_size: p.
        parametrization: of W, any real one; None for a free W. "rebased" with `inner="matrix_exp"`, and `sk.rebase_`
            every so many steps, is the dynamic trivialization of the second paper.
        activation: any real one.
        **options: of the parametrization, and `init=`.

    References:
        Lezcano-Casado, Martinez-Rubio, Cheap orthogonal constraints in neural networks, ICML 2019; Lezcano-Casado,
        Trivializations for gradient-based optimization on manifolds, NeurIPS 2019.
    """
    rnn = OrthogonalRNN(
        input_size,
        hidden_size,
        parametrization=parametrization,
        activation=activation,
        batch_first=True,
        **map_options(parametrization, "matrix_exp", {"init": "henaff"}, options),
    )
    for p in each(rnn, "weight_ih"):
        nn.init.kaiming_normal_(p, nonlinearity="relu")
    for p in each(rnn, "bias"):
        nn.init.uniform_(p, -0.01, 0.01)
    output = read_out(width(rnn), output_size)
    nn.init.kaiming_normal_(output.weight, nonlinearity="relu")
    return SequenceModel(rnn, output)
