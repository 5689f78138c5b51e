"""`stiefelkit plot RUN...`."""

from pathlib import Path

from stiefelkit.cli.options import Options
from stiefelkit.figure import Figures
from stiefelkit.training.data import named
from stiefelkit.training.display import say


def plot(*runs: Path, out: Path | None = None, data: Path | None = None, figures: Options[Figures] = None) -> int:
    """Draw the curves of runs, or again the figure of a drift experiment.

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
