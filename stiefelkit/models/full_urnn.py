"""Full-capacity uRNN: unitary RNN whose recurrent matrix may be any unitary one."""

from torch import nn

from stiefelkit.models.sequence import draw_, recurrent
from stiefelkit.nn import OrthogonalRNN
from stiefelkit.numbers import at_least


@recurrent(OrthogonalRNN, "stiefel", is_complex=True, trainable_h0=True, init="restricted")
def full_urnn(rnn: OrthogonalRNN, *, bias_bound: float = 0.01) -> None:
    """Builds the full-capacity uRNN: W any unitary matrix, trained as it is, complex modReLU.

    W starts as a draw of the restricted-capacity map ("restricted"), :math:`h_0` is trained from :math:`U(-b, b)`,
    :math:`b = (3 / 2n)^{1/2}`, input weights are Glorot-uniform on their real shape (m, 2n), modReLU's bias is
    :math:`U(-0.01, 0.01)`, the read-out of :math:`[Re h, Im h]` Glorot-uniform with zero bias. The modReLU has no
    epsilon (`stiefelkit.functional.modrelu`); theirs has 1e-5 in both places, as activation="modrelu_epsilon".

    The coordinate `stiefel` needs an optimizer of frames: the paper's is `sk.optim.MultiplicativeCayley`, with the
    learning rate of all parameters for copying and speech, and with precondition="rmsprop" and 1e-6 for pixel-by-pixel
    MNIST. Their code follows the part of the gradient without :math:`Im h`, this one the whole.

    Parameters: :math:`n^2 + 2nm + n + 2n + 2np + p`, with a frame counted as the dimension of its manifold.

    All maps but "stiefel" train with any optimizer. modReLU's bias starts as U(-bias_bound, bias_bound); their
    pixel-by-pixel MNIST has 0. `init=` is "restricted" with "stiefel" if left out; "haar" is what the authors' second,
    Keras code draws.

    References:
        Wisdom, Powers, Hershey, Le Roux, Atlas, Full-capacity unitary recurrent neural networks, NIPS 2016.
    """
    bias_bound = at_least(0).require("full_urnn", "bias_bound", bias_bound)
    bound = (3 / (2 * rnn.hidden_size)) ** 0.5
    draw_(rnn, "weight_ih", nn.init.xavier_uniform_)
    draw_(rnn, "bias", nn.init.uniform_, -bias_bound, bias_bound)
    draw_(rnn, "h0", nn.init.uniform_, -bound, bound)
