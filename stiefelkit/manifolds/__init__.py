"""The Stiefel manifold in geoopt's interface, for its Riemannian optimizers."""

from stiefelkit.errors import suggest_names
from stiefelkit.functional import RETRACTIONS
from stiefelkit.manifolds.stiefel import Stiefel

__all__ = ["RETRACTIONS", "Stiefel"]
suggest_names(__name__)
