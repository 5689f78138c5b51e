"""The charts of a report, as matplotlib draws them."""

import base64
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from stiefelkit.measuring.drift.plan import UNCONSTRAINED
from stiefelkit.measuring.drift.run import ERROR, DriftCurve, draw_panel, error_scale, looks
from stiefelkit.measuring.races.field import Row
from stiefelkit.measuring.report.findings import Findings
from stiefelkit.training.figure import COLOURS, STYLE, literal, styles
from stiefelkit.weights.attach import available

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
Looks = dict[str, dict[str, Any]]
"""Name to the options of its line."""


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


def figure_of(value: float | str | None) -> str:
    """Returns three digits; large numbers as powers of ten, and words as they are.

    >>> figure_of(0.1234), figure_of(12345.6), figure_of(2.8e7), figure_of(None)
    ('0.123', '12,300', '2.8 × 10⁷', '-')
    """
    if value is None or isinstance(value, str):
        return value or "-"
    if not math.isfinite(value):
        return "not finite"
    if value and not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa} × 10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    if abs(value) >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    decimals = 1 if abs(value) >= 9.95 else 2 if abs(value) >= 0.995 else 3
    return f"{value:.{decimals}f}" if abs(value) >= 0.01 else f"{value:.3g}"


def charts(findings: Findings) -> dict[str, list[Chart]]:
    """Returns section to its charts; each map has one colour and one marker in all of them."""
    maps: Looks = dict(zip(available(), styles(len(available())), strict=True))
    rows = [row for race in findings.time for row in race.rows if row.member in maps and not row.is_fast]
    scans = [race for race in findings.scan if race.operation == "forward_backward" and race.rows]
    units = {race.subject.n: race.unit for race in reversed(findings.time)}
    return {
        "drift": _drift(findings.drift, maps),
        "time": _time(rows, units, maps),
        "ratios": _ratios([row for row in rows if row["ratio_to_best_peer"] is not None], maps),
        "norms": _norms([row for race in findings.norms for row in race.rows if not row.is_fast], maps),
        "scan": [_scan(f"{race.subject}", race.rows) for race in scans],
    }


def _chart(title: str, label: str, draw: Callable[["Axes"], None], height: float = 3.0) -> Chart:
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


def _drift(measured: list[DriftCurve], maps: Looks) -> list[Chart]:
    frames = looks([curve.method for curve in measured if curve.method not in maps])
    grey = {UNCONSTRAINED: frames.pop(UNCONSTRAINED)}

    def draw(axes: "Axes", curves: list[DriftCurve], look: Looks) -> None:
        draw_panel(axes, curves, look)
        axes.set_ylabel(ERROR)

    drawn = []
    for title, look in (("Maps", maps | grey), ("Optimizers of frames", frames)):
        for n, p in dict.fromkeys((curve.n, curve.p) for curve in measured):
            curves = [curve for curve in measured if (curve.n, curve.p) == (n, p) and curve.method in look]
            if any(curve.method != UNCONSTRAINED for curve in curves):
                worst = "; ".join(f"{curve.method} at most {curve.worst:.3g}" for curve in curves)
                label = f"{title}, {n} × {p}: error in rounding limits against optimizer steps. {worst}."
                drawn.append(_chart(f"{title}, {n} × {p}", label, partial(draw, curves=curves, look=look)))
    return drawn


def _time(rows: list[Row], units: dict[int, float], maps: Looks) -> list[Chart]:
    names = list(dict.fromkeys(row.member for row in rows))
    sizes = sorted({row["n"] for row in rows})

    def draw(axes: "Axes", label: str, scale: Callable[[int], float]) -> None:
        for name in names:
            points = sorted((row["n"], scale(row["n"]) * row["seconds"]) for row in rows if row.member == name)
            axes.plot(*zip(*points, strict=True), label=literal(name), **maps[name])
        axes.plot(sizes, [scale(n) * units[n] for n in sizes], "0.2", linewidth=2.5, label="g, one product")
        _log_ticks(axes, dict(zip(sizes, map(str, sizes), strict=True)))
        axes.set(xlabel="n", ylabel=label)
        axes.set_yscale("log")

    def chart(title: str, label: str, scale: Callable[[int], float]) -> Chart:
        words = f"{', '.join(names)}, n from {sizes[0]} to {sizes[-1]}; the table has the figures."
        return _chart(title, f"Time against n, {label}: {words}", partial(draw, label=label, scale=scale))

    if not rows:
        return []
    products = chart("Matrix products", "products of n × n matrices (g)", lambda n: 1 / units[n])
    return [chart("Milliseconds", "milliseconds", lambda n: 1e3), products]


def _log_ticks(axes: "Axes", ticks: dict[Any, str]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), list(ticks.values()), minor=False)
    axes.minorticks_off()
    if len(ticks) == 1:
        (x,) = ticks
        axes.set_xlim(x / 2, 2 * x)


def _ratios(rows: list[Row], maps: Looks) -> list[Chart]:
    names = list(dict.fromkeys(row.member for row in rows))
    sizes = sorted({row["n"] for row in rows})

    def draw(axes: "Axes") -> None:
        for row in rows:
            ratio, name = row["ratio_to_best_peer"], row.member
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
        _log_ticks(axes, {tick: f"{tick:g}" for tick in TICKS if low <= tick <= high})
        axes.set(xlabel="times as fast as the best peer", xlim=(low, high))

    words = "; ".join(f"{row.contender} at n = {row['n']}: {row['ratio_to_best_peer']:.3g}" for row in rows)
    height = 0.9 + len(names) * max(0.55, 0.14 * len(sizes))
    return [_chart("By size", f"Times as fast as the best peer. {words}.", draw, height)] if rows else []


def _norms(rows: list[Row], maps: Looks) -> list[Chart]:
    def draw(axes: "Axes", shown: dict[str, Row], look: Looks) -> None:
        for name, row in shown.items():
            axes.plot(row["factors"], row.errors, label=literal(name), **look[name])
        axes.set_xscale("log")
        axes.set(xlabel="coordinates times", ylabel=ERROR)
        error_scale(axes)

    ours = {row.family: row for row in rows if not row.is_peer}
    peers = {row.contender: row for row in rows if row.is_peer}
    looks_of_peers: Looks = dict(zip(peers, styles(len(peers)), strict=True))
    drawn = []
    for title, shown, look in (("Maps of stiefelkit", ours, maps), ("Other implementations", peers, looks_of_peers)):
        words = "; ".join(f"{name} at the largest {figure_of(row.errors[-1])}" for name, row in shown.items())
        label = f"{title}: error against the norm of the coordinates. {words}."
        drawn += [_chart(title, label, partial(draw, shown=shown, look=look))] if shown else []
    return drawn


def _scan(case: str, rows: list[Row]) -> Chart:
    def draw(axes: "Axes") -> None:
        colours = ["0.6" if row.is_peer else COLOURS[0] for row in rows]
        bars = axes.barh([literal(row.contender) for row in rows], [row["limit_units"] for row in rows], color=colours)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize="small")
        axes.axvline(1.0, color="0.2", linewidth=1.0)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.set_xlabel("time / LIMIT")

    words = "; ".join(f"{row.contender} {row['limit_units']:.3g}" for row in rows)
    return _chart(case, f"Case {case}: time over the limit. {words}.", draw, 0.7 + 0.3 * len(rows))
