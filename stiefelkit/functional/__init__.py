"""Pure functions on tensors, with exact backward: the mathematics under every parametrization and cell."""

from stiefelkit.functional._activations import ACTIVATIONS, COMPLEX_ACTIVATIONS, find_activation, modrelu
from stiefelkit.functional._butterfly import butterfly, butterfly_inverse, rotate_butterfly
from stiefelkit.functional._cayley import cayley, cayley_inverse
from stiefelkit.functional._diagonal import diagonal
from stiefelkit.functional._householder import householder, householder_inverse
from stiefelkit.functional._packing import (
    pack_skew,
    pack_skew_gradient,
    pack_trapezoid,
    skew_size,
    trapezoid_size,
    unpack_skew,
    unpack_trapezoid,
)
from stiefelkit.functional._polish import nearest_frame, polish, split_defect
from stiefelkit.functional._product import product
from stiefelkit.functional._rotations import brickwall
from stiefelkit.functional._rotations_inverse import brickwall_inverse, haar_angles, haar_indices, layer_inverse
from stiefelkit.functional._rotations_plan import mesh_size
from stiefelkit.functional._scan import scan

__all__ = [
    "ACTIVATIONS",
    "COMPLEX_ACTIVATIONS",
    "brickwall",
    "brickwall_inverse",
    "butterfly",
    "butterfly_inverse",
    "cayley",
    "cayley_inverse",
    "diagonal",
    "find_activation",
    "haar_angles",
    "haar_indices",
    "householder",
    "householder_inverse",
    "layer_inverse",
    "mesh_size",
    "modrelu",
    "nearest_frame",
    "pack_skew",
    "pack_skew_gradient",
    "pack_trapezoid",
    "polish",
    "product",
    "rotate_butterfly",
    "scan",
    "skew_size",
    "split_defect",
    "trapezoid_size",
    "unpack_skew",
    "unpack_trapezoid",
]
