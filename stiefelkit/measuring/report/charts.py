"""The charts of a report."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stiefelkit.measuring.drift.plan import UNCONSTRAINED
from stiefelkit.measuring.drift.plot import HIGHEST
from stiefelkit.measuring.drift.run import DriftCurve
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.races.rows import FrameRow
from stiefelkit.measuring.report.findings import Findings
from stiefelkit.measuring.report.svg import GREY, INK, SERIES, Look, looks, number, panel, swatch
from stiefelkit.training.figure import literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Chart", "charts", "member_of"]

ERROR = "‖WᴴW − I‖ in rounding limits"


@dataclass(frozen=True)
class Chart:
    """A drawing with its heading, and with swatch and name of each curve as its legend."""

    title: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()


def member_of(contender: str) -> str:
    """The name in front of the precision and the options.

    >>> member_of("cayley (exact)")
    'cayley'
    """
    return contender.partition(" (")[0]


def charts(findings: Findings) -> dict[str, list[Chart]]:
    """Section to its charts; each map has one colour and one marker in all of them."""
    from stiefelkit.weights.attach import available

    maps = looks(list(available()))
    return {
        "drift": _drift(findings, maps),
        "time": _time(findings, maps),
        "ratios": _ratios(findings, maps),
        "norms": _norms(findings, maps),
        "scan": _scan(findings),
    }


def _legend(shown: Iterable[tuple[str, Look]]) -> tuple[tuple[str, str], ...]:
    return tuple((swatch(look), name) for name, look in shown)


def _limit_line(axes: "Axes") -> None:
    axes.axhline(1.0, color=GREY, linestyle=":", linewidth=1.0, zorder=1)
    axes.annotate(
        "rounding limit",
        xy=(0.99, 1.0),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize="small",
        color=GREY,
    )


def _log(axes: "Axes", which: str, ticks: Sequence[float] = ()) -> None:
    """Makes an axis logarithmic, with ticks at the given places if there are any."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    axis = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}scale")("log")
    axis.set_major_formatter(FuncFormatter(number))
    axis.set_minor_formatter(NullFormatter())
    if ticks:
        axis.set_major_locator(FixedLocator(list(ticks)))
        axis.set_minor_locator(NullLocator())
        return
    low, high = getattr(axes, f"get_{which}lim")()
    if high / low < 40:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())


def _drift(findings: Findings, maps: dict[str, Look]) -> list[Chart]:
    others = [curve.method for curve in findings.drift if curve.method not in maps and curve.method != UNCONSTRAINED]
    peers = [name for name in dict.fromkeys(others) if name in peer_optimizers.names()]
    ours = [name for name in dict.fromkeys(others) if name not in peers]
    frames = looks(ours) | looks(peers, dashed=True)
    drawn = []
    for title, shown in (("Maps", maps), ("Optimizers of frames", frames)):
        for n, p in dict.fromkeys((curve.n, curve.p) for curve in findings.drift):
            of_size = [curve for curve in findings.drift if (curve.n, curve.p) == (n, p)]
            curves = [curve for curve in of_size if curve.method in shown]
            if curves:
                curves += [curve for curve in of_size if curve.method == UNCONSTRAINED and shown is maps]
                drawn.append(_drift_chart(f"{title}, {n} × {p}", curves, shown | {UNCONSTRAINED: Look(GREY)}))
    return drawn


def _drift_chart(title: str, curves: list[DriftCurve], shown: dict[str, Look]) -> Chart:
    def draw(axes: "Axes") -> None:
        for curve in curves:
            every = max(1, len(curve.steps) // 8)
            look = shown[curve.method].line
            axes.plot(curve.steps, curve.ratios, markevery=every, **look, gid=f"of {curve.method}")
        axes.set_xscale("symlog", linthresh=1)
        decades = [0, *(10**k for k in range(math.floor(math.log10(curves[0].steps[-1])) + 1))]
        axes.set_xticks(decades, [number(step) if step else "0" for step in decades])
        axes.set_xlim(0, 1.1 * curves[0].steps[-1])
        axes.set(xlabel="optimizer steps", ylabel=ERROR)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.3), min(max(high, 10), HIGHEST))
        _log(axes, "y")
        _limit_line(axes)

    words = "; ".join(f"{curve.method} at most {curve.worst:.3g}" for curve in curves)
    name = "drift-" + "".join(letter if letter.isalnum() else "-" for letter in title.lower())
    label = f"{title}: error in rounding limits against optimizer steps. {words}."
    legend = _legend((curve.method, shown[curve.method]) for curve in curves)
    return Chart(title, panel(name, label, draw), legend)


