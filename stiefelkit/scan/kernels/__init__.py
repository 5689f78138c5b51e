"""Programs for GPUs. They need triton: `launch` imports them, by names of its own, where that is known to be there."""

from .groups import groups_back, groups_forward
from .linear import pass_states, rotate_planes
from .rows import rows_back, rows_forward
from .tiles import tiles_back, tiles_forward
from .transitions import prepare, prepare_back

__all__ = [
    "groups_back", "groups_forward", "pass_states", "prepare", "prepare_back", "rotate_planes", "rows_back",
    "rows_forward", "tiles_back", "tiles_forward",
]  # fmt: skip
