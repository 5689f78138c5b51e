"""LSTM, the baseline of the orthogonal papers."""

import torch
from torch import nn

from stiefelkit.models.sequence import SequenceModel

__all__ = ["lstm"]


def lstm(input_size: int, hidden_size: int, output_size: int, *, forget_bias: float = 1.0) -> SequenceModel:
    """Builds the LSTM that the papers compare with: one bias vector a gate, forget bias 1.

    torch's LSTM has two bias vectors; the second is zero and not trained here, so that the count is the papers'.
    Weights are Glorot-uniform, the read-out too, with zero bias.

    Parameters: 4n(n + m + 1) + np + p.

    Args:
        input_size: m.
        hidden_size: n.
        output_size: p.
        forget_bias: initial bias of the forget gate.

    References:
        Hochreiter, Schmidhuber, Long short-term memory, 1997; Jozefowicz, Zaremba, Sutskever, ICML 2015 (forget bias).
    """
    rnn = nn.LSTM(input_size, hidden_size, batch_first=True)
    weights = dict(rnn.named_parameters())
    nn.init.xavier_uniform_(weights["weight_ih_l0"])
    nn.init.xavier_uniform_(weights["weight_hh_l0"])
    nn.init.zeros_(weights["bias_ih_l0"])
    nn.init.zeros_(weights["bias_hh_l0"]).requires_grad_(False)
    # Gates stand in the order input, forget, cell, output.
    with torch.no_grad():
        weights["bias_ih_l0"][hidden_size : 2 * hidden_size] = forget_bias
    output = nn.Linear(hidden_size, output_size)
    nn.init.xavier_uniform_(output.weight)
    nn.init.zeros_(output.bias)
    return SequenceModel(rnn, output)
