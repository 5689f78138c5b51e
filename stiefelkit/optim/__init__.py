"""Optimizers that move frames along their manifold, and parameters as other optimizers want them."""

from stiefelkit.optim.averages import average_fn, multi_avg_fn
from stiefelkit.optim.cayley_adam import CayleyAdam
from stiefelkit.optim.cayley_sgd import CayleySGD
from stiefelkit.optim.clip import clip_grad_norm_
from stiefelkit.optim.geoopt_parameters import geoopt_parameters
from stiefelkit.optim.groups import frames, parameter_groups
from stiefelkit.optim.multiplicative_cayley import MultiplicativeCayley
from stiefelkit.optim.pogo import POGO

__all__ = [
    "POGO",
    "CayleyAdam",
    "CayleySGD",
    "MultiplicativeCayley",
    "average_fn",
    "clip_grad_norm_",
    "frames",
    "geoopt_parameters",
    "multi_avg_fn",
    "parameter_groups",
]
