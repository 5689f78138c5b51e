"""The table of commands, each imported when it is called."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from stiefelkit._version import __version__

__all__ = ["app", "option_name"]


def option_name(field: str) -> str:
    """Returns the option of a field: dashes for underscores, and T stays T."""
    return field.replace("_", "-")


DEFAULTS = Parameter(name_transform=option_name, negative_iterable=())

app = App(
    name="stiefelkit",
    help="Orthogonal and unitary recurrent nets: train them, compare them, measure their drift and time.",
    version=__version__,
    version_flags=["--version", "-v"],
    default_parameter=DEFAULTS,
    suppress_keyboard_interrupt=False,
)
app.command("stiefelkit.cli.listing:show", name="list", help="Show the parametrizations, models and tasks.")
app.command("stiefelkit.cli.train:app", name="train", help="Train one model on a task.")
app.command("stiefelkit.cli.compare:app", name="compare", help="Train several models on a task and compare them.")
app.command("stiefelkit.cli.drift:drift", name="drift", help="Measure how weights keep orthogonality.")
app.command("stiefelkit.cli.bench:app", name="bench", help="Race implementations on this machine.")
app.command("stiefelkit.cli.plot:plot", name="plot", help="Draw the curves of runs.")


app.meta.suppress_keyboard_interrupt = False


@app.meta.default
def launch(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[Path | None, Parameter(help="TOML file with options; the command line wins over it.")] = None,
) -> Any:
    """Reads the options of a file, then runs the command with both."""
    if config is not None:
        from stiefelkit.cli.options_file import read_options

        app.config = (read_options(config),)
    try:
        return app(words, exit_on_error=False, print_error=False, result_action="return_value")
    finally:
        app.config = None
