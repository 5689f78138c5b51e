"""The Stiefel manifold in geoopt's interface, for its Riemannian optimizers."""

from stiefelkit.errors import raising_getattr
from stiefelkit.functional import RETRACTIONS
from stiefelkit.manifolds.stiefel import Stiefel

__all__ = ["RETRACTIONS", "Stiefel"]
__getattr__ = raising_getattr(__name__)
