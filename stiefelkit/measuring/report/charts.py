"""The charts of a report, as matplotlib draws them."""

import base64
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stiefelkit.measuring.drift.plan import UNCONSTRAINED
from stiefelkit.measuring.drift.plot import ERROR, draw_panel, error_scale, looks
from stiefelkit.measuring.races.field import Row
from stiefelkit.measuring.report.findings import Findings
from stiefelkit.measuring.report.tables import figure_of, member_of
from stiefelkit.training.figure import COLOURS, STYLE, literal, log_scale, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Chart", "chart", "charts"]

Looks = dict[str, dict[str, Any]]
"""Name to the options of its line."""


@dataclass(frozen=True)
class Chart:
    """A drawing.

    Attributes:
        title: its heading.
        label: what a reader hears who cannot see it.
        svg: what matplotlib has drawn.
    """

    title: str
    label: str
    svg: bytes

    @property
    def source(self) -> str:
        """The drawing as the address of an image that holds it."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"


def chart(title: str, label: str, draw: Callable[["Axes"], None], height: float = 3.0) -> Chart:
    """Draws into axes, with the names of all curves below them, in so many inches beside those of the names."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
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
    return Chart(title, label, content.getvalue())


def charts(findings: Findings) -> dict[str, list[Chart]]:
    """Returns section to its charts; each map has one colour and one marker in all of them."""
    from stiefelkit.weights.attach import available

    names = list(available())
    maps = dict(zip(names, styles(len(names)), strict=True))
    return {
        "drift": _drift(findings, maps),
        "time": _time(findings, maps),
        "ratios": _ratios(findings, maps),
        "norms": _norms(findings, maps),
        "scan": _scan(findings),
    }


def _drift(findings: Findings, maps: Looks) -> list[Chart]:
    frames = looks([curve.method for curve in findings.drift if curve.method not in maps], UNCONSTRAINED)
    grey = frames.pop(UNCONSTRAINED)
    drawn = []
    for title, look in (("Maps", maps | {UNCONSTRAINED: grey}), ("Optimizers of frames", frames)):
        for n, p in dict.fromkeys((curve.n, curve.p) for curve in findings.drift):
            curves = [curve for curve in findings.drift if (curve.n, curve.p) == (n, p) and curve.method in look]
            if any(curve.method != UNCONSTRAINED for curve in curves):
                heading, worst = (
                    f"{title}, {n} × {p}",
                    [f"{curve.method} at most {curve.worst:.3g}" for curve in curves],
                )
                label = f"{heading}: error in rounding limits against optimizer steps. {'; '.join(worst)}."

                def draw(axes: "Axes", curves: list = curves, look: Looks = look) -> None:
                    draw_panel(axes, curves, look)
                    axes.set_ylabel(ERROR)

                drawn.append(chart(heading, label, draw))
    return drawn


def _exact(findings: Findings, maps: Looks) -> list[Row]:
    """Returns the times of our maps in their exact precisions."""
    rows = [row for race in findings.time for row in race.rows if member_of(row.contender) in maps]
    return [row for row in rows if "(fast" not in row.contender]


def _time(findings: Findings, maps: Looks) -> list[Chart]:
    rows = _exact(findings, maps)
    names = list(dict.fromkeys(row.contender for row in rows))
    sizes = sorted({row["n"] for row in rows})
    units = {race.subject.n: race.unit for race in reversed(findings.time)}
    drawn = []
    for title, label, scale in (
        ("Milliseconds", "milliseconds", lambda n: 1e3),
        ("Matrix products", "products of n × n matrices (g)", lambda n: 1 / units[n]),
    ):

        def draw(axes: "Axes", label: str = label, scale: Callable[[int], float] = scale) -> None:
            for name in names:
                points = sorted((row["n"], scale(row["n"]) * row["seconds"]) for row in rows if row.contender == name)
                axes.plot(*zip(*points, strict=True), label=literal(member_of(name)), **maps[member_of(name)])
            axes.plot(sizes, [scale(n) * units[n] for n in sizes], "0.2", linewidth=2.5, label="g, one product")
            axes.set_xscale("log")
            axes.set_xticks(sizes, [str(n) for n in sizes], minor=False)
            axes.minorticks_off()
            axes.set(xlabel="n", ylabel=label)
            log_scale(axes)

        if rows:
            words = f"{', '.join(map(member_of, names))}, n from {sizes[0]} to {sizes[-1]}; the table has the figures."
            drawn.append(chart(title, f"Time against n, {label}: {words}", draw))
    return drawn


