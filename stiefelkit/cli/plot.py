"""`stiefelkit plot RUN...`."""

from pathlib import Path

from stiefelkit.experiments import plot as plots

__all__ = ["plot"]


def plot(*runs: Path, out: Path | None = None) -> int:
    """Draws the learning curves and the orthogonality of runs of one task.

    Args:
        runs: run folders, or folders of comparisons.
        out: folder for the figures; the run's own folder for a single run, else plots.
    """
    found = plots.find_runs(runs)
    for figure in plots.plot(found, out or (runs[0] if len(runs) == 1 else Path("plots"))):
        print(f"Figure: {figure}")
    return 0
