"""One page about all runs of experiments: tables beside the papers, curves, drift, gradients, time, and commands."""

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError, StiefelkitError, printable
from stiefelkit.training.figure import Figures, accuracy_scale, figure, legend, log_scale, reference_line, styles
from stiefelkit.training.files import write_atomically
from stiefelkit.training.log import read
from stiefelkit.training.papers import Row, rows
from stiefelkit.training.reproduce import DIVERGED, Finding, finding, made_by, require_settings
from stiefelkit.training.run_folder import PROCESSOR, RunFolder, is_run

__all__ = ["write_page"]

PAGE = "report.md"
HEAD = """# Experiments of papers, run again

Each run is one model and one seed, by the settings of its paper. *Best on test* is the best evaluation on the held-out
set, as the papers report it, and too good by that choice; *by validation* is the held-out score where the validation
score was best. CPU time is that of the steps, without evaluations; memory is the most that the process held.
"""


@dataclass(frozen=True)
class Run:
    """A run, and what its log says.

    Args:
        row: the experiment.
        folder: the run.
        found: what came of it.
        records: the lines of its log, by their kind.
    """

    row: Row
    folder: RunFolder
    finding: Finding
    records: dict[str, list[dict[str, Any]]]

    def epochs(self, record: dict[str, Any]) -> float:
        """Epochs of the training data at a line of the log."""
        return record["step"] / self.row.epoch


def write_page(out: Path, place: Path, figures: Figures | None = None) -> tuple[Path, list[Path]]:
    """Writes a Markdown page and its figures about every run in a folder that has been evaluated.

    Args:
        out: folder of the runs.
        place: folder of the page; made if missing.
        figures: their format; PNG if left out.

    Returns:
        The page and the figures.

    Raises:
        RunError: there is no such run, or the place cannot be written. Runs that are damaged, or of other settings
            than the experiment, are named at the end of the page.
    """
    runs, left_out = _runs(out)
    if not runs:
        why = f": {next(iter(left_out.values()))}" if left_out else "; name another --out."
        raise RunError(f"A report needs runs that have been evaluated, got none in {out}{why}")
    look, drawn, parts = figures or Figures(), [], [HEAD]
    for group in dict.fromkeys(run.row.group for run in runs):
        members = [run for run in runs if run.row.group == group]
        stem = re.sub(r" \w+=", "-", group)
        parts += [f"## {group}\n", _table(members)]
        for name, draw in FIGURES.items():
            path = look.path(place, f"{stem}-{name}")
            if draw(members, path, look.dpi):
                drawn.append(path)
                parts.append(f"![{group}: {name}]({path.name})\n")
        parts.append(_made(members))
    if left_out:
        parts += ["## Left out\n", *(f"- {name}: {_literal(why)}" for name, why in left_out.items()), ""]
    place.mkdir(parents=True, exist_ok=True)
    write_atomically(place / PAGE, "\n".join(parts).encode())
    return place / PAGE, drawn


def _runs(out: Path) -> tuple[list[Run], dict[str, str]]:
    """The runs to show, and name to sentence of those that cannot be."""
    runs, left_out = [], {}
    for row in rows():
        path = out / row.name
        if not is_run(path):
            continue
        try:
            runs.append(_run(row, path))
        except StiefelkitError as error:
            left_out[row.name] = str(error)
    return runs, left_out


def _run(row: Row, path: Path) -> Run:
    folder = RunFolder.open(path)
    require_settings(folder, row)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for record in read(folder.log, folder.config.build_task().scores):
        by_kind.setdefault(record["kind"], []).append(record)
    return Run(row, folder, finding(path), by_kind)


