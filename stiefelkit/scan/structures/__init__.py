"""Recurrent matrices that are applied in factors."""

from stiefelkit.scan.structures.brick import Brick
from stiefelkit.scan.structures.low_rank import DiagonalAndLowRank, FourierAndLowRank
from stiefelkit.scan.structures.structure import Factored, Structure

__all__ = ["STRUCTURES", "Factored", "Structure"]

STRUCTURES: dict[str, type[Structure]] = {"brick": Brick, "fourier": FourierAndLowRank, "low_rank": DiagonalAndLowRank}
"""Structures by name."""
