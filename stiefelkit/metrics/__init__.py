"""How far a matrix is from being a frame, and how far a linear layer stretches what passes through it."""

from stiefelkit.metrics.frames import (
    FRAME_TOLERANCE,
    bits_lost,
    defect,
    frame_tolerance,
    orthogonality_error,
    permitted_error,
    permitted_return,
    rounding_limit,
    scale_of,
    working_dtype,
)
from stiefelkit.metrics.operators import Lipschitz, lipschitz

__all__ = [
    "FRAME_TOLERANCE",
    "Lipschitz",
    "bits_lost",
    "defect",
    "frame_tolerance",
    "lipschitz",
    "orthogonality_error",
    "permitted_error",
    "permitted_return",
    "rounding_limit",
    "scale_of",
    "working_dtype",
]
