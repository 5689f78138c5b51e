"""Distances of matrices from frames, and the singular values of linear layers as operators."""

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
