"""Runs a race for a command of `stiefelkit bench`, prints its tables and writes its rows."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import RenderableType
from rich.table import Table

from stiefelkit.errors import OptionError
from stiefelkit.training.display import Bar, Screen

if TYPE_CHECKING:
    from stiefelkit.measuring.races.field import Watch

__all__ = ["RowsFile", "raced", "table_of", "three_digits"]

RowsFile = Annotated[Path | None, Parameter(help="file for the rows, overwritten.")]


def raced(
    races: "Callable[[Any, Watch], Iterator[Any]]",
    plan: Any,
    show: Callable[[Any, Any], RenderableType],
    json: Path | None,
) -> int:
    """Prints each table when its race is over, and writes the rows.

    Args:
        races: from the plan to each `Race`, when it is over.
        plan: of the race.
        show: from the plan and a `Race` to what is printed of it.
        json: file for the rows.
    """
    from stiefelkit.measuring.races import WHO
    from stiefelkit.measuring.races.field import by_reason, check_place, write_rows

    if json is not None:
        check_place(json)
    console = Screen()
    rows, printed, reasons = [], set(), {}
    with Bar(console) as bar:
        for race in races(plan, bar.show):
            bar.hide()
            if race.rows:
                console.print(show(plan, race))
            for reason, names in by_reason(race.left_out).items():
                words = f"Left out: {', '.join(names)}: {reason}"
                if words not in printed:
                    console.print(words, soft_wrap=True)
                printed.add(words)
                reasons[reason] = None
            rows += race.rows
            if json is not None and rows:
                write_rows(json, rows)
    if not rows:
        why = f"; {next(iter(reasons))}" if reasons else "."
        raise OptionError(f"{WHO} needs a contender that does what is asked in {plan.dtype}, got none{why}")
    if json is not None:
        console.print(f"Data: {json}", soft_wrap=True)
    return 0


def three_digits(value: float | None) -> str:
    """Three digits or all of the integer part, and never an exponent; a dash for what there is not."""
    if value is None:
        return "-"
    decimals = next((d for d, bound in ((0, 99.5), (1, 9.95), (2, 0.995)) if abs(value) >= bound), 3)
    return f"{value:,.{decimals}f}"


def table_of(title: str, caption: str, names: Iterable[str], figures: Iterable[str]) -> Table:
    """Returns an empty table with columns of names, which are never broken, then of figures, flush right."""
    table = Table(title=title, caption=caption)
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in figures:
        table.add_column(column, justify="right")
    return table
