"""The programs. They need triton, and `launch` imports this folder, by names of its own, where that is known to be there."""

from .rows import rows_back, rows_forward
from .tiles import tiles_back, tiles_forward

__all__ = ["rows_back", "rows_forward", "tiles_back", "tiles_forward"]
