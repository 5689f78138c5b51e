"""Recurrences over a whole sequence: h_t = act(x_t U^T + h_{t-1} W^T), and its gated kin."""

from stiefelkit.functional._scan.goru import goru_scan
from stiefelkit.functional._scan.reference import scan

__all__ = ["goru_scan", "scan"]
