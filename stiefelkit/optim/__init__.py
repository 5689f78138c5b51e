"""Parameter groups for torch's optimizers."""

from stiefelkit.optim.groups import parameter_groups

__all__ = ["parameter_groups"]
