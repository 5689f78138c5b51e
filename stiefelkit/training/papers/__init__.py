"""The experiments of papers as data, one file for each table, and the table that knows them by name."""

from stiefelkit.errors import UnknownNameError, did_you_mean
from stiefelkit.registry import Registry
from stiefelkit.training.papers.row import Reproduction, Row

__all__ = ["Reproduction", "Row", "find", "rows", "tables"]

tables = Registry(
    "stiefelkit.papers",
    "table of a paper",
    {
        "adding": "stiefelkit.training.papers.adding:ROWS",
        "chars": "stiefelkit.training.papers.chars:ROWS",
        "copying": "stiefelkit.training.papers.copying:ROWS",
        "mnist": "stiefelkit.training.papers.mnist:ROWS",
        "speech": "stiefelkit.training.papers.speech:ROWS",
    },
)
"""Name to a tuple of rows."""


def rows() -> list[Row]:
    """Returns all rows, table by table."""
    return [row for table in tables.available().values() for row in table]


def find(name: str) -> Row:
    """Returns the row of a name.

    Raises:
        UnknownNameError: there is none.

    >>> find("scornn-mnist-170").figure
    0.973
    """
    known = {row.name: row for row in rows()}
    if name not in known:
        raise UnknownNameError(f"No experiment is named {name!r}{did_you_mean(name, known)}")
    return known[name]
