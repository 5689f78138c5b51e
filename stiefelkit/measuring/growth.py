"""Exponents by which time and memory of maps grow with n, from what a race has measured."""

import contextlib
import math
from collections.abc import Sequence

from stiefelkit.errors import StiefelkitError
from stiefelkit.measuring.contest import Race, Row
from stiefelkit.measuring.plans import torch_dtype
from stiefelkit.weights.attach import available

PRODUCT = "one product"
"""Name of the yardstick, the matrix product of that size."""


def growth(races: Sequence[Race]) -> list[Race]:
    """Returns the exponents of time, and of memory where it was measured, of ours forward and backward.

    The exponent is that between the two largest sizes: what is paid whatever the size weighs least there. Races of tall
    frames are left out; of a single size there is none.
    """
    series: dict[str, dict[str, list[tuple[Row, float]]]] = {"time": {}, "memory": {}}
    for race in races:
        rows = [row for row in race.rows if not row.is_peer and row["operation"] == "forward_backward"]
        rows = [row for row in rows if row["n"] == row["p"]]
        for row in rows[:1]:
            product = Row({**row.figures, "contender": PRODUCT})
            series["time"].setdefault(PRODUCT, []).append((product, race.unit or math.nan))
        for row in rows:
            for what, figure in (("time", "seconds"), ("memory", "bytes")):
                # a map to a point that is its own coordinate allocates nothing, which has no logarithm
                if row.figures.get(figure):
                    series[what].setdefault(row.name.replace(" (exact)", ""), []).append((row, row[figure]))
    found = {
        what: [_row(what, name, points) for name, points in names.items() if len({row["n"] for row, _ in points}) > 1]
        for what, names in series.items()
    }
    return [Race("n", what, rows) for what, rows in found.items() if rows]


def _row(what: str, name: str, points: Sequence[tuple[Row, float]]) -> Row:
    (smaller, before), (row, after) = sorted(points, key=lambda point: point[0]["n"])[-2:]
    expected = 2.0 if what == "memory" else 3.0
    cls = available().get(row.member)
    if cls and what == "time":
        with contextlib.suppress(StiefelkitError):  # what its traits declare, at one size
            expected = cls((4, 4), dtype=torch_dtype(row["dtype"])).traits.cost_exponent
    exponent = math.log(after / before) / math.log(row["n"] / smaller["n"])
    figures = {"contender": name, "dtype": row["dtype"], "device": row["device"], "what": what, "against": "n"}
    return Row(figures | {"points": [smaller["n"], row["n"]], "exponent": exponent, "expected": expected})
