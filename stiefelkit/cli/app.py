"""The table of commands, each imported when it is called."""

from contextvars import ContextVar
from operator import methodcaller
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

from cyclopts import App, Parameter

from stiefelkit._version import __version__
from stiefelkit.cli.options import join_keys, unwrapped
from stiefelkit.errors import OptionError
from stiefelkit.optim import names_in_words
from stiefelkit.training.ranks import launched

asked: ContextVar[tuple[str, ...]] = ContextVar("asked", default=())
"""The words of the command line at work, for help that depends on them."""
began: ContextVar[float] = ContextVar("began")
"""The time of `time.monotonic` when the command line at work began."""


DRIFT = unwrapped("""Measure how weights keep orthogonality.

Each weight is taken through many optimizer steps. Methods are parametrizations, trained by --optimizer;
"unconstrained", a plain weight; optimizers that move the frame itself ({of_frames}, or the name of an
installed plugin), in precision exact, or fast as in multiplicative_cayley:fast; and geoopt's (geoopt_sgd_canonical,
geoopt_sgd_euclidean, geoopt_adam_canonical, geoopt_adam_euclidean). Optimizers of frames have no momentum here, and a
learning rate for which the first step has the length --step-length.

It says first how long it takes on this machine; with --quick, which makes fewer steps, that is under a minute.

The table shows the largest ||W^H W - I||_F, computed in float64, up to a step, over the error of rounding
an exact frame; the figure shows the largest between two of its points. drift.json is replaced after each method, so
Ctrl-C loses only the current one.
""").format(of_frames=names_in_words()[1])
NEW_PLUGIN = unwrapped("""Write a package with a plugin, to start from.

It is a folder stiefelkit-NAME with a pyproject.toml, one module and one test. It works at once, and passes the laws of
its kind: a parametrization, an optimizer, a minimizer, an activation, a model, a family of decoders
or a task.
""")
REPORT = unwrapped("""Measure this machine, and write one page about it.

The page is one file of HTML that needs no network: the machine; drift against optimizer steps; time against n, with
the time of one matrix product, and its ratio to other implementations; how time and memory grow; errors against the
norm of the coordinates; and the scan's four cases. Each part names the command that makes it alone.

It says first how long it takes on this machine: a few minutes, most of an hour with --full, and under a minute with
--quick, which names what it has no time for.

The page is written when everything is measured, the file of --json after each part. A command stopped by Ctrl-C leaves
an older page unchanged. --from FILE measures nothing, and draws what `python -m benchmarks.gpu` has measured on a GPU.
""")
REPRODUCE = unwrapped("""Run an experiment of a paper again.

Each row of a table in a paper has a name, which --list shows with its figure. Give the command again to resume a
run, to the same bits, or with more --epochs to continue it; it ends with its figure beside the paper's. The best epoch
is chosen on the held-out set, as in the papers, and on validation examples, without bias; both are shown.
""")
SWEEP = unwrapped("""Train over lists of settings and seeds, several runs at a time.

The file holds options of stiefelkit train, task and model among them, and a table [vary] with a list for each option
that varies, seed = [1, 2, 3]. Each combination is a run in a folder of its own; one that fails is named at the end.

The table has a row for each combination of all but the seed, with mean and standard deviation over the seeds;
sweep.json holds the same.
""")
CONFIG = """TOML file with options, those of a task in a table of its name; the command line overrides it."""
"""Help that is given here takes the place of a docstring: all of it, though the table shows its first line only."""

ALONE = ("compare", "reproduce", "sweep")
"""Commands that write runs, and of which two must not be at it at once."""

DEFAULTS = Parameter(name_transform=methodcaller("replace", "_", "-"), negative_iterable=())
"""Options have dashes for underscores, and T stays T."""

app = App(
    name="stiefelkit",
    help="Orthogonal and unitary recurrent nets: train them, compare them, measure their drift and time.",
    version=__version__,
    version_flags=["--version", "-v"],
    default_parameter=DEFAULTS,
    suppress_keyboard_interrupt=False,
    config=(join_keys,),
    help_format="plaintext",  # Markdown takes as long to import as all the rest
)
app.command(
    "stiefelkit.cli.about:show", name="list", help="List maps, optimizers, models and tasks, or describe one NAME."
)
app.command("stiefelkit.cli.new_plugin:new_plugin", name="new-plugin", help=NEW_PLUGIN)
app.command("stiefelkit.cli.train:train", name="train", help="Train one model on a task.")
app.command("stiefelkit.cli.train:compare", name="compare", help="Train several models on a task and compare them.")
app.command("stiefelkit.cli.reproduce:reproduce", name="reproduce", help=REPRODUCE)
app.command("stiefelkit.cli.sweep:sweep", name="sweep", help=SWEEP)
app.command("stiefelkit.cli.measuring:drift", name="drift", help=DRIFT)
app.command("stiefelkit.cli.measuring:app", name="bench", help="Race implementations on this machine.")
app.command("stiefelkit.cli.measuring:report", name="report", help=REPORT)
app.command("stiefelkit.cli.plot:app", name="plot", help="Draw the curves of runs, or gradients over time.")


app.meta.suppress_keyboard_interrupt = False


@app.meta.default
def launch(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[Path | None, Parameter(help=CONFIG)] = None,
) -> Any:
    """Reads the options of a file, then runs the command with both."""
    began.set(monotonic())
    if words[:1] and words[0] in ALONE and launched():
        raise OptionError(f"stiefelkit {words[0]} needs one process, got several of torchrun; start it without.")
    if config is not None:
        from stiefelkit.cli.options_file import read_options

        app.config = (read_options(config), join_keys)
    try:
        return app(words, exit_on_error=False, print_error=False, result_action="return_value")
    finally:
        app.config = (join_keys,)
