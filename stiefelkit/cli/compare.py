"""`stiefelkit compare TASK`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App
from rich.table import Table

from stiefelkit.cli.tasks import app_of_task, app_of_tasks, resume_line, with_options
from stiefelkit.training.board import Board
from stiefelkit.training.data import named
from stiefelkit.training.display import Screen, say
from stiefelkit.training.figure import Figures
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task

if TYPE_CHECKING:
    from stiefelkit.training.compare import Comparison
    from stiefelkit.training.summary import Summary

__all__ = ["app"]


def _command(cls: type[Task]) -> Callable[..., int]:
    def run(
        *,
        models: str,
        out: Path | None = None,
        resume: bool = False,
        data: Path | None = None,
        task: dict[str, Any],
        settings: Settings,
        board: Board,
        figures: Figures,
    ) -> int:
        """Trains several models on the task, one after the other, and compares them.

        Args:
            models: names of the models, separated by commas; see stiefelkit list.
            out: folder with one run for each model; runs/TASK if left out.
            resume: keep the runs that are finished, continue the others, start those that are missing.
            data: folder of the data, for tasks that read files; that of STIEFELKIT_DATA if left out.
            task: the options of the task.
            settings: how to train; what is left out comes from the recipe of the task for each model.
            board: where the curves of each run can be watched.
            figures: how they are written.
        """
        from stiefelkit.training.compare import compare
        from stiefelkit.training.display import Terminal

        names = [name.strip() for name in models.split(",") if name.strip()]
        path = out or Path("runs") / cls.name
        problem = cls(**task)
        with named(data):
            comparison = compare(
                problem,
                names,
                path,
                settings,
                named=task,
                resuming=resume,
                display=Terminal(),
                board=board,
                figures=figures,
            )
            if comparison.signal is not None:
                words = ("compare", cls.name, "--models", ",".join(names), "--out", str(path))
                say(f"Stopped and saved; resume with: {resume_line(*words, data=data, board=board)}")
                return 128 + comparison.signal
            _print(problem, comparison)
            return 0

    return with_options(run, cls)


def _print(task: Task, comparison: "Comparison") -> None:
    table = Table("model", title=f"{task.name}, held-out set")
    by_accuracy = task.headline == "accuracy"
    table.add_column("accuracy" if by_accuracy else task.loss_label, justify="right")
    if not by_accuracy:
        table.add_column("/ baseline", justify="right")
    for title in ("parameters", "ms per step (CPU)", "orthogonality error / limit"):
        table.add_column(title, justify="right")
    for summary in comparison.summaries:
        table.add_row(summary.model, *_score(task, summary), *_costs(summary))
    console = Screen()
    console.print(table)
    for figure in comparison.figures:
        console.print(f"Figure: {figure}", soft_wrap=True, highlight=False)


def _score(task: Task, summary: "Summary") -> list[str]:
    score = summary.test[task.headline]
    if task.headline == "accuracy":
        return [f"{score:.1%}"]
    baseline = task.known_baseline
    return [f"{score:.5f}", f"{score / baseline['loss']:.3f}" if baseline else "-"]


def _costs(summary: "Summary") -> list[str]:
    return [f"{summary.parameters:,}", f"{summary.ms_per_step:.1f}", _ratio(summary.orthogonality)]


def _ratio(error: float | None) -> str:
    if error is None:
        return "-"
    return f"{error:.2f}" if error < 100 else f"{error:.2g}"


app = app_of_tasks("compare", "Train several models on a task and compare them.", _command)


def __getattr__(task: str) -> App:
    return app_of_task(task, _command)
