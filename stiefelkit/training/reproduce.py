"""Experiments of papers, run again: trained, resumed, and one page that compares all of them with the papers."""

import dataclasses
import re
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stiefelkit.errors import RunError, StiefelkitError, needs, printable
from stiefelkit.figure import Figures, figure, reference_line
from stiefelkit.files import parse_json, read_file, write_atomically, write_json
from stiefelkit.machine import processor
from stiefelkit.training.display import Silent
from stiefelkit.training.papers import Reproduction, Row, rows
from stiefelkit.training.plot import Curve, Value, draw, draw_runs
from stiefelkit.training.run_folder import PROCESSOR, RunFolder, by_kind, is_run, last_step
from stiefelkit.training.train import RunOutcome, resume, train

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MADE, PAGE = "reproduced.json", "report.md"
DIVERGED = "diverged"
LABELS: dict[str, dict[str, str]] = {
    "drift": {"title": "orthogonality", "ylabel": r"$\Vert W^H W - I\Vert_F$"},
    "gradients": {"title": "largest gradient since the last line", "ylabel": "norm"},
}


@dataclass(frozen=True)
class Score:
    """An evaluation that stands for a run: the task's headline on the held-out set, and the steps done then."""

    test: float
    step: int


@dataclass(frozen=True)
class Finding:
    """Results of a run: the evaluation that is best on the held-out set, that on examples set apart, and the last."""

    best_test: Score
    best_validation: Score | None
    last: Score
    epochs: float
    folder: RunFolder = field(repr=False)
    records: dict[str, list[dict[str, Any]]] = field(repr=False)


def reproduce(row: Row, out: Path, plan: Reproduction | None = None, display: Silent | None = None) -> RunOutcome:
    """Trains as a row of a paper's table says, or goes on where a run of it stopped.

    What the plan leaves open is as in the paper, or as the run began. Raises as `train` and `resume` do.
    """
    named = (plan or Reproduction()).settings(row)
    config = row.config(named)
    if not is_run(out):
        return train(config, out, display)
    begun, done = RunFolder.open(out).config, last_step(out)
    if begun.steps != config.steps and not config.may_be_prolonged:
        words = f"--epochs {begun.steps // row.epoch}, over which its rates fall"
        raise RunError(f"Run {out} needs {words}, got {config.steps // row.epoch} epochs; name another --out.")
    kept = {name: vars(begun)[name] for name in ("seed", "threads", "device") if vars(named)[name] is None}
    asked = dataclasses.replace(config, **kept)
    if done >= config.steps:
        begun.continued(dataclasses.replace(asked, steps=begun.steps), str(out))
        return RunOutcome(out, done, already=True)
    return resume(out, asked, display)


def opened(path: Path, row: Row) -> RunFolder:
    """Returns the folder of a run; raises RunError unless it is the row but for seed, length, threads and device."""
    folder = RunFolder.open(path)
    free = {name: vars(folder.config)[name] for name in ("seed", "steps", "threads", "device")}
    begun, wanted = (vars(config) for config in (folder.config, dataclasses.replace(row.config(), **free)))
    for name, value in wanted.items():
        got = f"{begun[name]!r} in {path}; move it elsewhere"
        needs(begun[name] == value, RunError, f"A run of {row.name}", f"{name} = {value!r}", got)
    return folder


def finding(path: Path) -> Finding:
    """Returns what came of a run; raises RunError if it is missing, damaged or has not been evaluated yet."""
    folder = RunFolder.open(path)
    task, records = folder.config.build_task(), by_kind(folder)
    best = max if task.headline == "accuracy" else min
    test, validation = ({line["step"]: line[task.headline] for line in records[k]} for k in ("test", "validation"))
    needs(bool(test), RunError, f"Run {path}", "an evaluation in its log", "none yet; continue it")
    chosen = best(validation, key=validation.__getitem__, default=None)
    first, last = (Score(test[step], step) for step in (best(test, key=test.__getitem__), max(test)))
    by_validation = None if chosen is None else Score(test[chosen], chosen)
    epochs = last.step / task.batches_per_epoch(folder.config.batch_size)
    return Finding(first, by_validation, last, epochs, folder, records)


def note(path: Path, row: Row, command: str, diverged: str = "") -> None:
    """Writes into the folder of a run which command went on with it, on what, and what was not finite at its end."""
    entry = {"command": command, "commit": _commit(), PROCESSOR: processor(RunFolder.open(path).config.device)}
    entry |= {DIVERGED: diverged} if diverged else {}
    begun = made_by(path)
    if entry not in begun:
        write_json(path / MADE, {"name": row.name, "made_by": [*begun, entry]})


