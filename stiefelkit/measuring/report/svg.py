"""Charts as pieces of a page: SVG whose colours are those of the page, and nothing outside it."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from stiefelkit.errors import printable
from stiefelkit.training.figure import MARKERS, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["GREY", "INK", "SERIES", "Look", "looks", "number", "panel", "swatch"]

INK, GREY, GRID = "#0a0c00", "#0a0c01", "#0a0c02"
TOKENS = {INK: "--ink", GREY: "--grey", GRID: "--grid"}
SERIES = tuple(f"#0a0b0{i}" for i in range(9))
TOKENS |= {token: f"--s{i}" for i, token in enumerate(SERIES)}
"""Colours that nothing else has, to the CSS variables that stand for them in the page, in light and in dark."""

PAGE_STYLE: dict[Any, Any] = STYLE | {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "font.size": 9.5,
    "grid.alpha": 1.0,
    "grid.color": GRID,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.color": GREY,
    "ytick.labelcolor": INK,
}
WIDTH = 4.8
"""Inches of a panel: so narrow that its letters can still be read on a telephone."""

SHAPES = {
    "o": "M-3 0A3 3 0 1 0 3 0A3 3 0 1 0-3 0Z",
    "s": "M-3-3H3V3H-3Z",
    "^": "M0-3.5L3.5 3H-3.5Z",
    "D": "M0-4L4 0L0 4L-4 0Z",
    "v": "M0 3.5L3.5-3H-3.5Z",
    "P": "M-1.2-3.5H1.2V-1.2H3.5V1.2H1.2V3.5H-1.2V1.2H-3.5V-1.2H-1.2Z",
    "X": "M-3.5-2L-2-3.5L0-1.5L2-3.5L3.5-2L1.5 0L3.5 2L2 3.5L0 1.5L-2 3.5L-3.5 2L-1.5 0Z",
}


@dataclass(frozen=True)
class Look:
    """How one contender looks in every chart of a page: a token, matplotlib's letter, dashed if it is a peer."""

    colour: str
    marker: str = ""
    dashed: bool = False

    @property
    def line(self) -> dict[str, Any]:
        """Options of matplotlib's plot."""
        style = "--" if self.dashed else "-"
        fill = {"markerfacecolor": "none"} if self.dashed else {}
        return {"color": self.colour, "marker": self.marker or None, "linestyle": style, **fill}


def looks(names: list[str], dashed: bool = False) -> dict[str, Look]:
    """Name to look, a colour and a marker for each; no pair comes twice among the first 63."""
    return {name: Look(SERIES[i % 9], MARKERS[i % 7], dashed) for i, name in enumerate(names)}


def panel(name: str, label: str, draw: Callable[["Axes"], None], height: float = 3.3) -> str:
    """Draws one chart and returns it as an SVG element.

    A line or a bar whose `gid` is "of NAME" shows that name under the pointer.

    Args:
        name: of the chart, unique in the page.
        label: what a reader hears who cannot see it.
        draw: draws into the axes.
        height: inches.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style: dict[Any, Any] = {**PAGE_STYLE, "svg.hashsalt": name}
    with mpl.rc_context(style):
        drawing = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03))
        FigureCanvasSVG(drawing)
        axes = drawing.subplots()
        draw(axes)
        for tick in (*axes.get_xticklines(), *axes.get_yticklines()):
            tick.set_markersize(2.5)
        content = io.StringIO()
        drawing.savefig(content, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inlined(content.getvalue(), name, label)


def _inlined(drawn: str, name: str, label: str) -> str:
    match = re.search(r"<svg[^>]*?viewBox=\"([^\"]*)\"[^>]*>(.*)</svg>", drawn, re.DOTALL)
    assert match is not None
    box, inner = match.groups()
    for pattern, replacement in (
        (r"<metadata>.*?</metadata>", ""),
        (r"<style.*?</style>", ""),
        (r"<!--.*?-->", ""),
        (r"<defs>\s*</defs>", ""),
        (r"\bxlink:href=", "href="),
        (r'<g id="of ([^"]*)">', r'<g class="series"><title>\1</title>'),
        # the only groups that matplotlib names for others than itself have a gid
        (r'(<g) id="[^"]*"', r"\1"),
        (r"font: (?:\w+ )*?([\d.]+px)[^;\"]*", r"font-size: \1"),
        (r'\bid="', f'id="{name}-'),
        (r'href="#', f'href="#{name}-'),
        (r"url\(#", f"url(#{name}-"),
        (r"\n\s*", "\n"),
        *((token, f"var({variable})") for token, variable in TOKENS.items()),
    ):
        inner = re.sub(pattern, replacement, inner, flags=re.DOTALL)
    inner, label = printable(inner.replace("\u200b", "")), escape(printable(label))
    return f'<svg class="chart" role="img" aria-label="{label}" viewBox="{box}">{inner}</svg>'


def swatch(look: Look) -> str:
    """A short piece of the line, for a legend."""
    colour = f"var({TOKENS[look.colour]})"
    dashes = ' stroke-dasharray="5 3"' if look.dashed else ""
    shape = SHAPES[look.marker] if look.marker in MARKERS else ""
    fill = "var(--page)" if look.dashed else colour
    mark = f'<path d="{shape}" fill="{fill}" stroke="{colour}" transform="translate(14 6)"/>' if shape else ""
    line = f'<path d="M1 6H27" stroke="{colour}" stroke-width="2" fill="none"{dashes}/>'
    return f'<svg class="swatch" aria-hidden="true" viewBox="0 0 28 12">{line}{mark}</svg>'


def number(value: float, _: object = None) -> str:
    """A label of a logarithmic axis: plain where it is short, a power of ten elsewhere.

    >>> number(0.01), number(1e5), number(3e-7)
    ('0.01', '10⁵', '3·10⁻⁷')
    """
    if value <= 0 or 1e-3 <= value < 1e4:
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if mantissa == "1" else f"{mantissa}·{power}"
