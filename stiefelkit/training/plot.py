"""Learning curves and orthogonality of runs, from their logs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError
from stiefelkit.training.display import worst_ratio
from stiefelkit.training.figure import Figures, figure, legend, literal, log_scale, reference_line, styles
from stiefelkit.training.files import reachable
from stiefelkit.training.log import read
from stiefelkit.training.run_folder import RunFolder, is_run
from stiefelkit.training.tasks import Task

__all__ = ["find_runs", "plot"]


@dataclass(frozen=True)
class Curves:
    """The log of one run: its name in the legend, its task, and the lines written while training and at tests."""

    label: str
    task: Task
    train: list[dict[str, Any]]
    test: list[dict[str, Any]]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Returns the run folders among some paths; a folder that holds runs stands for all of them.

    Raises:
        RunError: a path is neither.
    """
    runs: list[Path] = []
    for path in paths:
        with reachable("Plotting", path):
            inner = [path] if is_run(path) else sorted(child for child in path.glob("*") if is_run(child))
        if not inner:
            raise RunError(f"Plotting needs run folders, got {path}, which {_lacks(path)}.")
        runs += [run for run in inner if run not in runs]
    return runs


def plot(runs: Sequence[Path], out: Path, figures: Figures | None = None) -> list[Path]:
    """Draws `learning.png`, and `orthogonality.png` if a run has frames; both are drawn anew if they exist.

    Args:
        runs: run folders, all of one task.
        out: folder for the figures; made if missing.
        figures: their format, which is also their ending; PNG if left out.

    Returns:
        The files drawn.

    Raises:
        RunError: a run is missing or damaged, or the runs are of different tasks.
    """
    folders = [RunFolder.open(run) for run in runs]
    names = {folder.config.task for folder in folders}
    if len(names) != 1:
        raise RunError(f"A figure needs runs of one task, got runs of {', '.join(sorted(names)) or 'none'}.")
    curves = []
    for folder, label in zip(folders, _labels(folders), strict=True):
        task = folder.config.build_task()
        records = read(folder.log, task.scores)
        train = [record for record in records if record["kind"] == "train"]
        test = [record for record in records if record["kind"] == "test"]
        if not train:
            raise RunError(f"Run {folder.path} needs lines in its log to be drawn, got none yet; train it further.")
        curves.append(Curves(label, task, train, test))
    figures = figures or Figures()
    drawn = [_learning(curves, figures.path(out, "learning"), figures.dpi)]
    if any(worst_ratio(record["orthogonality"]) is not None for curve in curves for record in curve.train):
        drawn.append(_orthogonality(curves, figures.path(out, "orthogonality"), figures.dpi))
    return drawn


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


def _learning(curves: list[Curves], path: Path, dpi: int) -> Path:
    task = curves[0].task
    by_accuracy = task.headline == "accuracy"
    scale = 100.0 if by_accuracy else 1.0
    with figure(path, 2, dpi=dpi) as (left, right):
        for curve, look in zip(curves, styles(len(curves)), strict=True):
            left.plot(*_points(curve.train, "loss"), color=look["color"])
            steps, scores = _points(curve.test, task.headline)
            scores = [scale * score for score in scores]
            right.plot(steps, scores, label=literal(curve.label), **look)
        baselines = [baseline for curve in curves if (baseline := curve.task.known_baseline)]
        for axes, key, factor in ((left, "loss", 1.0), (right, task.headline, scale)):
            for value in {baseline[key] for baseline in baselines}:
                reference_line(axes, factor * value, "baseline")
        left.set(title="training", xlabel="step", ylabel=task.loss_label)
        log_scale(left)
        right.set(title="held out", xlabel="step", ylabel="accuracy (%)" if by_accuracy else task.loss_label)
        if by_accuracy:
            right.set_ylim(0, 102)
        else:
            log_scale(right)
        for axes in (left, right):
            axes.set_xlim(left=0)
        legend(right)
    return path


def _orthogonality(curves: list[Curves], path: Path, dpi: int) -> Path:
    with figure(path, 1, width=4.2, dpi=dpi) as (axes,):
        for curve, look in zip(curves, styles(len(curves)), strict=True):
            points = [(record["step"], worst_ratio(record["orthogonality"])) for record in curve.train]
            points = [(step, ratio) for step, ratio in points if ratio is not None]
            if points:
                every = max(1, len(points) // 12)
                axes.plot(*zip(*points, strict=True), markevery=every, label=literal(curve.label), **look)
        reference_line(axes, 1.0, "rounding limit", below=True)
        axes.set(
            xlabel="step", ylabel=r"$\Vert W^H W - I\Vert_F$ / rounding limit", title="orthogonality", yscale="log"
        )
        axes.set_xlim(left=0)
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.1), max(high, 10))  # so that noise at the limit looks like noise
        log_scale(axes)
        legend(axes)
    return path


def _points(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    return [record["step"] for record in records], [record[key] for record in records]


def _lacks(path: Path) -> str:
    if not path.exists():
        return "does not exist"
    return "holds no run" if path.is_dir() else "is a file"
