"""Recurrences over a whole sequence: :math:`h_t = act(x_t U^T + h_{t-1} W^T)`, and linear ones that rotate."""

from stiefelkit.errors import suggest_names
from stiefelkit.scan import activations
from stiefelkit.scan.activations import Activation, find_activation
from stiefelkit.scan.dispatch import BACKENDS, scan, scan_backend
from stiefelkit.scan.reflectors import REFLECTOR_BACKENDS, reflector_scan
from stiefelkit.scan.rotation import ROTATION_BACKENDS, rotation_scan
from stiefelkit.scan.structures import Factored

__all__ = [
    "BACKENDS", "REFLECTOR_BACKENDS", "ROTATION_BACKENDS", "Activation", "Factored", "activations", "find_activation",
    "reflector_scan", "rotation_scan", "scan", "scan_backend",
]  # fmt: skip
suggest_names(__name__)
