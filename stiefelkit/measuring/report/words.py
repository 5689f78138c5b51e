"""What the figures of a report say in a sentence each."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from stiefelkit.measuring.drift.plan import UNCONSTRAINED
from stiefelkit.measuring.growth.measure import PRODUCT
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.races.recurrences import LOOP
from stiefelkit.measuring.report.charts import member_of
from stiefelkit.measuring.report.findings import Findings
from stiefelkit.measuring.report.tables import figure_of

__all__ = ["Tile", "near_orthogonal", "sentences", "tiles"]


@dataclass(frozen=True)
class Tile:
    """One figure of a section to begin with, in large letters, what it is, and what to compare it with."""

    section: str
    figure: str
    words: str
    beside: str = ""


def tiles(findings: Findings) -> list[Tile]:
    """The figures that sum up a report; those of sections that it has."""
    shown = [_of_drift(findings), _of_speed(findings), _of_norms(findings), _of_scan(findings)]
    return [tile for tile in shown if tile is not None]


def sentences(findings: Findings) -> dict[str, str]:
    """Section to what was found in it."""
    texts = {}
    if findings.drift:
        unheld = [curve for curve in findings.drift if curve.method == UNCONSTRAINED]
        steps = f"{findings.drift[0].steps[-1]:,}"
        texts["drift"] = f"{steps} optimizer steps under a gradient that turns the weight steadily."
        if unheld:
            texts["drift"] += f" A weight that nothing holds ends {figure_of(unheld[0].worst)} limits off."
    rows = [row for heat in findings.growth for row in heat.rows]
    of_size = [row for row in rows if (row.what, row.against) == ("time", "n")]
    faster = [f"{row.contender} ({row.what} against {row.against})" for row in rows if row.faster]
    if of_size:
        product = next((row for row in of_size if row.contender == PRODUCT and row.exponent is not None), None)
        texts["growth"] = "Nothing grows faster than expected." if not faster else f"Faster: {', '.join(faster)}."
        if product is not None:
            texts["growth"] += f" One matrix product grows as n to the power {product.exponent:.2f} on this machine."
    return texts


def _of_drift(findings: Findings) -> Tile | None:
    peers = peer_optimizers.names()
    exempt = (UNCONSTRAINED, *near_orthogonal())
    ours = [curve for curve in findings.drift if curve.method not in peers and curve.method not in exempt]
    if not ours:
        return None
    steps = f"{ours[0].steps[-1]:,}"
    beside = _worst({curve.method: curve.worst for curve in findings.drift if curve.method in peers})
    largest = max(_with_nan(curve.worst) for curve in ours)
    return Tile("drift", figure_of(largest), f"rounding limits at most in {steps} steps", beside)


def _of_speed(findings: Findings) -> Tile | None:
    raced = [pair for heat in findings.time for pair in zip(heat.rows, heat.families, strict=True)]
    rows = [row for row, family in raced if row.ratio_to_best_peer and family == member_of(row.contender)]
    ratios = [(row.ratio_to_best_peer or 0.0, row) for row in rows if "(fast" not in row.contender]
    if not ratios:
        return None
    largest = max(row.n for _, row in ratios)
    by_ratio = sorted((ratio, member_of(row.contender)) for ratio, row in ratios if row.n == largest)
    figure = _range(by_ratio[0][0], by_ratio[-1][0])
    beside = f"n = {largest}: {by_ratio[0][1]} least, {by_ratio[-1][1]} most"
    return Tile("ratios", figure, "as fast as the best peer", beside)


def _of_norms(findings: Findings) -> Tile | None:
    entries = [pair for heat in findings.norms for pair in zip(heat.rows, heat.is_peer, strict=True)]
    exact = [row for row, is_peer in entries if not is_peer and "(fast" not in row.contender]
    exact = [row for row in exact if row.family not in near_orthogonal()]
    if not exact:
        return None
    factor = figure_of(exact[0].factors[-1])
    largest = max(_with_nan(row.errors_over_limit[-1]) for row in exact)
    beside = _worst({row.contender: row.errors_over_limit[-1] for row, is_peer in entries if is_peer})
    return Tile("norms", figure_of(largest), f"rounding limits at coordinates × {factor}", beside)


def _of_scan(findings: Findings) -> Tile | None:
    ratios = [
        row.time_over_ours
        for heat in findings.scan
        for row in heat.rows
        if row.contender == LOOP and row.time_over_ours is not None
    ]
    entries = [pair for heat in findings.scan for pair in zip(heat.rows, heat.is_peer, strict=True)]
    limits = [row.limit_units for row, is_peer in entries if not is_peer]
    if not ratios:
        return None
    figure = _range(min(ratios), max(ratios))
    return Tile("scan", figure, "as fast as a loop with autograd", f"{figure_of(min(limits))} times the LIMIT at best")


def _range(low: float, high: float) -> str:
    ends = [figure_of(low), figure_of(high)]
    return " to ".join(dict.fromkeys(ends)) + " ×"


def near_orthogonal() -> list[str]:
    """The maps whose weights are not frames, and not meant to be, by their traits."""
    import torch

    from stiefelkit.errors import StiefelkitError
    from stiefelkit.weights.attach import available

    names = []
    for name, cls in available().items():
        dtype = torch.float32 if cls.supports((4, 4), torch.float32) is None else torch.complex64
        with contextlib.suppress(StiefelkitError):
            names += [] if cls((4, 4), dtype=dtype).traits.exact else [name]
    return names


def _worst(errors: Mapping[str, float | None]) -> str:
    """The name of the largest error, and the error; empty without any."""
    name = max(errors, key=lambda name: _with_nan(errors[name]), default=None)
    return "" if name is None else f"{name}: {figure_of(errors[name])}"


def _with_nan(value: float | None) -> float:
    """So that what is not finite is the largest."""
    return math.inf if value is None or math.isnan(value) else value
