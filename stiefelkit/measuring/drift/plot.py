"""The figure of a drift experiment."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stiefelkit.measuring.drift.run import DriftCurve
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.training.figure import DPI, figure, literal, log_scale, reference_line, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "draw_panel", "error_scale", "looks"]

ERROR = r"$\Vert W^H W - I\Vert_F$ / rounding limit"
HIGHEST = 1e9
"""Of what is shown: beyond it a weight is lost, and would only squeeze the others."""


def draw(path: Path, curves: Sequence[DriftCurve], words: str, grey: str, dpi: int = DPI) -> None:
    """Draws errors over the limit against steps, a panel for each size; peers are dashed, and `grey` is grey.

    What all curves have in common stands in `words`, for the titles.
    """
    sizes = list(dict.fromkeys((curve.n, curve.p) for curve in curves))
    look = looks([curve.method for curve in curves], grey)
    width, height = 3.8 + 2.0 / len(sizes), max(3.4, 0.19 * len(look))
    with figure(path, len(sizes), width=width, height=height, dpi=dpi) as panels:
        for axes, (n, p) in zip(panels, sizes, strict=True):
            draw_panel(axes, [curve for curve in curves if (curve.n, curve.p) == (n, p)], look)
            axes.set(title=f"{n} x {p}, {words}")
        panels[0].set_ylabel(ERROR)
        shown = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        panels[-1].legend(shown.values(), shown.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5))


def looks(methods: Sequence[str], grey: str) -> dict[str, dict[str, Any]]:
    """Returns method to the options of its line."""
    look: dict[str, dict[str, Any]] = {grey: {"color": "0.55"}}
    coloured = [method for method in dict.fromkeys(methods) if method != grey]
    look.update(zip(coloured, styles(len(coloured)), strict=True))
    for method in set(coloured) & set(peer_optimizers.names()):
        look[method]["linestyle"] = "--"
    return look


def draw_panel(axes: "Axes", curves: Sequence[DriftCurve], look: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws the curves of one size into axes."""
    for curve in curves:
        axes.plot(curve.steps, curve.ratios, label=literal(curve.method), **look[curve.method])
    axes.set_xscale("symlog", linthresh=1)
    axes.set(xlabel="optimizer step")
    axes.set_xlim(0, max(curve.steps[-1] for curve in curves))
    error_scale(axes)


def error_scale(axes: "Axes") -> None:
    """Makes the y axis one of errors over the rounding limit, which is drawn."""
    reference_line(axes, 1.0, "rounding limit", below=True)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.1), min(max(high, 10), HIGHEST))
    log_scale(axes)
