"""Pure functions on tensors, with exact backward: the mathematics under every parametrization and cell."""

from stiefelkit.functional._activations import leaky_relu, modrelu, oplu
from stiefelkit.functional._butterfly import butterfly, butterfly_inverse, rotate_butterfly
from stiefelkit.functional._cayley import cayley
from stiefelkit.functional._cayley_inverse import cayley_inverse
from stiefelkit.functional._diagonal import diagonal
from stiefelkit.functional._exponential import exponential
from stiefelkit.functional._householder import householder, householder_inverse, householder_linear
from stiefelkit.functional._logarithm import skew_logarithm, tall_logarithm
from stiefelkit.functional._matrix_exp import matrix_exp
from stiefelkit.functional._packing import (
    band_size,
    pack_skew,
    pack_skew_gradient,
    pack_trapezoid,
    pick_band,
    skew_size,
    spread_band,
    trapezoid_size,
    unpack_skew,
    unpack_trapezoid,
)
from stiefelkit.functional._polar import nearest_frame, polar_factor
from stiefelkit.functional._polish import polish, split_defect
from stiefelkit.functional._product import product
from stiefelkit.functional._rotations import brickwall
from stiefelkit.functional._rotations_inverse import brickwall_inverse, haar_angles, haar_indices, layer_inverse
from stiefelkit.functional._rotations_plan import mesh_size
from stiefelkit.functional._stiefel_step import Tangent, cayley_increment, norms_of, riemannian_gradient

__all__ = [
    "Tangent",
    "band_size",
    "brickwall",
    "brickwall_inverse",
    "butterfly",
    "butterfly_inverse",
    "cayley",
    "cayley_increment",
    "cayley_inverse",
    "diagonal",
    "exponential",
    "haar_angles",
    "haar_indices",
    "householder",
    "householder_inverse",
    "householder_linear",
    "layer_inverse",
    "leaky_relu",
    "matrix_exp",
    "mesh_size",
    "modrelu",
    "nearest_frame",
    "norms_of",
    "oplu",
    "pack_skew",
    "pack_skew_gradient",
    "pack_trapezoid",
    "pick_band",
    "polar_factor",
    "polish",
    "product",
    "riemannian_gradient",
    "rotate_butterfly",
    "skew_logarithm",
    "skew_size",
    "split_defect",
    "spread_band",
    "tall_logarithm",
    "trapezoid_size",
    "unpack_skew",
    "unpack_trapezoid",
]
