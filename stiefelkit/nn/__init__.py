"""Layers with orthogonal and unitary weights."""

from stiefelkit.nn.activations import ModReLU
from stiefelkit.nn.linear import OrthogonalLinear
from stiefelkit.nn.rnn import OrthogonalRNN, OrthogonalRNNCell

__all__ = ["ModReLU", "OrthogonalLinear", "OrthogonalRNN", "OrthogonalRNNCell"]
