"""Learning curves and orthogonality of runs, from their logs, and what the papers draw besides."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stiefelkit.errors import RunError
from stiefelkit.training.display import worst_ratio
from stiefelkit.training.figure import Figures, figure, legend, literal, log_scale, reference_line, step_scale, styles
from stiefelkit.training.files import reachable
from stiefelkit.training.paper_figures import draw_runs
from stiefelkit.training.run_folder import RunFolder, by_kind, is_run
from stiefelkit.training.tasks import Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Curve:
    """A run to draw: its name in the legend, its task, the lines of its log, and the unit of their steps."""

    label: str
    task: Task
    records: dict[str, list[dict[str, Any]]]
    unit: float = 1.0

    def points(self, kind: str, value: Callable[[dict[str, Any]], float | None]) -> list[tuple[float, float]]:
        """Returns steps, in units, and values, where there are any."""
        found = ((record["step"] / self.unit, value(record)) for record in self.records[kind])
        return [(step, number) for step, number in found if number is not None]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Returns the runs among some paths; a folder that holds runs stands for all of them, and no other is taken."""
    runs: list[Path] = []
    for path in paths:
        with reachable("Plotting", path):
            inner = [path] if is_run(path) else sorted(child for child in path.glob("*") if is_run(child))
        if not inner:
            lacks = "holds no run" if path.is_dir() else "is a file" if path.exists() else "does not exist"
            raise RunError(f"Plotting needs run folders, got {path}, which {lacks}.")
        runs += [run for run in inner if run not in runs]
    return runs


def plot(runs: Sequence[Path], out: Path, figures: Figures | None = None) -> list[Path]:
    """Draws `learning.png`, `orthogonality.png` if a run has frames, and the figures of `draw_runs` that there are.

    They are drawn anew if they exist.

    Args:
        runs: run folders, all of one task.
        out: folder for the figures; made if missing.
        figures: their format, which is also their ending; PNG if left out.

    Raises:
        RunError: a run is missing or damaged, or the runs are of different tasks.
    """
    folders = [RunFolder.open(run) for run in runs]
    names = {folder.config.task for folder in folders}
    if len(names) != 1:
        raise RunError(f"A figure needs runs of one task, got runs of {', '.join(sorted(names)) or 'none'}.")
    curves = []
    for folder, label in zip(folders, _labels(folders), strict=True):
        curves.append(Curve(label, folder.config.build_task(), by_kind(folder)))
        if not curves[-1].records["train"]:
            raise RunError(f"Run {folder.path} needs lines in its log to be drawn, got none yet; train it further.")
    figures = figures or Figures()
    drawn = [figures.path(out, "learning")]
    height = max(2.9, 0.175 * len(curves))
    with figure(drawn[0], 2, height=height, dpi=figures.dpi) as (left, right):
        task = curves[0].task
        draw(left, curves, "train", lambda record: record["loss"], marked=False)
        by_accuracy = task.headline == "accuracy"
        scale = 100.0 if by_accuracy else 1.0
        draw(right, curves, "test", lambda record: scale * record[task.headline])
        right.set_ylabel("accuracy (%)" if by_accuracy else task.loss_label)
        known = [curve.task.known_baseline for curve in curves]
        for axes, key in ((left, "loss"), (right, task.headline)):
            for value in {baseline[key] for baseline in known if baseline}:
                reference_line(axes, value * (scale if axes is right else 1), "baseline")
        left.set(title="training", xlabel="step", ylabel=task.loss_label)
        log_scale(left)
        right.set(title="held out", xlabel="step")
        if by_accuracy:
            right.set_ylim(0, 102)
        else:
            log_scale(right)
        legend(right)
        step_scale(left)
        step_scale(right)
    if any(curve.points("train", worst_ratio) for curve in curves):
        drawn.append(figures.path(out, "orthogonality"))
        with figure(drawn[1], 1, width=4.2, height=height, dpi=figures.dpi) as (axes,):
            draw(axes, curves, "train", worst_ratio)
            reference_line(axes, 1.0, "rounding limit", below=True)
            label = r"$\Vert W^H W - I\Vert_F$ / rounding limit"
            axes.set(xlabel="step", ylabel=label, title="orthogonality", yscale="log")
            step_scale(axes)
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.1), max(high, 10))  # so that noise at the limit looks like noise
            log_scale(axes)
            legend(axes)
    logs = [(folder, curve.records) for folder, curve in zip(folders, curves, strict=True)]
    return [*drawn, *draw_runs(logs, out, figures).values()]


def draw(
    axes: "Axes",
    curves: Sequence[Curve],
    kind: str,
    value: Callable[[dict[str, Any]], float | None],
    marked: bool = True,
) -> None:
    """Draws something of the lines of a kind over their steps, for the runs that have any."""
    for curve, look in zip(curves, styles(len(curves)), strict=True):
        points = curve.points(kind, value)
        if points:
            every = max(1, len(points) // 12) if kind == "train" else 1
            shown = {"label": literal(curve.label), "markevery": every, **look} if marked else {"color": look["color"]}
            axes.plot(*zip(*points, strict=True), **shown)


def _labels(folders: list[RunFolder]) -> list[str]:
    models = [folder.config.model for folder in folders]
    if len(set(models)) == len(models):
        return models
    paths = [folder.path.absolute() for folder in folders]
    try:
        above = os.path.commonpath([path.parent for path in paths])
    except ValueError:  # on several drives
        return [str(path) for path in paths]
    return [os.path.relpath(path, above) for path in paths]