def made_by(path: Path) -> list[dict[str, Any]]:
    """Returns the commands and commits that a run was made by; none if nobody wrote them down."""
    try:
        commands = parse_json(read_file(path / MADE))["made_by"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [entry for entry in commands if isinstance(entry, dict)] if isinstance(commands, list) else []


def _commit() -> str:
    """Returns the commit of the package's source, with a + if it was changed since; empty outside of a checkout."""
    here = Path(__file__).parent
    words = ["git", "-C", str(here), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


Run = tuple[Row, Finding]


def _cells(row: Row, found: Finding) -> list[str]:
    """Returns the line of a run in a table."""
    records, headline = found.records, row.build_task().headline
    if row.goal is None:
        second = "-" if found.best_validation is None else row.said(found.best_validation.test)
    else:
        steps = (record["step"] for record in records["test"] if record[headline] < row.goal)
        second = next((f"at step {step:,}" for step in steps), "not yet")
    times = [record["cpu_seconds"] / 60 for record in records["epoch"]]
    times = times or [record["ms_per_step"] * row.epoch / 6e4 for record in records["train"]]
    peak = max((record.get("peak_bytes", 0) for record in records["epoch"]), default=0)
    return [
        row.name,
        f"{found.folder.parameters:,}" + (f" ({row.parameters:,})" if row.parameters else ""),
        f"{found.epochs:.4g} of {row.epochs:.4g}",
        f"{row.said(found.best_test.test)} at {found.best_test.step / row.epoch:.4g}",
        second,
        row.said(found.last.test),
        row.printed,
        f"{statistics.median(times):.2f}" if times else "-",
        f"{peak / 1e6:.0f}" if peak else "-",
    ]


def write_page(out: Path, place: Path, figures: Figures | None = None) -> tuple[Path, list[Path]]:
    """Writes a Markdown page and its figures about every run in a folder that has been evaluated, and returns them."""
    from jinja2 import Environment, StrictUndefined

    groups: dict[str, list[Run]] = {}
    left_out: dict[str, str] = {}
    for row in rows():
        path = out / row.name
        if is_run(path):
            try:
                run = row, finding(opened(path, row).path)
            except StiefelkitError as error:
                left_out[row.name] = str(error)
            else:
                groups.setdefault(row.group, []).append(run)
    if not groups:
        why = f": {next(iter(left_out.values()))}" if left_out else "; name another --out."
        raise RunError(f"A report needs runs that have been evaluated, got none in {out}{why}")
    parts = [_part(group, runs, figures or Figures(), place) for group, runs in groups.items()]
    look = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    look.filters |= {"literal": _literal, "code": _code}
    page = look.from_string(Path(__file__).with_suffix(".md").read_text("utf-8"))
    place.mkdir(parents=True, exist_ok=True)
    write_atomically(place / PAGE, page.render(parts=parts, left_out=left_out).encode())
    return place / PAGE, [path for part in parts for path in part["drawn"].values()]


def _part(group: str, runs: list[Run], look: Figures, place: Path) -> dict[str, Any]:
    """Returns what the page says of the runs of a group, once their figures are drawn."""
    row, task, notes = runs[0][0], runs[0][0].build_task(), []
    if task.known_baseline:
        notes.append(f"Without memory: {row.said(task.known_baseline[task.headline])}.")
    for note in dict.fromkeys(row.note for row, _ in runs if row.note):
        notes.append(f"{', '.join(row.name for row, _ in runs if row.note == note)}: {note}.")
    made = {row.name: made_by(found.folder.path) for row, found in runs}
    ends = {name: _literal(entries[-1].get(DIVERGED) or "") for name, entries in made.items() if entries}
    return {
        "group": group,
        "word": "accuracy" if row.by_accuracy else task.loss_label,
        "second": "by validation" if row.goal is None else f"first below {row.goal:g}",
        "table": [_cells(*run) for run in runs],
        "notes": notes + [f"{name}: ended where {why}." for name, why in ends.items() if why],
        "drawn": _drawn(runs, look, place, re.sub(r" \w+=", "-", group)),
        "made": [(found.folder, entry) for row, found in runs for entry in made[row.name]],
    }


def _literal(words: object) -> str:
    r"""Returns words of a run, letter by letter in one line of Markdown: no markup, no HTML, no orders to a terminal.

    >>> print(_literal("<b>`a`\n$x$\x1b"))
    \<b\>\`a\` \$x\$\\x1b
    """
    return re.sub(r"([\\`*_{}\[\]<>&|#~!$])", r"\\\1", printable(" ".join(str(words).split())))


def _code(words: object) -> str:
    """Returns the same as code, where no letter is markup but a backtick."""
    shown = printable(" ".join(str(words).split()))
    return _literal(shown) if "`" in shown else f"`{shown}`"


def _drawn(runs: list[Run], look: Figures, place: Path, stem: str) -> dict[str, Path]:
    """Draws scores, drift and gradients of the runs of one group over epochs, where there are any, and `draw_runs`."""
    curves = [Curve(row.label, row.build_task(), found.records, row.epoch) for row, found in runs]
    headline, drawn = curves[0].task.headline, {}
    shown: dict[str, tuple[str, Value]] = {
        "scores": ("test", lambda line: line[headline]),
        "drift": ("train", lambda line: max((w["error"] for w in line["orthogonality"].values()), default=0) or None),
        "gradients": ("train", lambda line: line["gradient_norm"] or None),
    }
    for name, (kind, value) in shown.items():
        if not any(curve.points(kind, value) for curve in curves):
            continue
        drawn[name] = look.path(place, f"{stem}-{name}")
        with figure(drawn[name], dpi=look.dpi) as (axes,):
            draw(axes, curves, kind, value)
            axes.set_xlabel("epoch")
            if name == "scores":
                _finish_scores(axes, runs)
            else:
                axes.set(**LABELS[name], yscale="log")
            axes.legend()
    logs = [(found.folder, found.records) for _, found in runs]
    return drawn | draw_runs(logs, place, look, f"{stem}-")


def _finish_scores(axes: "Axes", runs: list[Run]) -> None:
    """Adds what guessing scores, and the papers' figures, to curves of held-out scores."""
    task = runs[0][0].build_task()
    for number, (row, _) in enumerate(runs):
        if row.figure is not None:
            axes.axhline(row.figure, color=f"C{number % 10}", linestyle=":")
    if task.headline == "accuracy":  # runs of two epochs stand beside others of fifty
        axes.set(title="held out; dotted: the papers", ylabel="accuracy", xscale="log")
        return
    if task.known_baseline:  # a guess at ten classes would press the curves together
        reference_line(axes, task.known_baseline[task.headline], "without memory")
    axes.set(title="held out", ylabel=task.loss_label, yscale="log")