def _time(findings: Findings, maps: dict[str, Look]) -> list[Chart]:
    rows = [row for heat in findings.time for row in heat.rows if member_of(row.contender) in maps]
    if not rows:
        return []
    units = {heat.problem.n: heat.unit for heat in reversed(findings.time)}
    names = list(dict.fromkeys(row.contender for row in rows))
    exact = [name for name in names if "(fast" not in name]
    shown = {name: maps[member_of(name)] for name in exact}
    sizes = sorted({row.n for row in rows})
    product = Look(INK)
    legend = _legend([*((member_of(name), look) for name, look in shown.items()), ("g, one product", product)])

    def drawing(
        value: Callable[[FrameRow], float], unit: Callable[[int], float], label: str
    ) -> Callable[["Axes"], None]:
        def draw(axes: "Axes") -> None:
            for name, look in shown.items():
                points = sorted((row.n, value(row)) for row in rows if row.contender == name)
                axes.plot(*zip(*points, strict=True), **look.line, gid=f"of {member_of(name)}")
            ends = sorted(units)
            axes.plot(ends, [unit(n) for n in ends], color=INK, linewidth=2.2, gid="of g, one product")
            _log(axes, "x", sizes)
            _log(axes, "y")
            axes.set(xlabel="n", ylabel=label)

        return draw

    in_ms = drawing(lambda row: 1e3 * row.seconds, lambda n: 1e3 * units[n], "milliseconds")
    in_g = drawing(lambda row: row.gemm_units, lambda n: 1.0, "products of n × n matrices (g)")
    scope = f"{', '.join(map(member_of, exact))}, for n from {sizes[0]} to {sizes[-1]}; the figures are in the table."
    return [
        Chart("Milliseconds", panel("time-ms", f"Time against n, both logarithmic: {scope}", in_ms), legend),
        Chart("Matrix products", panel("time-g", f"Time in matrix products against n: {scope}", in_g), legend),
    ]


