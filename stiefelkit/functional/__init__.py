"""Pure functions on tensors, with exact backward: the mathematics under every parametrization and cell."""

from stiefelkit.errors import suggest_names
from stiefelkit.functional._activations import leaky_relu, modrelu, oplu
from stiefelkit.functional._arithmetic.norms import norms_of
from stiefelkit.functional._arithmetic.product import product
from stiefelkit.functional._cayley.transform import cayley, cayley_inverse
from stiefelkit.functional._exponential.packed import matrix_exp, skew_logarithm, tall_logarithm
from stiefelkit.functional._exponential.taylor import exponential
from stiefelkit.functional._hadamard import hadamard_transform
from stiefelkit.functional._householder import householder, householder_inverse, householder_linear
from stiefelkit.functional._packing import (
    band_size,
    diagonal,
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
from stiefelkit.functional._polar import msign, nearest_frame, polar_factor, polish, split_defect
from stiefelkit.functional._rotations.brickwall import brickwall, mesh_size
from stiefelkit.functional._rotations.butterfly import butterfly, butterfly_inverse, rotate_butterfly
from stiefelkit.functional._rotations.inverse import brickwall_inverse, haar_angles, haar_indices, layer_inverse
from stiefelkit.functional._stiefel.geodesics import geodesic, geodesic_logarithm
from stiefelkit.functional._stiefel.polar_step import polar_increment
from stiefelkit.functional._stiefel.retractions import (
    RETRACTIONS,
    cayley_increment,
    cayley_retraction,
    polar_retraction,
    qr_retraction,
)
from stiefelkit.functional._stiefel.spectral import spectral_direction
from stiefelkit.functional._stiefel.tangents import (
    METRICS,
    Tangent,
    inner_product,
    riemannian_gradient,
    riemannian_hessian,
    tangent_part,
)

__all__ = [
    "METRICS", "RETRACTIONS", "Tangent", "band_size", "brickwall", "brickwall_inverse", "butterfly",
    "butterfly_inverse", "cayley", "cayley_increment", "cayley_inverse", "cayley_retraction", "diagonal", "exponential",
    "geodesic", "geodesic_logarithm", "haar_angles", "haar_indices", "hadamard_transform", "householder",
    "householder_inverse", "householder_linear", "inner_product", "layer_inverse", "leaky_relu", "matrix_exp",
    "mesh_size", "modrelu", "msign", "nearest_frame", "norms_of", "oplu", "pack_skew", "pack_skew_gradient",
    "pack_trapezoid", "pick_band", "polar_factor", "polar_increment", "polar_retraction", "polish", "product",
    "qr_retraction", "riemannian_gradient", "riemannian_hessian", "rotate_butterfly", "skew_logarithm", "skew_size",
    "spectral_direction", "split_defect", "spread_band", "tall_logarithm", "tangent_part", "trapezoid_size",
    "unpack_skew", "unpack_trapezoid",
]  # fmt: skip
suggest_names(__name__)
