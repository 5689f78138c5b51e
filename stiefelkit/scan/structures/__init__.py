"""Recurrent matrices that are applied in factors, one structure a file."""

from stiefelkit.scan.structures.brick import Brick, pairs_first, pairs_in_order
from stiefelkit.scan.structures.fourier import FourierAndLowRank
from stiefelkit.scan.structures.low_rank import DiagonalAndLowRank
from stiefelkit.scan.structures.structure import Factored, Structure

__all__ = ["STRUCTURES", "Factored", "Structure", "pairs_first", "pairs_in_order"]

STRUCTURES: dict[str, type[Structure]] = {
    "brick": Brick,
    "fourier": FourierAndLowRank,
    "low_rank": DiagonalAndLowRank,
}
"""Structures by name."""
