"""`stiefelkit list` and `stiefelkit list NAME`."""

from rich.table import Table

from stiefelkit.cli.words import with_plain_help
from stiefelkit.training.display import Screen

__all__ = ["show"]

COLUMNS = {
    "parametrization": ("map", "image", "cost"),
    "optimizer": ("moves",),
    "activation": ("what it is", "states"),
}

FEW, WIDE = 4, 100
"""Columns of text beside which that of origins is narrow, on terminals narrower than this."""


@with_plain_help
def show(name: str | None = None, /) -> int:
    """Shows all that has a name, plugins included, and where it comes from.

    Args:
        name: one of them, of which all is shown: options, shapes, image, cost, reference.
    """
    from stiefelkit.cli import about

    console = Screen()
    if name is not None:
        about.show(name, console)
        return 0
    for kind, registry in about.tables().items():
        rows = registry.map(lambda name, target, kind=kind: about.in_short(kind, target))
        table = Table(kind, *COLUMNS.get(kind, ("what it is",)), "from", title=f"{kind.capitalize()}s")
        table.columns[0].no_wrap = True
        for column in table.columns[1:]:
            column.overflow = "fold"
        if len(table.columns) > FEW and console.width < WIDE:
            table.columns[-1].max_width = 10
        for name, cells in rows.items():
            table.add_row(name, *cells, registry.origin(name) or "this process")
        console.print(table)
    console.print("All about one of them: stiefelkit list NAME")
    return 0
