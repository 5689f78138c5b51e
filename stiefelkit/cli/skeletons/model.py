"""A recurrent net that turns its state: a model to begin with."""

from torch import nn

from stiefelkit.models import SequenceModel
from stiefelkit.nn import OrthogonalRNN


def skeleton(input_size, hidden_size, output_size, *, parametrization="matrix_exp", activation="modrelu", **options):
    """Builds a recurrent net whose W is a rotation, with modReLU.

    Args:
        input_size: width of the input.
        hidden_size: units of the state.
        output_size: width of the output.
        parametrization: of W.
        activation: of the states.
        **options: of the layer and of the parametrization.

    References:
        None yet.
    """
    options |= {"parametrization": parametrization, "activation": activation, "batch_first": True}
    rnn = OrthogonalRNN(input_size, hidden_size, **options)
    directions = 1 + rnn.bidirectional
    return SequenceModel(rnn, nn.Linear(directions * hidden_size, output_size))