def _table(runs: list[Run]) -> str:
    task = runs[0].row.build_task()
    percent = task.headline == "accuracy"
    word = "accuracy" if percent else task.loss_label
    goal = runs[0].row.goal
    second = "by validation" if goal is None else f"first below {goal:g}"
    titles = ("experiment", "parameters (as printed)", "epochs", f"best on test ({word})", second, "last", "the paper")
    lines = ["| " + " | ".join((*titles, "CPU minutes an epoch", "MB")) + " |", "|---" * 9 + "|"]
    for run in runs:
        finding, row = run.finding, run.row
        whole = (row.settings.steps or 0) / row.epoch
        cells = [
            row.name,
            f"{run.folder.parameters:,}" + (f" ({row.parameters:,})" if row.parameters else ""),
            f"{finding.epochs:.4g} of {whole:.4g}",
            f"{_said(finding.best_test.test, percent)} at {finding.best_test.step / row.epoch:.4g}",
            _by_validation(finding, percent) if goal is None else _reached(run, goal),
            _said(finding.last.test, percent),
            row.kind_of_figure if row.figure is None else _said(row.figure, percent),
            *_costs(run),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    notes = dict.fromkeys(run.row.note for run in runs if run.row.note)
    words = [f"{', '.join(run.row.name for run in runs if run.row.note == note)}: {note}." for note in notes]
    words += [f"{run.row.name}: ended where {why}." for run in runs if (why := _diverged(run))]
    if task.known_baseline:
        words.insert(0, f"Without memory: {_said(task.known_baseline[task.headline], percent)}.")
    return "\n".join([*lines, "", " ".join(words), ""])


def _by_validation(finding: Finding, percent: bool) -> str:
    return "-" if finding.best_validation is None else _said(finding.best_validation.test, percent)


def _diverged(run: Run) -> str:
    """What was not finite where that ended a run."""
    made = made_by(run.folder.path)
    return _literal(made[-1].get(DIVERGED, "")) if made else ""


def _reached(run: Run, goal: float) -> str:
    """The first evaluation below a goal."""
    scores = [(record["step"], record[run.row.build_task().headline]) for record in run.records["test"]]
    return next((f"at step {step:,}" for step, score in scores if score < goal), "not yet")


def _said(value: float, percent: bool) -> str:
    return f"{value:.4f}" if percent else f"{value:.3g}"


def _costs(run: Run) -> tuple[str, str]:
    epochs = run.records.get("epoch", [])
    if not epochs:
        if "train" not in run.records:
            return "-", "-"
        per_step = statistics.median(record["ms_per_step"] for record in run.records["train"])
        return f"{per_step * run.row.epoch / 6e4:.2f}", "-"
    minutes = statistics.median(record["cpu_seconds"] for record in epochs) / 60
    peak = max((record.get("peak_bytes", 0) for record in epochs), default=0)
    return f"{minutes:.2f}", f"{peak / 1e6:.0f}" if peak else "-"


def _made(runs: list[Run]) -> str:
    lines = []
    for run in runs:
        begun = run.folder.versions.items()
        versions = _literal(", ".join(f"{name} {text}" for name, text in begun if name != PROCESSOR))
        for entry in made_by(run.folder.path):
            commit = _literal(entry.get("commit") or "an installed package")
            where = f" on {_literal(entry[PROCESSOR])}" if PROCESSOR in entry else ""
            seed = run.folder.config.seed
            lines.append(f"- {_command(entry.get('command'))} at {commit}{where} ({versions}; seed {seed})")
    return "\n".join(["Made by:\n", *lines, ""]) if lines else ""


def _literal(words: object) -> str:
    r"""Words of a run, letter by letter in one line of Markdown: no markup, no HTML, no orders to a terminal.

    >>> print(_literal("<b>`a`\n$x$\x1b"))
    \<b\>\`a\` \$x\$\\x1b
    """
    return re.sub(r"([\\`*_{}\[\]<>&|#~!$])", r"\\\1", printable(" ".join(str(words).split())))


def _command(words: object) -> str:
    """The same as code, where no letter is markup but a backtick."""
    shown = printable(" ".join(str(words).split()))
    return _literal(shown) if "`" in shown else f"`{shown}`"


def _curves(runs: list[Run], path: Path, dpi: int) -> bool:
    """Held-out scores over epochs, with what guessing scores and the papers' figures."""
    task = runs[0].row.build_task()
    percent = task.headline == "accuracy"
    with figure(path, 1, width=5.4, dpi=dpi) as (axes,):
        for run, look in zip(runs, styles(len(runs)), strict=True):
            records = run.records["test"]
            every = max(1, len(records) // 12)
            points = [record[task.headline] for record in records]
            axes.plot([run.epochs(record) for record in records], points, label=run.row.label, markevery=every, **look)
            if run.row.figure is not None:
                axes.axhline(run.row.figure, color=look["color"], linestyle=":", linewidth=1.0)
        if not percent and task.known_baseline:  # a guess at ten classes would press the curves together
            reference_line(axes, task.known_baseline[task.headline], "without memory")
        axes.set(xlabel="epoch", ylabel="accuracy (%)" if percent else task.loss_label)
        axes.set_title("held out; dotted: the papers" if percent else "held out")
        if percent:  # runs of two epochs stand beside others of fifty
            accuracy_scale(axes)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        else:
            axes.set_xlim(left=0)
            log_scale(axes)
        legend(axes)
    return True


def _of_train(runs: list[Run], path: Path, dpi: int, words: tuple[str, str], value: Callable[[Any], Any]) -> bool:
    """Something of the lines of training over epochs, on a logarithmic scale; False if no line has it."""
    curves = [
        [(run.epochs(record), value(record)) for record in run.records.get("train", []) if value(record)]
        for run in runs
    ]
    if not any(curves):
        return False
    with figure(path, 1, width=5.4, dpi=dpi) as (axes,):
        for run, points, look in zip(runs, curves, styles(len(runs)), strict=True):
            if points:
                xs, ys = zip(*points, strict=True)
                axes.plot(xs, ys, label=run.row.label, markevery=max(1, len(xs) // 12), **look)
        title, unit = words
        axes.set(xlabel="epoch", ylabel=unit, title=title, yscale="log")
        low, high = axes.get_ylim()
        axes.set_ylim(low / 2, high * 2)  # so that noise looks like noise
        axes.set_xlim(left=0)
        log_scale(axes)
        legend(axes)
    return True


def _drift(runs: list[Run], path: Path, dpi: int) -> bool:
    def largest(record: dict[str, Any]) -> float:
        return max((weight["error"] for weight in record["orthogonality"].values()), default=0.0)

    return _of_train(runs, path, dpi, ("orthogonality", r"$\Vert W^H W - I\Vert_F$"), largest)


def _gradients(runs: list[Run], path: Path, dpi: int) -> bool:
    words = ("largest gradient since the last line", "norm")
    return _of_train(runs, path, dpi, words, lambda record: record["gradient_norm"])


FIGURES: dict[str, Callable[[list[Run], Path, int], bool]] = {
    "scores": _curves,
    "drift": _drift,
    "gradients": _gradients,
}
"""Name to what draws the runs of one group into a file, and says whether it did."""
