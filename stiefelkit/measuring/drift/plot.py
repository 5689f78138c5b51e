"""The figure of a drift experiment."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stiefelkit.measuring.drift.run import DriftCurve
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.training.figure import DPI, figure, literal, log_scale, reference_line, styles

__all__ = ["draw"]

HIGHEST = 1e9
"""Of what is shown: beyond it a weight is lost, and would only squeeze the others."""


def draw(path: Path, curves: Sequence[DriftCurve], words: str, grey: str, dpi: int = DPI) -> None:
    """Draws errors over the limit against steps, a panel for each size; peers are dashed, and `grey` is grey.

    What all curves have in common stands in `words`, for the titles.
    """
    sizes = list(dict.fromkeys((curve.n, curve.p) for curve in curves))
    methods = [method for method in dict.fromkeys(curve.method for curve in curves) if method != grey]
    look: dict[str, dict[str, Any]] = {grey: {"color": "0.55"}}
    look.update(zip(methods, styles(len(methods)), strict=True))
    for method in set(methods) & set(peer_optimizers.names()):
        look[method]["linestyle"] = "--"
    width, height = 3.8 + 2.0 / len(sizes), max(3.4, 0.19 * len(look))
    with figure(path, len(sizes), width=width, height=height, dpi=dpi) as panels:
        for axes, (n, p) in zip(panels, sizes, strict=True):
            of_size = [curve for curve in curves if (curve.n, curve.p) == (n, p)]
            for curve in of_size:
                axes.plot(curve.steps, curve.ratios, label=literal(curve.method), **look[curve.method])
            reference_line(axes, 1.0, "rounding limit", below=True)
            axes.set_xscale("symlog", linthresh=1)
            axes.set(title=f"{n} x {p}, {words}", xlabel="optimizer step")
            axes.set_yscale("log")
            axes.set_xlim(0, max(curve.steps[-1] for curve in of_size))
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.1), min(max(high, 10), HIGHEST))
            log_scale(axes)
        panels[0].set_ylabel(r"$\Vert W^H W - I\Vert_F$ / rounding limit")
        shown = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        panels[-1].legend(shown.values(), shown.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5))
