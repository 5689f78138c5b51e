"""Power laws y = c x^k through measured points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PowerLaw", "fit"]

LOGARITHM = 0.25
"""By so much at most a factor log x raises an exponent fitted beyond x = 55."""


@dataclass(frozen=True)
class PowerLaw:
    """y = c x^k over a range.

    Attributes:
        exponent: k.
        spread: standard error of k; None from two points, which any law fits.
        first: smallest x of the fit.
        last: largest x of the fit.
        overhead_until: from the smallest x measured up to this one y hardly grows, and the fit leaves it out; None if
            it grows from the start.
    """

    exponent: float
    spread: float | None
    first: float
    last: float
    overhead_until: float | None

    def faster_than(self, expected: float) -> bool:
        """Whether k is above what was expected by more than twice its spread and what a factor log x adds."""
        return self.exponent - 2 * (self.spread or 0.0) > expected + LOGARITHM


def fit(xs: Sequence[float], ys: Sequence[float], expected: float) -> PowerLaw | None:
    """Fits log y = log c + k log x by least squares.

    Points at the low end, from which y grows to the next point by less than half of the expected exponent, are
    overhead: what is paid whatever the size. They are left out, but for the last two points.

    Args:
        xs: growing, positive.
        ys: positive.
        expected: exponent that the points are thought to have.

    Returns:
        The law, or None from fewer than two points.

    >>> fit([1, 2, 4, 8], [5, 5, 20, 80], expected=2).overhead_until
    1
    """
    if len(xs) < 2:
        return None
    u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
    start = 0
    while start < len(xs) - 2 and v[start + 1] - v[start] < expected / 2 * (u[start + 1] - u[start]):
        start += 1
    u, v = u[start:], v[start:]
    count = len(u)
    mean_u, mean_v = sum(u) / count, sum(v) / count
    width = sum((a - mean_u) ** 2 for a in u)
    k = sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True)) / width
    rest = sum((b - mean_v - k * (a - mean_u)) ** 2 for a, b in zip(u, v, strict=True))
    spread = math.sqrt(rest / (count - 2) / width) if count > 2 else None
    return PowerLaw(k, spread, xs[start], xs[-1], xs[start - 1] if start else None)
