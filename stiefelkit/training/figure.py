"""The look that all figures share, without a display and without touching matplotlib's global state."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stiefelkit.errors import printable
from stiefelkit.numbers import integer, validate_fields_
from stiefelkit.training.checks import known_words
from stiefelkit.training.files import writable, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette, which the colour-blind can tell apart."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.")
PERCENTS = (10, 20, 30, 50, 70, 80, 90, 93, 95, 97, 98, 99, 99.5, 99.9)
DPI = 200
FORMATS = ("png", "pdf", "svg")


@dataclass(frozen=True)
class Figures:
    """Format and resolution of figures.

    Args:
        format: of the figures: png, pdf or svg.
        dpi: dots per inch of a PNG, 20 to 2400; PDF and SVG have lines, not dots.
    """

    format: str = FORMATS[0]
    dpi: int = DPI

    def __post_init__(self) -> None:
        validate_fields_(self, "A figure", dpi=integer(20, 2400))
        known_words("A figure", "format", [self.format], FORMATS)

    def path(self, folder: Path, name: str) -> Path:
        """Returns the file of a figure in a folder."""
        return folder / f"{name}.{self.format}"


def styles(count: int) -> list[dict[str, Any]]:
    """Returns colours, markers and lines for so many curves; none comes twice among the first 49."""
    n = len(COLOURS)
    return [
        {"color": COLOURS[i % n], "marker": MARKERS[(i + i // n) % n], "linestyle": LINES[i // n % len(LINES)]}
        for i in range(count)
    ]


STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "font.size": 9,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
    "svg.hashsalt": "stiefelkit",
}
UNDATED = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


@contextmanager
def figure(
    path: Path, panels: int, width: float = 3.6, height: float = 2.9, dpi: int = DPI, projection: str = "rectilinear"
) -> Iterator[list["Axes"]]:
    """Gives the axes of a row of panels and saves them; the same curves give the same file, of the kind of its ending.

    Sizes are in inches, the width that of one panel. Raises RunError if the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context(STYLE):
        drawing = Figure(figsize=(width * panels, height), layout=ConstrainedLayoutEngine(w_pad=0.08))
        yield list(drawing.subplots(1, panels, squeeze=False, subplot_kw={"projection": projection})[0])
        content = io.BytesIO()
        drawing.savefig(content, format=path.suffix[1:], dpi=dpi, metadata=UNDATED.get(path.suffix))
        with writable("A figure", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())


def literal(name: str) -> str:
    r"""Returns a name as matplotlib shows it, letter by letter: no formulas, and none left out of a legend.

    >>> print(literal("$x$"))
    \$x\$
    """
    shown = printable(name).replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown  # a legend leaves out what begins with _


def legend(axes: "Axes") -> None:
    """Names the curves of a panel: inside, or beside it where they are many."""
    if len(axes.get_legend_handles_labels()[1]) <= len(COLOURS):
        axes.legend(loc="best")
    else:
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize="small")


def step_scale(axes: "Axes") -> None:
    """Makes the x axis of a panel one of steps from 0 on, with whole numbers even beside a single point."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, None)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))


def accuracy_scale(axes: "Axes") -> None:
    """Makes the y axis of a finished panel of fractions logistic: 90 to 95 % takes as much room as 50 to 68."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_yscale("logit", nonpositive="clip")
    axes.yaxis.set_major_locator(FixedLocator([percent / 100 for percent in PERCENTS]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")


def reference_line(axes: "Axes", value: float, label: str, below: bool = False) -> None:
    """Draws a dashed grey line across the panel, with its label above or below it instead of in the legend."""
    axes.axhline(value, color="0.35", linestyle="--", linewidth=1.0, zorder=1)
    axes.annotate(
        label, (1.0, value), (-2, -3 if below else 2), xycoords=("axes fraction", "data"), textcoords="offset points",
        ha="right", va="top" if below else "bottom", fontsize="small", color="0.35",
    )  # fmt: skip
