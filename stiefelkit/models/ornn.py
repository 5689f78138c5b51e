"""oRNN: orthogonal RNN with Householder reflections."""

from torch import nn

from stiefelkit.models.sequence import draw_, recurrent
from stiefelkit.nn import OrthogonalRNN


@recurrent(OrthogonalRNN, "householder", "leaky_relu", trainable_h0=True, init="mhammedi")
def ornn(rnn: OrthogonalRNN) -> None:
    """Builds oRNN: :math:`W = H(u_1) H(u_2) ... H(u_k)`, leaky ReLU of slope 0.1 or OPLU.

    As in the authors' code: reflectors of unit length, uniform on their spheres ("mhammedi"), input and read-out
    weights Glorot-uniform, biases zero, that of the input inside the activation, :math:`h_0` trained from
    :math:`U(-b, b)`, :math:`b^2 = 3 / 2n`. After each step they divide the reflectors by their lengths, which changes
    no weight; here the lengths stay as the optimizer leaves them. With n reflectors the last one, of a single entry, is
    a sign that keeps its first value, and with it det W. Coordinate: `reflectors`; one Adam and one rate for all in the
    paper.

    Parameters: nk - k(k - 1)/2 + nm + n + np + p + n.

    "oplu" is the paper's other activation, with pairs (i, i + n/2). `reflections=`, k, is n if left out.

    References:
        Mhammedi, Hellicar, Rahman, Bailey, Efficient orthogonal parametrisation of recurrent neural networks using
        Householder reflections, ICML 2017.
    """
    bound = (3 / (2 * rnn.hidden_size)) ** 0.5
    draw_(rnn, "weight_ih", nn.init.xavier_uniform_)
    draw_(rnn, "h0", nn.init.uniform_, -bound, bound)
