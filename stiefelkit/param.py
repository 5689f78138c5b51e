"""The contract of a parametrization, for plugins: `OrthogonalParam` and what it is described by."""

from stiefelkit.contract.param import OrthogonalParam, Parametrization, Traits
from stiefelkit.weights import torch_hooks

__all__ = ["OrthogonalParam", "Parametrization", "Traits"]

torch_hooks.install()
