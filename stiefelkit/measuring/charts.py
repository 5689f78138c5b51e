"""The charts of drift, as files and on the page of a report."""

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stiefelkit.figure import figure, literal, reference_line
from stiefelkit.measuring.contest import DriftCurve, Race
from stiefelkit.measuring.implementations import near_orthogonal
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.plans import UNCONSTRAINED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ERROR = r"$\Vert W^H W - I\Vert_F$ / rounding limit"
HIGHEST = 1e9  # the largest error that is shown: beyond it a weight is lost, and would only squeeze the others


def draw_drift(target: Path | io.BytesIO, curves: Sequence[DriftCurve], words: str, dpi: int = 200) -> None:
    """Draws errors over the limit against steps, a panel for each size, with `words` in the titles."""
    sizes = list(dict.fromkeys((curve.n, curve.p) for curve in curves))
    with figure(target, len(sizes), dpi) as panels:
        for axes, (n, p) in zip(panels, sizes, strict=True):
            draw_panel(axes, [curve for curve in curves if (curve.n, curve.p) == (n, p)])
            axes.set(title=f"{n} x {p}, {words}")
            axes.legend(fontsize="small")
        panels[0].set_ylabel(ERROR)


def draw_panel(axes: "Axes", curves: Sequence[DriftCurve]) -> None:
    """Draws the curves of one size into axes."""
    others = {*peer_optimizers, *near_orthogonal(), UNCONSTRAINED}
    ours = [curve for curve in curves if not (curve.method in others or ":" in curve.method or math.isnan(curve.worst))]
    ours = ours if len(ours) < len(curves) and any(curve.method in peer_optimizers for curve in curves) else []
    for number, curve in enumerate(ours):
        label = f"stiefelkit, {len(ours)} methods" if number == 0 else None
        axes.plot(curve.steps, curve.ratios, color="C0", label=label)
    alone = [curve for curve in curves if curve not in ours]
    for number, curve in enumerate(alone, 1):
        colour = "0.55" if curve.method == UNCONSTRAINED else f"C{number % 10}"
        line = "--" if curve.method in peer_optimizers else "-"
        axes.plot(curve.steps, curve.ratios, color=colour, linestyle=line, label=literal(curve.method))
    axes.set_xscale("symlog", linthresh=1)
    axes.set(xlabel="optimizer step")
    reference_line(axes, 1.0, "rounding limit")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.1), min(max(high, 10), HIGHEST))


def chart(race: Race) -> tuple[str, str, str]:
    """Returns heading, what a reader hears who cannot see it, and address of the image of a race of drift."""
    content = io.BytesIO()
    draw_drift(content, race.curves, race.subject.partition(", ")[2])
    worst = "; ".join(f"{curve.method} at most {curve.worst:.3g} rounding limits" for curve in race.curves)
    source = f"data:image/svg+xml;base64,{base64.b64encode(content.getvalue()).decode()}"
    return race.subject, f"{race.subject}: {worst}.", source