def _ratios(findings: Findings, maps: Looks) -> list[Chart]:
    rows = [row for row in _exact(findings, maps) if row["ratio_to_best_peer"] is not None]
    names = list(dict.fromkeys(member_of(row.contender) for row in rows))
    sizes = sorted({row["n"] for row in rows})
    if not rows:
        return []

    def draw(axes: "Axes") -> None:
        for row in rows:
            ratio, name = row["ratio_to_best_peer"], member_of(row.contender)
            place = names.index(name) + (sizes.index(row["n"]) - (len(sizes) - 1) / 2) * 0.8 / len(sizes)
            axes.plot([1, ratio], [place] * 2, color=maps[name]["color"], marker="o", markevery=[1])
            align, gap = ("left", 5) if ratio >= 1 else ("right", -5)
            beside: Any = {"xytext": (gap, 0), "textcoords": "offset points", "ha": align, "va": "center"}
            axes.annotate(str(row["n"]), (ratio, place), fontsize="x-small", **beside)
        axes.axvline(1.0, color="0.35", linestyle=":", linewidth=1.0)
        axes.set_yticks(range(len(names)), [literal(name) for name in names])
        axes.invert_yaxis()
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        low, high = min(0.5, 0.7 * low), max(2.0, 1.3 * high)
        ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="times as fast as the best peer", xlim=(low, high))

    words = "; ".join(f"{row.contender} at n = {row['n']}: {row['ratio_to_best_peer']:.3g}" for row in rows)
    height = 0.9 + len(names) * max(0.55, 0.14 * len(sizes))
    return [chart("By size", f"Times as fast as the best peer. {words}.", draw, height)]


def _norms(findings: Findings, maps: Looks) -> list[Chart]:
    rows = [row for race in findings.norms for row in race.rows if "(fast" not in row.contender]
    drawn = []
    for of_peers, title in ((False, "Maps of stiefelkit"), (True, "Other implementations")):
        shown = {row.contender if of_peers else row.family: row for row in rows if row.is_peer == of_peers}
        look = dict(zip(shown, styles(len(shown)), strict=True)) if of_peers else maps

        def draw(axes: "Axes", shown: dict[str, Row] = shown, look: Looks = look) -> None:
            for name, row in shown.items():
                errors = [math.nan if error is None else error for error in row["errors_over_limit"]]
                axes.plot(row["factors"], errors, label=literal(name), **look[name])
            axes.set_xscale("log")
            axes.set(xlabel="coordinates times", ylabel=ERROR)
            error_scale(axes)

        if shown:
            worst = [(name, row["errors_over_limit"][-1]) for name, row in shown.items()]
            words = [f"{name} at the largest {figure_of(math.nan if x is None else x)}" for name, x in worst]
            label = f"{title}: error against the norm of the coordinates. {'; '.join(words)}."
            drawn.append(chart(title, label, draw))
    return drawn


def _scan(findings: Findings) -> list[Chart]:
    drawn = []
    for race in (race for race in findings.scan if race.operation == "forward_backward" and race.rows):

        def draw(axes: "Axes", rows: list[Row] = race.rows) -> None:
            colours = ["0.6" if row.is_peer else COLOURS[0] for row in rows]
            bars = axes.barh(
                [literal(row.contender) for row in rows], [row["limit_units"] for row in rows], color=colours
            )
            axes.bar_label(bars, fmt="%.3g", padding=3, fontsize="small")
            axes.axvline(1.0, color="0.2", linewidth=1.0)
            axes.margins(x=0.12)
            axes.invert_yaxis()
            axes.set_xlabel("time / LIMIT")

        words = "; ".join(f"{row.contender} {row['limit_units']:.3g}" for row in race.rows)
        label = f"Case {race.subject}: time over the limit. {words}."
        drawn.append(chart(str(race.subject), label, draw, 0.7 + 0.3 * len(race.rows)))
    return drawn
