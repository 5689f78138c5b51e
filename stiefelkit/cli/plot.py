"""`stiefelkit plot RUN...` and `stiefelkit plot gradients`."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from stiefelkit.cli.app import DEFAULTS
from stiefelkit.cli.bar import Bar
from stiefelkit.cli.lists import integers_of, words_of
from stiefelkit.cli.open_options import FigureOptions, given, whole
from stiefelkit.cli.words import with_plain_help
from stiefelkit.training.figure import Figures
from stiefelkit.training.recipes import Settings

__all__ = ["app"]

app = App(name="plot", help="Draw the curves of runs, or gradients over time.", default_parameter=DEFAULTS)


@app.default
@with_plain_help
def plot(*runs: Path, out: Path | None = None, figures: FigureOptions = None) -> int:
    """Draws the learning curves and the orthogonality of runs of one task.

    Args:
        runs: run folders, or folders of comparisons.
        out: folder for the figures; the run's own folder for a single run, else plots.
        figures: how they are written.
    """
    from stiefelkit.training import plot as plots

    look = Figures(**given(figures))
    found = plots.find_runs(runs)
    for figure in plots.plot(found, out or (runs[0] if len(runs) == 1 else Path("plots")), look):
        print(f"Figure: {figure}")
    return 0


@app.command(name="gradients")
@with_plain_help
def gradients(
    *,
    task: str = "adding",
    T: Annotated[int | None, Parameter(converter=whole, show_default=lambda _: "500")] = None,
    models: str = "scornn,lstm",
    steps: Annotated[str, Parameter(name=("--steps", "--iterations"))] = "0,300",
    hidden_size: Annotated[int | None, Parameter(converter=whole)] = None,
    batch_size: Annotated[int | None, Parameter(converter=whole)] = None,
    lr: float | None = None,
    clip_norm: float | None = None,
    seed: Annotated[int, Parameter(converter=whole)] = 0,
    threads: Annotated[int, Parameter(converter=whole)] = 1,
    device: str = "cpu",
    out: Path = Path("runs/gradients"),
    figures: FigureOptions = None,
) -> int:
    """Trains models, and draws how the gradient of the loss fares on its way back through time.

    Drawn is ||dL/dh_t||_2 over the steps t of the sequence, a panel for each number of optimizer steps. dL/dh_t is the
    total derivative of the loss by the hidden state, through all later states; L is the loss of one sequence, and the
    norms are averaged over the sequences of the batch that the model would be trained on next. Of an LSTM it is h_t
    alone, with the cell held. The models are trained by the recipes of the task.

    Args:
        task: name of the task; see stiefelkit list.
        T: length of the sequences, for tasks that have it.
        models: names of models, separated by commas.
        steps: optimizer steps after which to look, separated by commas.
        hidden_size: units; those of the recipes if left out.
        batch_size: sequences per step; those of the recipes if left out.
        lr: learning rate; those of the recipes if left out.
        clip_norm: gradients of the training are scaled down to at most this norm; those of the recipes if left out.
        seed: fixes the initial weights and the training data.
        threads: CPU threads.
        device: cpu or cuda.
        out: folder for gradients.png and gradients.json, overwritten.
        figures: how the figure is written.
    """
    from stiefelkit.training import gradients as of_gradients

    settings = Settings(
        hidden_size=hidden_size,
        batch_size=batch_size,
        lr=lr,
        clip_norm=clip_norm,
        seed=seed,
        threads=threads,
        device=device,
    )
    plan = of_gradients.GradientPlan(task, T, words_of(models), integers_of(steps, "--steps"), settings)
    console = Console(highlight=False)
    with Bar(console) as bar:
        curves, files = of_gradients.measure(plan, out, bar.show, Figures(**given(figures)))
    for curve in curves:
        first, last = curve.norms[0], curve.norms[-1]
        console.print(
            f"{curve.model}, iteration {curve.iteration}: {first:.3g} at the first step, {last:.3g} at the last."
        )
    for file in files:
        console.print(f"{'Data' if file.suffix == '.json' else 'Figure'}: {file}", soft_wrap=True)
    return 0
