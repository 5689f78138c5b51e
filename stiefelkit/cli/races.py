"""What the commands of `stiefelkit bench` have in common: a race is run, shown heat by heat, and written down."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

from cyclopts import Parameter
from rich.console import Console, RenderableType

from stiefelkit.cli.bar import Bar
from stiefelkit.errors import OptionError

if TYPE_CHECKING:
    from stiefelkit.measuring.races.course import Watch

__all__ = ["RowsFile", "raced", "three_digits"]

RowsFile = Annotated[Path | None, Parameter(help="file for the rows, overwritten.")]


class Shown(Protocol):
    """A heat, as far as it is shown here."""

    @property
    def rows(self) -> Sequence[Any]:
        """The figures."""
        ...

    @property
    def left_out(self) -> Mapping[str, str]:
        """Contender to the reason why it could not take part."""
        ...


H = TypeVar("H", bound=Shown)


def raced(
    heats: "Callable[[Watch], Iterator[H]]", show: Callable[[H], RenderableType], json: Path | None, wanted: str
) -> int:
    """Prints each heat when it is over, and writes the rows.

    Args:
        heats: runs the race, and tells how far it is.
        show: from a heat to what is printed of it.
        json: file for the rows.
        wanted: what the contenders had to do, for the error if none could.
    """
    from stiefelkit.measuring.races.rows import check_place, write_rows
    from stiefelkit.measuring.races.rules import WHO

    if json is not None:
        check_place(json)
    console = Console(highlight=False)
    rows, told, reasons = [], set(), {}
    with Bar(console) as bar:
        for heat in heats(bar.show):
            bar.hide()
            if heat.rows:
                console.print(show(heat))
            for words in _left_out(heat.left_out):
                if words not in told:
                    told.add(words)
                    console.print(words, soft_wrap=True)
            reasons |= dict.fromkeys(heat.left_out.values())
            rows += heat.rows
            if json is not None and rows:
                write_rows(json, rows)
    if not rows:
        why = f"; {next(iter(reasons))}" if reasons else "."
        raise OptionError(f"{WHO} needs a contender that does what is asked in {wanted}, got none{why}")
    if json is not None:
        console.print(f"Data: {json}", soft_wrap=True)
    return 0


def three_digits(value: float) -> str:
    """Three digits or all of the integer part, and never an exponent."""
    decimals = next((d for d, bound in ((0, 99.5), (1, 9.95), (2, 0.995)) if abs(value) >= bound), 3)
    return f"{value:,.{decimals}f}"


def _left_out(reasons: Mapping[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"Left out: {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
