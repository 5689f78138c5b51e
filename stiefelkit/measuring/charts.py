"""The charts of drift, and those of a report, as matplotlib draws them."""

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
HIGHEST = 1e9
"""The largest error that is shown: beyond it a weight is lost, and would only squeeze the others."""


def draw_drift(path: Path, curves: Sequence[DriftCurve], words: str, dpi: int = 200) -> None:
    """Draws errors over the limit against steps, a panel for each size, with `words` in the titles."""
    sizes = list(dict.fromkeys((curve.n, curve.p) for curve in curves))
    with figure(path, len(sizes), dpi) as panels:
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


# Of a report


@dataclass(frozen=True)
class Chart:
    """A drawing: its heading, what a reader hears who cannot see it, and what matplotlib has drawn."""

    title: str
    label: str
    svg: bytes

    @property
    def source(self) -> str:
        """The drawing as the address of an image that holds it."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"


def charts(section: str, races: Sequence[Race]) -> list[Chart]:
    """Returns the charts of a section, none of those that have only tables."""
    drawn = [race for race in races if race.rows]
    if section == "drift":
        return [_drift(race) for race in drawn]
    if section == "scan":
        return [_scan(race) for race in drawn if "limit_units" in race.rows[0].figures]
    return []


def _chart(title: str, words: str, draw: Callable[["Axes"], None], height: float = 3.0) -> Chart:
    """Draws into axes, with the names of all curves below them, in so many inches beside those of the names."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "stiefelkit"}):
        drawing = Figure(layout="constrained")
        FigureCanvasSVG(drawing)
        axes = drawing.subplots()
        draw(axes)
        names = axes.get_legend_handles_labels()[1]
        columns = 3 if all(len(name) < 24 for name in names) else 2
        if names:
            drawing.legend(loc="outside lower center", ncols=columns, fontsize="small")
        drawing.set_size_inches(5.2, height + 0.17 * math.ceil(len(names) / columns))
        content = io.BytesIO()
        drawing.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    return Chart(title, f"{title}: {words}.", content.getvalue())


def _drift(race: Race) -> Chart:
    curves = race.curves
    words = "; ".join(f"{curve.method} at most {curve.worst:.3g} rounding limits" for curve in curves)

    def draw(axes: "Axes") -> None:
        draw_panel(axes, curves)
        axes.set_ylabel(ERROR)

    return _chart(race.subject, words, draw)


def _scan(race: Race) -> Chart:
    def draw(axes: "Axes") -> None:
        colours = ["0.6" if row.is_peer else "C0" for row in race.rows]
        values = [row["limit_units"] for row in race.rows]
        bars = axes.barh([literal(row.name) for row in race.rows], values, color=colours)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize="small")
        axes.axvline(1.0, color="0.2", linewidth=1.0)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.set_xlabel("time / LIMIT")

    words = "; ".join(f"{row.name} {row['limit_units']:.3g} times LIMIT" for row in race.rows)
    return _chart(race.subject, words, draw, 0.7 + 0.3 * len(race.rows))
