"""The recurrence h_t = act(x_t U^T + h_{t-1} W^T) over a whole sequence."""

from stiefelkit.functional._scan.backends import BACKENDS
from stiefelkit.functional._scan.dispatch import scan, scan_backend

__all__ = ["BACKENDS", "scan", "scan_backend"]
