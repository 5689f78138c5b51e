"""Layers with orthogonal and unitary weights."""

from stiefelkit.nn.activations import ModReLU
from stiefelkit.nn.adapter import OrthogonalAdapter, adapt, adapters, fold
from stiefelkit.nn.decoders import RotationSites, rotation_sites
from stiefelkit.nn.goru import GORU
from stiefelkit.nn.hadamard_linear import HadamardLinear
from stiefelkit.nn.linear import OrthogonalLinear
from stiefelkit.nn.linear_transition import LinearTransitionRNN
from stiefelkit.nn.rnn import OrthogonalRNN, OrthogonalRNNCell
from stiefelkit.nn.rotated_decoder import Rotated, fake_quantize, rotated
from stiefelkit.nn.rotation import absorb_norm_, absorb_norms_, rotate_
from stiefelkit.nn.rotation_rnn import RotationBlock, RotationRNN

__all__ = [
    "GORU",
    "HadamardLinear",
    "LinearTransitionRNN",
    "ModReLU",
    "OrthogonalAdapter",
    "OrthogonalLinear",
    "OrthogonalRNN",
    "OrthogonalRNNCell",
    "Rotated",
    "RotationBlock",
    "RotationRNN",
    "RotationSites",
    "absorb_norm_",
    "absorb_norms_",
    "adapt",
    "adapters",
    "fake_quantize",
    "fold",
    "rotate_",
    "rotated",
    "rotation_sites",
]