def _ratios(findings: Findings, maps: dict[str, Look]) -> list[Chart]:
    rows = [row for heat in findings.time for row in heat.rows if member_of(row.contender) in maps]
    rows = [row for row in rows if row.ratio_to_best_peer is not None and "(fast" not in row.contender]
    names = list(dict.fromkeys(member_of(row.contender) for row in rows))
    sizes = sorted({row.n for row in rows})
    if not rows:
        return []

    def draw(axes: "Axes") -> None:
        for row in rows:
            place = names.index(member_of(row.contender))
            offset = (sizes.index(row.n) - (len(sizes) - 1) / 2) * 0.8 / len(sizes)
            look = maps[member_of(row.contender)]
            assert row.ratio_to_best_peer is not None
            words = f"{row.contender}, n = {row.n}: {row.ratio_to_best_peer:.3g}"
            axes.plot([1, row.ratio_to_best_peer], [place + offset] * 2, color=look.colour, linewidth=1.0, alpha=0.5)
            point = axes.plot([row.ratio_to_best_peer], [place + offset], "o", color=look.colour, markersize=5)[0]
            point.set_gid(f"of {words}")
            right = row.ratio_to_best_peer >= 1
            axes.annotate(
                f"{row.n}",
                xy=(row.ratio_to_best_peer, place + offset),
                xytext=(5 if right else -5, 0),
                textcoords="offset points",
                ha="left" if right else "right",
                va="center",
                fontsize="x-small",
                color=GREY,
            )
        axes.axvline(1.0, color=GREY, linestyle=":", linewidth=1.0, zorder=1)
        axes.set_yticks(range(len(names)), [literal(name) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.set_xscale("log")
        ratios = [row.ratio_to_best_peer or 1.0 for row in rows]
        low, high = min(0.5, 0.7 * min(ratios)), max(2.0, 1.5 * max(ratios))
        axes.set_xlim(low, high)
        _log(axes, "x", [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high])
        axes.set_xlabel("times as fast as the best peer")

    words = "; ".join(f"{row.contender} at n = {row.n}: {row.ratio_to_best_peer:.3g}" for row in rows)
    height = 0.9 + len(names) * max(0.55, 0.14 * len(sizes))
    return [Chart("By size", panel("ratios", f"Times as fast as the best peer. {words}.", draw, height))]


def _norms(findings: Findings, maps: dict[str, Look]) -> list[Chart]:
    drawn = []
    entries = [pair for heat in findings.norms for pair in zip(heat.rows, heat.is_peer, strict=True)]
    tops = [error for row, _ in entries for error in row.errors_over_limit if error is not None]
    for of_peers, title in ((False, "Maps of stiefelkit"), (True, "Other implementations")):
        shown = [row for row, is_peer in entries if is_peer == of_peers and "(fast" not in row.contender]
        if not shown:
            continue
        peers = looks([row.contender for row in shown], dashed=True)
        look = {row.contender: peers[row.contender] if of_peers else maps[row.family] for row in shown}

        def draw(axes: "Axes", shown: list = shown, look: dict[str, Look] = look) -> None:
            for row in shown:
                points = zip(row.factors, row.errors_over_limit, strict=True)
                xs, ys = zip(*((x, math.nan if y is None else y) for x, y in points), strict=True)
                axes.plot(xs, ys, **look[row.contender].line, gid=f"of {row.contender}")
            _log(axes, "x", shown[0].factors)
            axes.set_yscale("log")
            axes.set_ylim(0.3, max(20.0, 2 * max(tops)))
            _log(axes, "y")
            _limit_line(axes)
            axes.set(xlabel="coordinates times", ylabel=ERROR)

        worst = "; ".join(f"{row.contender} at the largest {_words(row.errors_over_limit[-1])}" for row in shown)
        svg = panel(f"norms-{int(of_peers)}", f"{title}: error against the norm of the coordinates. {worst}.", draw)
        label = (lambda row: row.contender) if of_peers else (lambda row: row.family)
        drawn.append(Chart(title, svg, _legend((label(row), look[row.contender]) for row in shown)))
    return drawn


def _words(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.3g}"


def _scan(findings: Findings) -> list[Chart]:
    drawn = []
    for heat in findings.scan:
        if heat.operation != "forward_backward":
            continue
        order = list(zip(heat.rows, heat.is_peer, strict=True))
        longest = max(row.limit_units for row in heat.rows)

        def draw(axes: "Axes", order: list = order, longest: float = longest) -> None:
            for place, (row, is_peer) in enumerate(order):
                colour = GREY if is_peer else SERIES[0]
                bar = axes.barh(place, row.limit_units, 0.62, color=colour, alpha=0.55 if is_peer else 1.0)[0]
                bar.set_gid(f"of {row.contender}: {1e3 * row.seconds:.3g} ms")
                axes.text(
                    row.limit_units + longest / 80, place, f"{row.limit_units:.3g}", va="center", fontsize="small"
                )
            axes.set_yticks(range(len(order)), [literal(row.contender) for row, _ in order])
            axes.set_ylim(len(order) - 0.4, -0.6)
            axes.set_xlim(0, 1.12 * longest)
            axes.grid(visible=False, axis="y")
            axes.axvline(1.0, color=INK, linewidth=1.0)
            axes.set_xlabel("time / LIMIT")

        words = "; ".join(f"{row.contender} {row.limit_units:.3g}" for row in heat.rows)
        label = f"Case {heat.case}: time over the limit. {words}."
        drawn.append(Chart(f"{heat.case}", panel(f"scan-{heat.case.name}", label, draw, 0.7 + 0.3 * len(order))))
    return drawn
