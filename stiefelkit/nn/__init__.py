"""Layers with orthogonal and unitary weights."""

from stiefelkit.nn.activations import ModReLU
from stiefelkit.nn.goru import GORU
from stiefelkit.nn.linear import OrthogonalLinear
from stiefelkit.nn.linear_transition import LinearTransitionRNN
from stiefelkit.nn.rnn import OrthogonalRNN, OrthogonalRNNCell

__all__ = ["GORU", "LinearTransitionRNN", "ModReLU", "OrthogonalLinear", "OrthogonalRNN", "OrthogonalRNNCell"]
