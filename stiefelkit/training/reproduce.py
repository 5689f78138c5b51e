"""Experiments of papers, run again: trained, resumed, and one page that compares all of them with the papers."""

import dataclasses
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError, StiefelkitError, needs, printable
from stiefelkit.figure import Figures
from stiefelkit.files import write_atomically
from stiefelkit.training import papers
from stiefelkit.training.display import Terminal
from stiefelkit.training.papers import Row
from stiefelkit.training.plot import Curve, draw_curves
from stiefelkit.training.recipes import Settings
from stiefelkit.training.run_folder import RunFolder, by_kind, is_run, last_step
from stiefelkit.training.train import RunOutcome, resume, train

PAGE = "report.md"


@dataclass(frozen=True)
class Score:
    """An evaluation that stands for a run: the task's headline on the held-out set, and the steps done then."""

    test: float
    step: int


@dataclass(frozen=True)
class Finding:
    """A run of a row: the evaluation that is best on the held-out set, that on examples set apart, and the last."""

    row: Row
    best_test: Score
    best_validation: Score | None
    last: Score
    folder: RunFolder = field(repr=False)
    records: dict[str, list[dict[str, Any]]] = field(repr=False)

    @property
    def epochs(self) -> float:
        """Epochs so far."""
        return self.last.step / self.row.epoch

    @property
    def minutes(self) -> float | None:
        """CPU time of an epoch, the median; None if the run has not written any down."""
        times = [record["cpu_seconds"] / 60 for record in self.records["epoch"]]
        times = times or [record["ms_per_step"] * self.row.epoch / 6e4 for record in self.records["train"]]
        return statistics.median(times) if times else None

    @property
    def bytes(self) -> int:
        """The most that the process held; 0 if that is not known."""
        return max((record.get("peak_bytes", 0) for record in self.records["epoch"]), default=0)

    @property
    def reached(self) -> int | None:
        """The step after which the held-out loss was first below the goal of the row."""
        headline, goal = self.row.build_task().headline, self.row.goal or 0.0
        return next((record["step"] for record in self.records["test"] if record[headline] < goal), None)


def reproduce(
    row: Row, out: Path, epochs: int | None = None, named: Settings | None = None, display: Terminal | None = None
) -> RunOutcome:
    """Trains as a row of a paper's table says, or goes on where a run of it stopped.

    What is left open of epochs, seed, threads and device is as in the paper, or as the run began. Raises as `train` and
    `resume` do.
    """
    named = dataclasses.replace(named or Settings(), steps=None if epochs is None else epochs * row.epoch)
    config = row.config(named)
    if not is_run(out):
        return train(config, out, display)
    begun = RunFolder.open(out).config
    if begun.steps != config.steps and not config.may_be_prolonged:
        words = f"--epochs {begun.steps // row.epoch}, over which its rates fall"
        raise RunError(f"Run {out} needs {words}, got {config.steps // row.epoch} epochs; name another --out.")
    kept = {name: vars(begun)[name] for name in ("seed", "threads", "device") if vars(named)[name] is None}
    return resume(out, dataclasses.replace(config, steps=max(config.steps, last_step(out)), **kept), display)


def opened(path: Path, row: Row) -> RunFolder:
    """Returns the folder of a run; raises RunError unless it is the row but for seed, length, threads and device."""
    folder = RunFolder.open(path)
    free = {name: vars(folder.config)[name] for name in ("seed", "steps", "threads", "device")}
    begun, wanted = (vars(config) for config in (folder.config, dataclasses.replace(row.config(), **free)))
    for name, value in wanted.items():
        got = f"{begun[name]!r} in {path}; move it elsewhere"
        needs(begun[name] == value, RunError, f"A run of {row.name}", f"{name} = {value!r}", got)
    return folder


def finding(path: Path, row: Row) -> Finding:
    """Returns what came of a run; raises RunError if it is missing, damaged, another, or not evaluated yet."""
    folder = opened(path, row)
    headline, records = folder.config.build_task().headline, by_kind(folder)
    best = max if row.by_accuracy else min
    test, validation = ({line["step"]: line[headline] for line in records[k]} for k in ("test", "validation"))
    needs(bool(test), RunError, f"Run {path}", "an evaluation in its log", "none yet; continue it")
    chosen = best(validation, key=validation.__getitem__, default=None)
    first, last = (Score(test[step], step) for step in (best(test, key=test.__getitem__), max(test)))
    return Finding(row, first, None if chosen is None else Score(test[chosen], chosen), last, folder, records)


def write_page(out: Path, place: Path, figures: Figures | None = None) -> tuple[Path, list[Path]]:
    """Writes a Markdown page and its figures about every run in a folder that has been evaluated, and returns them."""
    from jinja2 import Environment, StrictUndefined

    groups: dict[str, list[Finding]] = {}
    left_out: dict[str, str] = {}
    for row in papers.rows():
        if is_run(out / row.name):
            try:
                run = finding(out / row.name, row)
            except StiefelkitError as error:
                left_out[row.name] = str(error)
            else:
                groups.setdefault(row.group, []).append(run)
    if not groups:
        why = f": {next(iter(left_out.values()))}" if left_out else "; name another --out."
        raise RunError(f"A report needs runs that have been evaluated, got none in {out}{why}")
    drawn = {}
    for group, runs in groups.items():
        curves = [Curve(run.row.label, run.folder, run.records, run.row.epoch, run.row.figure) for run in runs]
        drawn[group] = draw_curves(curves, place, figures or Figures(), re.sub(r" \w+=", "-", group) + "-")
    look = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    look.filters |= {"literal": _literal, "printable": printable}
    page = look.from_string(Path(__file__).with_suffix(".md").read_text("utf-8"))
    place.mkdir(parents=True, exist_ok=True)
    write_atomically(place / PAGE, page.render(groups=groups, drawn=drawn, left_out=left_out).encode())
    return place / PAGE, [path for paths in drawn.values() for path in paths.values()]


def _literal(words: object) -> str:
    """Returns words of a run, letter by letter in one line of Markdown: no markup, no HTML, no orders to a terminal."""
    return re.sub(r"([\\`*_{}\[\]<>&|#~!$])", r"\\\1", printable(" ".join(str(words).split())))
