"""Figures of runs: learning curves, orthogonality, accuracy by position."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stiefelkit.errors import RunError, needs
from stiefelkit.figure import Figures, figure, literal, reference_line
from stiefelkit.files import reachable
from stiefelkit.training.run_folder import RunFolder, by_kind, is_run, worst_ratio
from stiefelkit.training.tasks import Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AT = "accuracy_at_"  # begins the name of a score of so many steps
Value = Callable[[dict[str, Any]], float | None]  # of a curve, from a record of a log; None where there is none
Records = dict[str, list[dict[str, Any]]]  # lines of a log by their kind


@dataclass(frozen=True)
class Curve:
    """A run to draw: its name in the legend, its log, the steps of an epoch to count in, and the score of a paper."""

    label: str
    folder: RunFolder
    records: Records
    epoch: float = 1
    printed: float | None = None

    @functools.cached_property
    def task(self) -> Task:
        """The task of the run."""
        return self.folder.config.build_task()

    def points(self, kind: str, value: Value) -> list[tuple[float, float]]:
        """Returns steps, or epochs, and values, where there are any."""
        found = ((record["step"] / self.epoch, value(record)) for record in self.records[kind])
        return [(step, number) for step, number in found if number is not None]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Returns the runs among some paths; a folder that holds runs stands for all of them."""
    runs: list[Path] = []
    for path in paths:
        with reachable("Plotting", path):
            inner = [path] if is_run(path) else sorted(child for child in path.glob("*") if is_run(child))
        if not inner:
            lacks = "holds no run" if path.exists() else "does not exist"
            raise RunError(f"Plotting needs run folders, got {path}, which {lacks}.")
        runs += [run for run in inner if run not in runs]
    return runs


def plot(runs: Sequence[Path], out: Path, figures: Figures | None = None) -> list[Path]:
    """Draws the figures of `draw_curves` that there are.

    Raises RunError if a run is missing or damaged, or the runs are of different tasks, or of one task with different
    scores.
    """
    folders = [RunFolder.open(run) for run in runs]
    _same("runs of one task", {folder.config.task for folder in folders})
    is_told = len({folder.config.model for folder in folders}) == len(folders)
    curves = [Curve(f.config.model if is_told else str(f.path), f, by_kind(f)) for f in folders]
    for curve in curves:
        needs(bool(curve.records["train"]), RunError, "A figure", f"lines in {curve.folder.log}", "none yet")
    _same("runs with one score and one loss", {f"{curve.task.headline}, {curve.task.loss_label}" for curve in curves})
    return [*draw_curves(curves, out, figures or Figures()).values()]


def _same(what: str, found: set[str]) -> None:
    needs(len(found) == 1, RunError, "A figure", what, f"those of {', '.join(sorted(found)) or 'none'}")


def draw_curves(curves: Sequence[Curve], out: Path, look: Figures, stem: str = "") -> dict[str, Path]:
    """Draws runs of one task, and returns the files by name.

    * `learning`: the loss in training, and the held-out score;
    * `positions`: of tasks that tell it, the last held-out accuracy after so many steps of a sequence;
    * `orthogonality`: of runs with frames, their error over the rounding limit.
    """
    task, unit = curves[0].task, "step" if curves[0].epoch == 1 else "epoch"
    drawn = {"learning": look.path(out, f"{stem}learning")}
    with figure(drawn["learning"], 2, look.dpi) as (left, right):
        _draw(left, curves, "train", lambda record: record["loss"])
        _draw(right, curves, "test", lambda record: record[task.headline])
        for number, curve in enumerate(curves):
            if curve.printed is not None:
                right.axhline(curve.printed, color=f"C{number % 10}", linestyle=":")
        for axes, key in ((left, "loss"), (right, task.headline)):
            for value in {known[key] for curve in curves if (known := curve.task.known_baseline)}:
                reference_line(axes, value, "baseline")
            axes.set_yscale("linear" if key == "accuracy" else "log")
        left.set(title="training", xlabel=unit, ylabel=task.loss_label)
        right.set(title="held out; dotted: papers" if unit == "epoch" else "held out", xlabel=unit)
        right.set_ylabel("accuracy" if task.headline == "accuracy" else task.loss_label)
        right.legend()
    ends = [(int(key[len(AT) :]), key) for key in task.scores if key.startswith(AT)]
    if ends and any(curve.records["test"] for curve in curves):
        drawn["positions"] = look.path(out, f"{stem}positions")
        with figure(drawn["positions"], dpi=look.dpi) as (axes,):
            for curve in (curve for curve in curves if curve.records["test"]):
                found = [curve.records["test"][-1][key] for _, key in ends]
                axes.plot([end for end, _ in ends], found, marker=".", label=literal(curve.label))
            axes.set(title="held out", xlabel="steps of the sequence", ylabel="accuracy", xscale="log")
            axes.legend()
    if any(curve.points("train", worst_ratio) for curve in curves):
        drawn["orthogonality"] = look.path(out, f"{stem}orthogonality")
        with figure(drawn["orthogonality"], dpi=look.dpi) as (axes,):
            _draw(axes, curves, "train", worst_ratio)
            reference_line(axes, 1.0, "rounding limit")
            label = r"$\Vert W^H W - I\Vert_F$ / rounding limit"
            axes.set(title="orthogonality", xlabel=unit, ylabel=label, yscale="log")
            axes.legend()
    return drawn


def _draw(axes: "Axes", curves: Sequence[Curve], kind: str, value: Value) -> None:
    """Draws something of the lines of a kind over their steps; a run that has none keeps its colour to itself."""
    for curve in curves:
        points = curve.points(kind, value)
        label = literal(curve.label) if points else None
        axes.plot([step for step, _ in points], [number for _, number in points], marker=".", label=label)
