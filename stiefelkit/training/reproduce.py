"""Experiments of papers, run again: trained, resumed, and one page that compares all of them with the papers."""

import dataclasses
import itertools
import os
import re
import shutil
import statistics
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError, StiefelkitError, needs, printable
from stiefelkit.figure import Figures
from stiefelkit.files import importing, read_json, write_atomically
from stiefelkit.training import papers, run_folder
from stiefelkit.training.display import Terminal
from stiefelkit.training.papers import Row
from stiefelkit.training.plot import Curve, Records, draw_curves
from stiefelkit.training.recipes import Settings
from stiefelkit.training.run_folder import RunFolder, by_kind, is_run, worst_ratio
from stiefelkit.training.train import RunOutcome, resume, train

PAGE, FIGURES, MADE, WORDS = "report.md", "report", "reproduced.json", "words.md"


@dataclass(frozen=True)
class Score:
    """An evaluation that stands for a run: the task's headline on the held-out set, and the steps done then."""

    test: float
    step: int


@dataclass(frozen=True)
class Finding:
    """A run: the evaluation that is best on the held-out set, that on examples set apart, and the last.

    Args:
        name: of the row, or the place of a run that is none.
        made: where a log tells no such thing, its commands, commits and processors, and the size of its test set.
    """

    row: Row
    name: str
    best_test: Score
    best_validation: Score | None
    last: Score
    folder: RunFolder = field(repr=False)
    records: Records = field(repr=False)
    made: dict[str, Any] = field(repr=False)

    @property
    def epoch(self) -> float:
        """Steps of an epoch, of which the log tells without the data."""
        last = self.records["epoch"][-1:]
        return last[0]["step"] / last[0]["epoch"] if last else self.row.epoch

    @property
    def epochs(self) -> float:
        """Epochs so far."""
        return self.last.step / self.epoch

    @property
    def hours(self) -> float:
        """CPU time of all steps."""
        lines = self.records["train"]
        steps = itertools.pairwise([0, *(line["step"] for line in lines)])
        return sum((b - a) * line["ms_per_step"] for (a, b), line in zip(steps, lines, strict=True)) / 3.6e6

    @property
    def reached(self) -> int | None:
        """The step after which the held-out loss was first below the goal of the row."""
        headline, goal = self.row.build_task().headline, self.row.goal or 0.0
        return next((record["step"] for record in self.records["test"] if record[headline] < goal), None)

    def scores(self, kind: str = "test", key: str = "", since: float = 0) -> list[float]:
        """Returns a number of each line of a kind, the headline or `key`, since an epoch."""
        lines = (line for line in self.records[kind] if line["step"] / self.epoch >= since)
        return [line[key or self.row.build_task().headline] for line in lines]


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
    return resume(out, dataclasses.replace(config, steps=max(config.steps, run_folder.last_step(out)), **kept), display)


def add(archive: Path, out: Path) -> list[Path]:
    """Puts the runs of rows in a tar into a folder, new ones or those that go on from what is there; returns them."""
    who, moves = "An archive", {}
    with tempfile.TemporaryDirectory() as name:
        with importing(who, archive, RunError):
            try:
                shutil.unpack_archive(archive, name, filter="data")
            except (shutil.ReadError, tarfile.TarError) as error:
                raise ValueError(str(error)) from error
        for path in sorted(config.parent for config in Path(name).rglob(run_folder.CONFIG)):
            moves[path] = place = out / path.relative_to(name)
            by_kind(folder := opened(path, papers.find(path.name)))
            is_longer = run_folder.content_of(folder.log).startswith(run_folder.content_of(place / run_folder.LOG))
            needs(is_longer, RunError, who, f"a log that begins with that of {place}", "another; move one elsewhere")
        needs(bool(moves), RunError, who, "runs of rows", "none")
        return [Path(shutil.copytree(path, place, dirs_exist_ok=True)) for path, place in moves.items()]


def opened(path: Path, row: Row) -> RunFolder:
    """Returns the folder of a run; raises RunError unless it is the row but for seed, length, threads and device."""
    folder = RunFolder.open(path)
    free = {name: vars(folder.config)[name] for name in ("seed", "steps", "threads", "device")}
    begun, wanted = (vars(config) for config in (folder.config, dataclasses.replace(row.config(), **free)))
    for name, value in wanted.items():
        got = f"{begun[name]!r} in {path}; move it elsewhere"
        needs(begun[name] == value, RunError, f"A run of {row.name}", f"{name} = {value!r}", got)
    return folder


def finding(path: Path, row: Row | None = None, name: str = "") -> Finding:
    """Returns what came of a run, by its own config where it is no row.

    Raises RunError if it is missing, damaged, another, or not evaluated yet.
    """
    folder = RunFolder.open(path) if row is None else opened(path, row)
    row = row or Row.of(name, folder.config)
    with importing(f"Run {name or row.name}", path / MADE, RunError):
        made = read_json(path / MADE) if (path / MADE).is_file() else {}
    return _found(row, name or row.name, folder, by_kind(folder), made)


def alike(runs: list[Finding]) -> list[Finding]:
    """Returns what had come of each of some runs when the shortest had done its last evaluation."""
    most, cut = min(run.last.step for run in runs), []
    for run in runs:
        records = {k: [line for line in lines if line["step"] <= most] for k, lines in run.records.items()}
        cut.append(_found(run.row, run.name, run.folder, records, run.made))
    return cut


