"""EURNN: unitary RNN with a mesh of rotations."""

from torch import nn

from stiefelkit.errors import OptionError, needs
from stiefelkit.models.sequence import DrawReadOut, draw_, recurrent
from stiefelkit.nn import OrthogonalRNN


@recurrent(OrthogonalRNN, "givens", is_complex=True, real_part=True, init="uniform")
def eurnn(rnn: OrthogonalRNN, *, output_init: str = "glorot") -> DrawReadOut | None:
    """Builds EURNN: :math:`W = D F_L ... F_1`, layers of rotations of neighbours or a Fourier pattern, complex modReLU.

    As in the authors' code: every angle and phase :math:`U(-π, π)` ("uniform"), input weights :math:`U(-0.01, 0.01)` in
    real and imaginary part, modReLU's bias zero, :math:`h_0` zero and not trained, and a read-out of Re h alone. The
    modReLU has no epsilon (`stiefelkit.functional.modrelu`); theirs adds 0.01, and 1e-5 before 2018, to :math:`|z|`.
    Coordinates: `angle` and `phase`; one rate for all in the paper.

    Parameters: :math:`L(n - 1) + n + 2nm + n + np + p` for an even number L of layers, :math:`n log_2(n)` in the place
    of :math:`L(n - 1)` for the Fourier pattern.

    With output_init="glorot" the read-out is Glorot-uniform with zero bias; with "authors" it is :math:`U(-b, b)`,
    :math:`b^2 = 6 / (p + m)`, with bias 0.01, as the authors' code has it, where m stands in the place of n. `layers=`,
    L, is n if left out, the whole of :math:`U(n)` (the tables have 2); `layout="fft"` has :math:`log_2(n)` layers, for
    n a power of two.

    References:
        Jing, Shen, Dubcek, Peurifoy, Skirlo, LeCun, Tegmark, Soljacic, Tunable efficient unitary neural networks (EUNN)
        and their application to RNNs, ICML 2017.
    """
    needs(output_init in ("glorot", "authors"), OptionError, "eurnn", 'output_init "glorot" or "authors"', output_init)
    draw_(rnn, "weight_ih", nn.init.uniform_, -0.01, 0.01)
    if output_init == "glorot":
        return None

    def draw(output: nn.Linear) -> None:
        bound = (6 / (output.out_features + rnn.input_size)) ** 0.5
        nn.init.uniform_(output.weight, -bound, bound)
        nn.init.constant_(output.bias, 0.01)

    return draw
