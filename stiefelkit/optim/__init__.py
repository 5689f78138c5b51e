"""Parameters of orthogonal weights as optimizers want them."""

from stiefelkit.optim.geoopt_parameters import geoopt_parameters
from stiefelkit.optim.groups import parameter_groups

__all__ = ["geoopt_parameters", "parameter_groups"]
