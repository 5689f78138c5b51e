"""The recurrence h_t = act(x_t U^T + h_{t-1} W^T) over a whole sequence."""

from stiefelkit.functional._scan.reference import scan

__all__ = ["scan"]