def _found(row: Row, name: str, folder: RunFolder, records: Records, made: dict[str, Any]) -> Finding:
    headline, best = folder.config.build_task().headline, max if row.by_accuracy else min
    test, validation = ({line["step"]: line[headline] for line in records[k]} for k in ("test", "validation"))
    needs(bool(test), RunError, f"Run {folder.path}", "an evaluation in its log", "none yet; continue it")
    chosen = best(validation, key=validation.__getitem__, default=None)
    first, last = (Score(test[step], step) for step in (best(test, key=test.__getitem__), max(test)))
    by_validation = None if chosen is None else Score(test[chosen], chosen)
    return Finding(row, name, first, by_validation, last, folder, records, made)


def write_page(out: Path, page: Path, figures: Figures | None = None, readme: Path | None = None) -> list[Path]:
    """Draws every run below a folder that has been evaluated, writes the page of `page_of`, and returns the figures.

    In another file the line that ends with `<!-- runs -->` says how many rows have run.
    """
    groups, _ = findings(out)
    drawn = []
    for group, runs in groups.items():
        for stem in ("", "others-"):
            shown = [run for run in runs if run.row.paper and run.row.in_paper == (not stem)]
            curves = [Curve(run.row.label, run.folder, run.records, run.epoch, run.row.figure) for run in shown]
            if curves:
                drawn += draw_curves(curves, out / FIGURES, figures or Figures(), stem_of(group) + stem).values()
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, page_of(out, page).encode())
    if readme is not None:
        write_atomically(readme, marked(readme.read_text("utf-8"), summary(groups)).encode())
    return drawn


def marked(text: str, line: str) -> str:
    """Returns a text with another line before the mark of runs."""
    return re.sub(r"^.*(?=<!-- runs -->$)", f"{line} ", text, flags=re.MULTILINE)


def summary(groups: dict[str, list[Finding]]) -> str:
    """Returns how many rows of papers have run."""
    ran = [run for runs in groups.values() for run in runs if run.row.in_paper]
    whole = {run.name for run in ran if run.last.step >= (run.row.settings.steps or 0)}
    known, some = sum(row.in_paper for row in papers.rows()), {run.name for run in ran}
    return f"Of {known} rows of papers {len(some)} have run, {len(whole)} of them for all their epochs."


def findings(out: Path) -> tuple[dict[str, list[Finding]], dict[str, str]]:
    """Returns the runs below a folder by the groups of their rows, and why others are left out; raises RunError."""
    known = {row.name: row for row in papers.rows()}
    order = {group: [] for group in dict.fromkeys(row.group for row in known.values())}
    found, left_out = dict[str, list[Finding]](order), dict[str, str]()
    for path in sorted(config.parent for config in out.rglob(run_folder.CONFIG)):
        row, name = known.get(path.name), path.relative_to(out).as_posix()
        try:
            run = finding(path, row, path.name if row else name)
            found.setdefault(run.row.group, []).append(run)
        except StiefelkitError as error:
            left_out[name] = str(error).partition(";")[0].replace(f"{out}{os.sep}", "")
    if not any(found.values()):
        why = f": {next(iter(left_out.values()))}" if left_out else "; name another --out."
        raise RunError(f"A report needs runs that have been evaluated, got none in {out}{why}")
    places = [*known]
    for runs in found.values():
        runs.sort(key=lambda run: places.index(run.name) if run.name in known else len(places))
    return {group: runs for group, runs in found.items() if runs}, left_out


def page_of(out: Path, page: Path) -> str:
    """Returns Markdown about the runs below a folder: what words.md there says of them, tables, what has not run.

    In words.md stands `{{ run("scornn-mnist-170").last.test }}` where a number of a log is to stand.
    """
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    groups, left_out = findings(out)
    runs = [run for group in groups.values() for run in group]
    named = {run.name: run for run in reversed(runs)}
    look = SandboxedEnvironment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    look.filters |= {"literal": _literal, "mean": statistics.fmean}
    look.globals |= {"groups": groups, "runs": runs, "left_out": left_out, "summary": summary(groups), "alike": alike}
    look.filters["drifts"] = lambda log: [ratio for line in log if (ratio := worst_ratio(line)) is not None]
    look.globals |= {"run": named.__getitem__, "log": lambda name: run_folder.read_log(out / name / run_folder.LOG)}
    look.globals["missing"] = [row for row in papers.rows() if row.name not in named]
    place = Path(os.path.relpath(out / FIGURES, page.parent))
    drawn = {g: sorted((out / FIGURES).glob(f"{stem_of(g)}[!0-9]*")) for g in groups}
    look.globals["drawn"] = {g: [(place / path.name).as_posix() for path in paths] for g, paths in drawn.items()}
    words = look.from_string((out / WORDS).read_text("utf-8")).render() if (out / WORDS).is_file() else ""
    return look.from_string(Path(__file__).with_suffix(".md").read_text("utf-8")).render(said=words)


def stem_of(group: str) -> str:
    """Returns the first part of the names of the figures of a group."""
    return re.sub(r" \w+=", "-", group) + "-"


def _literal(words: object) -> str:
    """Returns words of a run, letter by letter in one line of Markdown: no markup, no HTML, no orders to a terminal."""
    return re.sub(r"([\\`*_{}\[\]<>&|#~!$])", r"\\\1", printable(" ".join(str(words).split())))
