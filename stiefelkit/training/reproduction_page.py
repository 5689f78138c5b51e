"""One page about all runs of experiments: tables beside the papers, curves, drift, gradients, time, and commands."""

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stiefelkit.errors import RunError, StiefelkitError, printable
from stiefelkit.training.figure import Figures, accuracy_scale, figure, legend, log_scale, reference_line, styles
from stiefelkit.training.files import write_atomically
from stiefelkit.training.papers import Row, rows
from stiefelkit.training.plot import Curve, draw
from stiefelkit.training.reproduce import DIVERGED, Finding, finding, made_by, opened
from stiefelkit.training.run_folder import PROCESSOR, RunFolder, is_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_page"]

PAGE = "report.md"
HEAD = """# Experiments of papers, run again

Each run is one model and one seed, by the settings of its paper. *Best on test* is the best evaluation on the held-out
set, as the papers report it, and too good by that choice; *by validation* is the held-out score where the validation
score was best. CPU time is that of the steps, without evaluations; memory is the most that the process held.
"""


LABELS: dict[str, dict[str, str]] = {
    "drift": {"title": "orthogonality", "ylabel": r"$\Vert W^H W - I\Vert_F$"},
    "gradients": {"title": "largest gradient since the last line", "ylabel": "norm"},
}


@dataclass(frozen=True)
class Run:
    """A run of an experiment, and what came of it."""

    row: Row
    folder: RunFolder
    finding: Finding

    @property
    def curve(self) -> Curve:
        """What is drawn of it, over epochs."""
        return Curve(self.row.label, self.row.build_task(), self.finding.records, self.row.epoch)


def write_page(out: Path, place: Path, figures: Figures | None = None) -> tuple[Path, list[Path]]:
    """Writes a Markdown page and its figures about every run in a folder that has been evaluated, and returns them.

    Runs that are damaged, or of other settings than the experiment, are named at the end of the page.

    Raises:
        RunError: there is no such run, or the place cannot be written.
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
        for name, path in _drawn(members, look, place, stem).items():
            drawn.append(path)
            parts.append(f"![{group}: {name}]({path.name})\n")
        parts.append(_made(members))
    if left_out:
        parts += ["## Left out\n", *(f"- {name}: {_literal(why)}" for name, why in left_out.items()), ""]
    place.mkdir(parents=True, exist_ok=True)
    write_atomically(place / PAGE, "\n".join(parts).encode())
    return place / PAGE, drawn


def _runs(out: Path) -> tuple[list[Run], dict[str, str]]:
    """Returns the runs to show, and name to sentence of those that cannot be."""
    runs, left_out = [], {}
    for row in rows():
        path = out / row.name
        if is_run(path):
            try:
                runs.append(Run(row, opened(path, row), finding(path)))
            except StiefelkitError as error:
                left_out[row.name] = str(error)
    return runs, left_out


def _table(runs: list[Run]) -> str:
    row = runs[0].row
    task, goal = row.build_task(), row.goal
    word = "accuracy" if row.by_accuracy else task.loss_label
    second = "by validation" if goal is None else f"first below {goal:g}"
    titles = ("experiment", "parameters (as printed)", "epochs", f"best on test ({word})", second, "last", "the paper")
    lines = ["| " + " | ".join((*titles, "CPU minutes an epoch", "MB")) + " |", "|---" * 9 + "|"]
    for run in runs:
        found, row = run.finding, run.row
        chosen = "-" if found.best_validation is None else row.said(found.best_validation.test)
        cells = [
            row.name,
            f"{run.folder.parameters:,}" + (f" ({row.parameters:,})" if row.parameters else ""),
            f"{found.epochs:.4g} of {row.epochs:.4g}",
            f"{row.said(found.best_test.test)} at {found.best_test.step / row.epoch:.4g}",
            chosen if goal is None else _reached(run, goal),
            row.said(found.last.test),
            row.printed,
            *_costs(run),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    notes = dict.fromkeys(run.row.note for run in runs if run.row.note)
    words = [f"{', '.join(run.row.name for run in runs if run.row.note == note)}: {note}." for note in notes]
    ends = {run.row.name: _literal(made[-1].get(DIVERGED) or "") for run in runs if (made := made_by(run.folder.path))}
    words += [f"{name}: ended where {why}." for name, why in ends.items() if why]
    if task.known_baseline:
        words.insert(0, f"Without memory: {row.said(task.known_baseline[task.headline])}.")
    return "\n".join([*lines, "", " ".join(words), ""])


def _reached(run: Run, goal: float) -> str:
    """Returns where the first evaluation was below a goal."""
    headline = run.row.build_task().headline
    steps = [record["step"] for record in run.finding.records["test"] if record[headline] < goal]
    return f"at step {steps[0]:,}" if steps else "not yet"


def _costs(run: Run) -> tuple[str, str]:
    """Returns CPU minutes of an epoch, and the most memory."""
    epochs, train = run.finding.records["epoch"], run.finding.records["train"]
    if not epochs:
        times = [record["ms_per_step"] for record in train]
        return f"{statistics.median(times) * run.row.epoch / 6e4:.2f}" if times else "-", "-"
    minutes = statistics.median(record["cpu_seconds"] for record in epochs) / 60
    peak = max(record.get("peak_bytes", 0) for record in epochs)
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


def _drawn(runs: list[Run], look: Figures, place: Path, stem: str) -> dict[str, Path]:
    """Draws scores, drift and gradients of the runs of one group over epochs, where there are any."""
    curves, headline, drawn = [run.curve for run in runs], runs[0].row.build_task().headline, {}
    shown: dict[str, tuple[str, Callable[[dict[str, Any]], float | None]]] = {
        "scores": ("test", lambda record: record[headline]),
        "drift": ("train", lambda record: _largest_error(record) or None),
        "gradients": ("train", lambda record: record["gradient_norm"] or None),
    }
    for name, (kind, value) in shown.items():
        if not any(curve.points(kind, value) for curve in curves):
            continue
        drawn[name] = look.path(place, f"{stem}-{name}")
        with figure(drawn[name], 1, width=5.4, dpi=look.dpi) as (axes,):
            draw(axes, curves, kind, value)
            axes.set_xlabel("epoch")
            if name == "scores":
                _finish_scores(axes, runs)
            else:
                axes.set(**LABELS[name], yscale="log", xlim=(0, None))
                low, high = axes.get_ylim()
                axes.set_ylim(low / 2, high * 2)  # so that noise looks like noise
                log_scale(axes)
            legend(axes)
    return drawn


def _finish_scores(axes: "Axes", runs: list[Run]) -> None:
    """Adds what guessing scores, and the papers' figures, to curves of held-out scores."""
    task = runs[0].row.build_task()
    for run, look in zip(runs, styles(len(runs)), strict=True):
        if run.row.figure is not None:
            axes.axhline(run.row.figure, color=look["color"], linestyle=":", linewidth=1.0)
    if task.headline == "accuracy":  # runs of two epochs stand beside others of fifty
        axes.set(title="held out; dotted: the papers", ylabel="accuracy (%)")
        accuracy_scale(axes)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        return
    if task.known_baseline:  # a guess at ten classes would press the curves together
        reference_line(axes, task.known_baseline[task.headline], "without memory")
    axes.set(title="held out", ylabel=task.loss_label, xlim=(0, None))
    log_scale(axes)


def _largest_error(record: dict[str, Any]) -> float:
    return max((weight["error"] for weight in record["orthogonality"].values()), default=0.0)
