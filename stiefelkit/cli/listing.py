"""`stiefelkit list` and `stiefelkit list NAME`."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stiefelkit.cli.words import with_plain_help

__all__ = ["show"]

COLUMNS = {"parametrization": ("map", "image"), "optimizer": ("moves",)}


@with_plain_help
def show(name: str | None = None, /) -> int:
    """Shows the parametrizations, the optimizers, the models and the tasks, plugins included.

    Args:
        name: one of them, of which all is shown: options, shapes, image, cost, reference.
    """
    from stiefelkit.cli import about, catalogue

    console = Console(highlight=False)
    if name is not None:
        about.show(name, console)
        return 0
    for kind, objects in catalogue.kinds().items():
        table = Table(kind, *COLUMNS.get(kind, ("what it is",)), title=f"{kind.capitalize()}s")
        table.columns[0].no_wrap = True
        for name, target in objects.items():
            table.add_row(name, *(Text(words) for words in catalogue.in_short(kind, target)))
        console.print(table)
    console.print("All about one of them: stiefelkit list NAME")
    return 0
