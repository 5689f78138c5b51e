"""Exponents by which time and memory of maps grow with n, fitted to what a race has measured."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stiefelkit.errors import StiefelkitError
from stiefelkit.measuring.contest import Race, Row
from stiefelkit.measuring.plans import torch_dtype
from stiefelkit.weights.attach import available

PRODUCT = "one product"
"""Name of the yardstick, the matrix product of that size."""
LOGARITHM = 0.25
"""The most by which a factor log x raises an exponent fitted beyond x = 55."""


@dataclass(frozen=True)
class PowerLaw:
    """y = c x^k from a first to a last x, with the standard error of k; up to `overhead_until` y hardly grows."""

    exponent: float | None = None
    spread: float | None = None
    first: float | None = None
    last: float | None = None
    overhead_until: float | None = None

    def faster_than(self, expected: float) -> bool:
        """Returns whether k is above what was expected by more than twice its spread and what a factor log x adds."""
        return self.exponent is not None and self.exponent - 2 * (self.spread or 0.0) > expected + LOGARITHM


def fit(xs: Sequence[float], ys: Sequence[float], expected: float) -> PowerLaw:
    """Fits log y = log c + k log x by least squares.

    Points at the low end, from which y grows to the next point by less than half of the expected exponent, are
    overhead: what is paid whatever the size. They are left out, but for the last two points. The xs are growing, and
    all are positive.

    >>> fit([1, 2, 4, 8], [5, 5, 20, 80], expected=2).overhead_until
    1
    """
    if len(xs) < 2:
        return PowerLaw()
    u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
    start = 0
    while start < len(xs) - 2 and v[start + 1] - v[start] < expected / 2 * (u[start + 1] - u[start]):
        start += 1
    if len(u) - start > 2:
        (k, _), covariance = np.polyfit(u[start:], v[start:], 1, cov=True)
        spread = math.sqrt(covariance[0, 0])
    else:
        k, spread = (v[-1] - v[start]) / (u[-1] - u[start]), None
    return PowerLaw(float(k), spread, xs[start], xs[-1], xs[start - 1] if start else None)


def growth(races: Sequence[Race]) -> list[Race]:
    """Returns the exponents of time, and of memory where it was measured, of ours forward and backward at growing n.

    Of races of parametrizations; those of tall frames are left out, and there are none of a single size.
    """
    series: dict[str, dict[str, list[tuple[Row, float]]]] = {"time": {}, "memory": {}}
    for race in races:
        # a map to a point that is its own coordinate allocates nothing, which has no logarithm
        rows = [row for row in race.rows if not row.is_peer and row["operation"] == "forward_backward"]
        rows = [row for row in rows if row["n"] == row["p"]]
        if rows:
            product = Row({**rows[0].figures, "contender": PRODUCT})
            series["time"].setdefault(PRODUCT, []).append((product, race.unit or math.nan))
        for row in rows:
            for what, figure in (("time", "seconds"), ("memory", "bytes")):
                if row.figures.get(figure):
                    series[what].setdefault(row.name.replace(" (exact)", ""), []).append((row, row[figure]))
    if len(series["time"].get(PRODUCT, ())) < 2:
        return []
    rows = {
        what: [_row(what, name, *zip(*points, strict=True)) for name, points in of.items()]
        for what, of in series.items()
    }
    return [Race("n", what, fitted) for what, fitted in rows.items() if fitted]


def _row(what: str, name: str, rows: Sequence[Row], values: Sequence[float]) -> Row:
    row, expected = rows[-1], 2.0 if what == "memory" else 3.0
    cls = available().get(row.member)
    if cls and what == "time":
        with contextlib.suppress(StiefelkitError):  # what its traits declare, at one size
            expected = cls((4, 4), dtype=torch_dtype(row["dtype"])).traits.cost_exponent
    points = [row["n"] for row in rows]
    law = fit(points, values, expected)
    figures = {"contender": name, "dtype": row["dtype"], "device": row["device"]}
    figures |= {"what": what, "against": "n", "points": points, "values": list(values), "expected": expected}
    return Row(figures | dataclasses.asdict(law) | {"faster": law.faster_than(expected)})
