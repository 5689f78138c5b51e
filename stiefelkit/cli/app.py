"""The table of commands, each imported when it is called or when all are listed."""

import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from stiefelkit._version import __version__
from stiefelkit.cli.options import DEFAULTS, join_keys, words_of_file
from stiefelkit.errors import OptionError

CONFIG = "TOML file with options, those of a task in a table of its name; the command line overrides it."
ALONE = ("train", "compare", "reproduce", "sweep")  # commands that write runs, and refuse torchrun

app = App(
    name="stiefelkit",
    help="Orthogonal and unitary recurrent nets: train them, compare them, measure their drift and time.",
    version=__version__,
    version_flags=["--version", "-v"],
    default_parameter=DEFAULTS,
    suppress_keyboard_interrupt=False,
    help_format="markdown",
    config=(join_keys,),
)
app.command("stiefelkit.cli.about:show", name="list")
app.command("stiefelkit.cli.new_plugin:new_plugin", name="new-plugin")
app.command("stiefelkit.cli.new_plugin:new_bench", name="new-bench")
app.command("stiefelkit.cli.runs:train", name="train")
app.command("stiefelkit.cli.runs:compare", name="compare")
app.command("stiefelkit.cli.reproduce:reproduce", name="reproduce")
app.command("stiefelkit.cli.runs:sweep", name="sweep")
app.command("stiefelkit.cli.measuring:drift", name="drift")
app.command("stiefelkit.cli.measuring:app", name="bench")
app.command("stiefelkit.cli.measuring:report", name="report")
app.command("stiefelkit.cli.runs:plot", name="plot")
app.register_install_completion_command(help="Have bash, zsh, fish or PowerShell complete commands and options.")

app.meta.suppress_keyboard_interrupt = False


@app.meta.default
def launch(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[Path | None, Parameter(help=CONFIG)] = None,
) -> Any:
    """Reads the options of a file, then runs the command with both."""
    if words[:1] and words[0] in ALONE and os.environ.get("WORLD_SIZE", "1") != "1":
        raise OptionError(f"stiefelkit {words[0]} needs one process, got several of torchrun; start it without.")
    more = words_of_file(config, words) if config is not None else []
    return app([*words, *more], exit_on_error=False, print_error=False, result_action="return_value")
