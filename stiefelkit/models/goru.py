"""GORU: gated recurrent unit with an orthogonal candidate state."""

from torch import nn

from stiefelkit.models.sequence import draw_, named, recurrent
from stiefelkit.nn import GORU


@recurrent(GORU, "givens", layout="fft", init="uniform")
def goru(rnn: GORU, *, reset_bias: float = 2.0) -> None:
    """Builds GORU: gates r and g, candidate :math:`act(r ⊙ (Q h) + U_c x)` with modReLU, Q a Fourier mesh of rotations.

    As in the authors' code: angles :math:`U(-π, π)` ("uniform") and no signs after the mesh, input weights and the
    dense matrices of the gates :math:`U(-0.01, 0.01)`, the reset gate's bias 2, modReLU's 0.01, :math:`h_0` zero and
    not trained. The update gate's bias is zero, the read-out Glorot-uniform with zero bias. The modReLU has no epsilon
    (`stiefelkit.functional.modrelu`); theirs adds 0.001 to |z|. Coordinate: `angle`; one rate for all in the paper.

    Parameters: :math:`(n/2) log_2(n) + 2n^2 + 3nm + 3n + np + p`; the mesh has :math:`L(n - 1)/2` for an even number L
    of layers of neighbours.

    `reset_bias` is the initial bias of the reset gate. `layout=` is "fft" if left out, for n a power of two;
    "brickwall" takes any n, and `layers=`.

    References:
        Jing, Gulcehre, Peurifoy, Shen, Tegmark, Soljacic, Bengio, Gated orthogonal recurrent units: on learning to
        forget, 2017.
    """
    for u, w in zip(named(rnn, "weight_ih"), named(rnn, "weight_gates"), strict=True):
        nn.init.uniform_(u, -0.01, 0.01)
        nn.init.uniform_(w, -0.01, 0.01)
    for bias in named(rnn, "bias_gates"):
        nn.init.constant_(bias[: rnn.hidden_size], reset_bias)
    draw_(rnn, "bias", nn.init.constant_, 0.01)
