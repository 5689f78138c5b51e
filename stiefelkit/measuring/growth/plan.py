"""The plan of a measurement of growth. Read for help, without torch."""

from dataclasses import dataclass, field

from stiefelkit.errors import OptionError
from stiefelkit.measuring.drift.plan import DTYPES
from stiefelkit.measuring.races.plan import WHO, Rules
from stiefelkit.numbers import whole
from stiefelkit.training.checks import known_parametrizations, known_words

__all__ = ["AXES", "QUANTITIES", "GrowthPlan"]

AXES = {
    "n": "forward and backward of one n x n frame",
    "matrices": "forward and backward of so many frames at once",
    "T": "forward and backward of a recurrent layer over T steps, the map to W within",
    "batch": "the same for so many sequences at once",
    "reflections": "the same for one sequence, 1,024 units and so many reflectors, W in factors",
}
"""What is made larger, and what is measured."""
QUANTITIES = ("time", "memory")
SERIES = {"n": "sizes", "matrices": "matrices", "T": "steps", "batch": "batches", "reflections": "reflections"}
"""Axis to the field of a plan that has its values."""


@dataclass(frozen=True)
class GrowthPlan(Rules):
    """What is measured, and what grows.

    Args:
        parametrizations: names, separated by commas; all if left out. One that is complex only is measured as such.
        what: time, memory, or both, separated by commas.
        against: n, matrices, T, batch, reflections, separated by commas.
        sizes: values of n, separated by commas.
        matrices: numbers of matrices.
        steps: values of T.
        batches: numbers of sequences.
        reflections: numbers of reflectors, of the maps that have them.
        precision: exact or fast; parametrizations without fast are measured as exact.
        dtype: float32, float64, complex64 or complex128.
    """

    parametrizations: tuple[str, ...] = ()
    what: tuple[str, ...] = QUANTITIES
    against: tuple[str, ...] = tuple(AXES)
    sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    matrices: tuple[int, ...] = (1, 4, 16, 64)
    steps: tuple[int, ...] = field(default=(128, 256, 512, 1024), metadata={"names": ("--T", "--steps")})
    batches: tuple[int, ...] = (16, 64, 256, 1024)
    reflections: tuple[int, ...] = (32, 64, 128, 256)
    precision: str = "exact"
    dtype: str = "float32"
    repeats: int = 20
    seconds: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        known_parametrizations(self.parametrizations)
        known_words(WHO, "precision", [self.precision], {"exact", "fast"})
        known_words(WHO, "dtype", [self.dtype], DTYPES)
        for kind, words, choice in (("quantity", self.what, QUANTITIES), ("axis", self.against, AXES)):
            known_words(WHO, kind, words, choice)
            if not words:
                raise OptionError(f"{WHO} needs one {kind} or more, got none.")
        for name in SERIES.values():
            for value in getattr(self, name):
                whole(1).require(WHO, name, value)
            ordered = tuple(sorted(set(getattr(self, name))))
            if len(ordered) < 2:
                raise OptionError(f"{WHO} needs two {name} or more to see growth, got {len(ordered)}.")
            object.__setattr__(self, name, ordered)

    def points(self, axis: str) -> tuple[int, ...]:
        """Returns the values of what grows."""
        return getattr(self, SERIES[axis])
