"""Layers with orthogonal and unitary weights."""

from stiefelkit.nn.activations import ModReLU
from stiefelkit.nn.adapter import OrthogonalAdapter, adapt, adapters, fold
from stiefelkit.nn.goru import GORU
from stiefelkit.nn.linear import OrthogonalLinear
from stiefelkit.nn.linear_transition import LinearTransitionRNN
from stiefelkit.nn.rnn import OrthogonalRNN, OrthogonalRNNCell
from stiefelkit.nn.rotation import rotate_

__all__ = [
    "GORU",
    "LinearTransitionRNN",
    "ModReLU",
    "OrthogonalAdapter",
    "OrthogonalLinear",
    "OrthogonalRNN",
    "OrthogonalRNNCell",
    "adapt",
    "adapters",
    "fold",
    "rotate_",
]
