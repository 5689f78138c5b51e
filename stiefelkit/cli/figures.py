"""Tables of figures, with their names in front."""

from collections.abc import Iterable

from rich.table import Table

__all__ = ["table_of"]


def table_of(title: str, caption: str, names: Iterable[str], figures: Iterable[str]) -> Table:
    """Returns an empty table with columns of names, which are never broken, then of figures, flush right."""
    table = Table(title=title, caption=caption)
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in figures:
        table.add_column(column, justify="right")
    return table
