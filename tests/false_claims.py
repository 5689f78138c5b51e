"""Maps that say of themselves what does not hold, or keep what they should hand back."""

import dataclasses

from wrong_derivatives import Small

from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.parametrizations.matrix_exp import MatrixExp
from stiefelkit.parametrizations.stiefel_point import StiefelPoint


class InOnePiece(Small):
    """Says that square real frames are connected."""

    @property
    def traits(self):
        return dataclasses.replace(super().traits, component="connected")


class OnlyRotations(Small):
    """Says that the determinant is 1, where a sign of the chart may be -1."""

    @property
    def traits(self):
        is_square = self.shape[-1] == self.shape[-2] and not self.is_complex
        return dataclasses.replace(super().traits, component="rotations" if is_square else "connected")


class EveryRotation(MatrixExp):
    """Says that rotations are all frames."""

    @property
    def traits(self):
        return dataclasses.replace(super().traits, onto=True)


class Uninverted(Small):
    """Says that it takes frames, and has no method for it."""

    invert = OrthogonalParam.invert

    @property
    def schemes(self):
        return ("helfrich",)


class Crossing(StiefelPoint):
    """Says that a chart decides, where there is none."""

    @property
    def traits(self):
        decided = super().traits.component == "coordinates"
        return dataclasses.replace(super().traits, component="chart" if decided else "connected")


class Halves(Small):
    """Says that coordinates decide, where signs do."""

    @property
    def traits(self):
        decided = super().traits.component == "chart"
        return dataclasses.replace(super().traits, component="coordinates" if decided else "connected")


class Remembering(Small):
    """Keeps the frame that it was last assigned."""

    def invert(self, w):
        self.last = w
        return super().invert(w)


class Tallying(Small):
    """Counts its inverses in a list that it was made with."""

    def __init__(self, shape, *, dtype=None, device=None, precision="exact"):
        super().__init__(shape, dtype=dtype, device=device, precision=precision)
        self.taken = []

    def invert(self, w):
        self.taken.append(len(self.taken))
        return super().invert(w)


class Nameless(Small):
    """Hands on whatever it is given."""

    def __init__(self, *a, **k):
        super().__init__(*a, **k)
