"""Format of figures, and the file of one, without a display and without touching matplotlib's global state."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stiefelkit.errors import printable
from stiefelkit.files import writable, write_atomically
from stiefelkit.numbers import integer, one_of, validate_fields_

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "pdf", "svg")
UNDATED = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


@dataclass(frozen=True)
class Figures:
    """Format and resolution of figures.

    Args:
        format: of the figures: png, pdf or svg.
        dpi: dots per inch of a PNG, 20 to 2400; PDF and SVG have lines, not dots.
    """

    format: str = FORMATS[0]
    dpi: int = 200

    def __post_init__(self) -> None:
        validate_fields_(self, "A figure", dpi=integer(20, 2400), format=one_of(*FORMATS))

    def path(self, folder: Path, name: str) -> Path:
        """Returns the file of a figure in a folder."""
        return folder / f"{name}.{self.format}"


@contextmanager
def figure(target: Path | io.BytesIO, panels: int = 1, dpi: int = 200) -> Iterator[list["Axes"]]:
    """Gives the axes of a row of panels, and saves them, into memory as SVG; the same curves give the same file."""
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    looks = cycler(linestyle=["-", "--", "-.", ":"]) * mpl.rcParamsDefault["axes.prop_cycle"]
    with mpl.rc_context({"axes.prop_cycle": looks, "svg.hashsalt": "stiefelkit"}):
        drawing = Figure(figsize=(4.5 * panels, 3.5), layout="constrained")
        yield list(drawing.subplots(1, panels, squeeze=False)[0])
        content, suffix = (io.BytesIO(), target.suffix) if isinstance(target, Path) else (target, ".svg")
        drawing.savefig(content, format=suffix[1:], dpi=dpi, metadata=UNDATED.get(suffix))
    if isinstance(target, Path):
        with writable("A figure", target):
            target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content.getvalue())


def literal(name: str) -> str:
    r"""Returns a name as matplotlib shows it, letter by letter: no formulas, and none left out of a legend.

    >>> print(literal("$x$"))
    \$x\$
    """
    shown = printable(name).replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown  # a legend leaves out what begins with _


def reference_line(axes: "Axes", value: float, label: str) -> None:
    """Draws a dashed grey line across the panel."""
    axes.axhline(value, color="0.5", linestyle="--", label=label)
