"""`stiefelkit plot RUN...`, `stiefelkit plot activation` and `stiefelkit plot gradients`."""

from pathlib import Path

from cyclopts import App

from stiefelkit.cli.options import DEFAULTS, Options
from stiefelkit.figure import Figures
from stiefelkit.training.data import named
from stiefelkit.training.display import Bar, Screen, say
from stiefelkit.training.gradients import GradientPlan

app = App(name="plot", help="Draw the curves of runs, or gradients over time.", default_parameter=DEFAULTS)


@app.default
def plot(*runs: Path, out: Path | None = None, data: Path | None = None, figures: Options[Figures] = None) -> int:
    """Draw the curves of runs of one task, or again the figure of a drift experiment.

    Runs that differ by their seed, or by the excerpt of a waveform, also give a box plot of their best scores; models
    that differ by the number of reflections their scores against it; waveforms the generated one beside the true one.

    Args:
        runs: run folders, or folders of comparisons; or one folder that stiefelkit drift has written.
        out: folder for the figures; the run's own folder for a single run, else plots.
        data: folder of the data, for baselines and true waveforms; that of STIEFELKIT_DATA if left out.
        figures: how they are written.
    """
    from stiefelkit.training import plot as plots

    figures, folder = figures or Figures(), out or (runs[0] if len(runs) == 1 else Path("plots"))
    if len(runs) == 1 and (record := runs[0] / "drift.json").is_file():
        from stiefelkit.measuring.drift import redraw

        say(f"Figure: {redraw(record, folder, figures)}")
        return 0
    with named(data):
        for figure in plots.plot(plots.find_runs(runs), folder, figures):
            say(f"Figure: {figure}")
    return 0


@app.command
def activation(
    *, activation: str = "modrelu", bias: float = 0.5, out: Path = Path("plots"), figures: Options[Figures] = None
) -> int:
    """Draw an activation over the complex plane, its real part and its modulus.

    Args:
        activation: its name; modrelu_epsilon(0.1) is that of scuRNN's equation 5.
        bias: above zero; the left half has it below zero, the right half above.
        out: folder for activation.png, overwritten.
        figures: how the figure is written.
    """
    from stiefelkit.training.plot import draw_surfaces

    say(f"Figure: {draw_surfaces(out, bias, activation, figures)}")
    return 0


@app.command
def gradients(
    *, plan: Options[GradientPlan] = None, out: Path = Path("runs/gradients"), figures: Options[Figures] = None
) -> int:
    """Train models, and draw the norm of the gradient of the loss over the steps back through time.

    The norm is ||dL/dh_t||_2, of the total derivative of the loss of one sequence by the hidden state, averaged over
    the next training batch; for an LSTM with the cell held fixed. There is a panel for each number of optimizer steps.

    Args:
        plan: what to train, and when to look.
        out: folder for gradients.png and gradients.json, overwritten.
        figures: how the figure is written.
    """
    from stiefelkit.training.gradients import measure

    console = Screen()
    with Bar(console) as bar:
        curves, files = measure(plan or GradientPlan(), out, bar.show, figures)
    for curve in curves:
        first, last = curve.norms[0], curve.norms[-1]
        words = f"{first:.3g} at the first step, {last:.3g} at the last."
        console.print(f"{curve.model}, iteration {curve.iteration}: {words}")
    record, drawn = files
    say(f"Data: {record}\nFigure: {drawn}")
    return 0
