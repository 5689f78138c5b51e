"""Many runs in one folder: several models on one task, one after the other, or every combination of settings and seeds.

A sweep is a TOML file: the options of `stiefelkit train`, and a table `[vary]` of lists. Each combination is a run in a
folder of its own, so a sweep that was stopped goes on where it was. Past one machine there are others' schedulers: each
run is one line of `stiefelkit train`, which `Run.command` gives.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stiefelkit.errors import OptionError, RunError, StiefelkitError, UnknownNameError, did_you_mean
from stiefelkit.numbers import integer, validate_fields_
from stiefelkit.training import data
from stiefelkit.training.config import BY_COORDINATE, Config
from stiefelkit.training.display import Silent
from stiefelkit.training.figure import Figures
from stiefelkit.training.files import reachable, refuse_links, write_json
from stiefelkit.training.ranks import Interruption
from stiefelkit.training.recipes import Settings, written
from stiefelkit.training.tasks import Task, create, tasks

if TYPE_CHECKING:
    from stiefelkit.training.run_folder import Summary

SUBJECT = "A sweep"
"""The first words of error messages."""
SUMMARY = "sweep.json"
LONGEST_NAME, MOST = 100, 10_000
"""Characters of the name of a run, but for a digest, and runs of a sweep, at most."""
FIELDS = {item.name: item for item in dataclasses.fields(Settings)}
TABLES = {name for name, item in FIELDS.items() if item.default_factory is dict}
Spread = dict[str, tuple[float, float | None]]
"""Mean and standard deviation by the name of a score; one run has no deviation."""


@dataclass(frozen=True)
class SweepPlan:
    """Options of a sweep.

    Args:
        out: folder with one run for each combination; runs/NAME of the file if left out.
        jobs: runs at a time, each in a process with the threads that the file gives it.
        resume: keep the runs that are finished, continue the others, start those that are missing.
        commands: print the line of each run, for the scheduler of other machines, and run none.
    """

    out: Path | None = None
    jobs: int = 1
    resume: bool = False
    commands: bool = False

    def __post_init__(self) -> None:
        validate_fields_(self, SUBJECT, jobs=integer(1))


@dataclass(frozen=True)
class Run:
    """One combination: `chosen` of each option that varies, and all that the file gives; the recipe closes the rest."""

    chosen: dict[str, Any]
    task: str
    task_options: dict[str, Any]
    model: str
    settings: Settings

    @property
    def name(self) -> str:
        """Name of its folder, "lr=0.001,seed=2"."""
        return _name(self.chosen) or self.model

    @property
    def config(self) -> Config:
        """The whole description of the run."""
        return Config.resolve(create(self.task, self.task_options), self.model, self.settings)

    def command(self, out: Path, place: Path | None = None) -> str:
        """Returns the line that runs it alone, with the folder of the data if it is named."""
        words = ["stiefelkit", "train", self.task, "--model", self.model, "--out", str(out / self.name)]
        words += ["--data", str(place)] if place else []
        for key, value in _flat({**self.task_options, **self.settings.given()}).items():
            option = key.replace("_", "-")
            if isinstance(value, bool) and "." not in key:  # options of a task are switches
                words.append(f"--{option}" if value else f"--no-{option}")
            else:
                words += [f"--{option}", written(value)]
        return shlex.join(words)


@dataclass(frozen=True)
class Cell:
    """The runs of a sweep that differ by their seed alone: the finished ones, and why others have failed, by name.

    `scores` are of the held-out set, `validation` of what is set apart to choose by; `orthogonality` is the worst error
    over limit, None without orthogonal weights, and `ms_per_step` the median, None where no run is finished.
    """

    name: str
    runs: list[str]
    failed: dict[str, str]
    scores: Spread
    validation: Spread
    orthogonality: float | None
    ms_per_step: float | None


def runs_of(options: Mapping[str, Any]) -> list[Run]:
    """Returns every run that the content of a file describes, the last list of `[vary]` fastest.

    Raises OptionError if `[vary]` is no table of lists that hold different values, there is no such option, no task or
    model, or there are too many runs, and UnknownNameError if no task has this name.
    """
    # dashes in keys of any depth are Python's underscores
    fixed = json.loads(
        json.dumps(options, default=str),
        object_pairs_hook=lambda pairs: {key.replace("-", "_"): value for key, value in pairs},
    )
    vary = fixed.pop("vary", {})
    if not isinstance(vary, Mapping):
        raise OptionError(f"{SUBJECT} needs a table [vary] of lists, got {vary!r}.")
    fixed, lists = _flat(fixed), _flat(vary)
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise OptionError(f"{SUBJECT} needs a list of values for vary.{key}, got {values!r}.")
        if len({json.dumps(value) for value in values}) < len(values):
            raise OptionError(f"{SUBJECT} needs different values for vary.{key}, got {values!r}.")
    count = math.prod(map(len, lists.values()))
    if count > MOST:
        raise OptionError(f"{SUBJECT} needs {MOST:,} combinations at most, got {count:,}; shorten the lists of [vary].")
    return [_run(fixed, dict(zip(lists, values, strict=True))) for values in itertools.product(*lists.values())]


def _run(fixed: Mapping[str, Any], chosen: dict[str, Any]) -> Run:
    asked = {**fixed, **chosen}
    task, model = asked.pop("task", None), asked.pop("model", None)
    if not isinstance(task, str) or not isinstance(model, str):
        raise OptionError(f'{SUBJECT} needs task = "..." and model = "..." in its file, got {task!r} and {model!r}.')
    of_task = {item.name for item in dataclasses.fields(tasks.get(task))}
    task_options: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for key, value in asked.items():
        table, _, inner = key.partition(".")
        if table in TABLES and inner:
            settings.setdefault(table, {})[inner] = value
        elif key in FIELDS and key not in TABLES:
            settings[key] = value
        elif key in of_task:
            task_options[key] = value
        else:
            known = [*(FIELDS.keys() - TABLES), *of_task, *(f"{name}.NAME" for name in sorted(TABLES))]
            raise OptionError(f"{SUBJECT} of {task} has no option {key!r}{did_you_mean(key, known)}")
    return Run(chosen, task, task_options, model, Settings(**settings))


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with those of tables under names with a dot."""
    flat = {}
    for key, value in options.items():
        flat |= {f"{key}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _name(chosen: Mapping[str, Any]) -> str:
    """Returns a folder's name for a combination: readable, and cut with a digest where it would be too long."""
    words = ",".join(f"{key}={value}" for key, value in chosen.items()).replace("/", "_")
    if len(words) <= LONGEST_NAME:
        return words
    return f"{words[:LONGEST_NAME]}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"


def checked(runs: list[Run]) -> dict[str, Config]:
    """Returns the config of each run by its name; raises what `train` would of its options, or of the data."""
    configs = {run.name: run.config for run in runs}
    for config in configs.values():
        config.build_task().batches_per_epoch(config.batch_size)
        config.build_optimizer(config.build_model())
    return configs


def run_sweep(runs: list[Run], out: Path, display: Silent, jobs: int, resuming: bool) -> tuple[list[Cell], int | None]:
    """Runs what is not finished, `jobs` at a time, and writes sweep.json into the folder after each.

    Every run, and the data, are checked before the first begins. One that fails is noted, and the others go on. The
    first SIGINT or SIGTERM has the runs at work save and stop. Where `resuming`, finished runs are kept, others
    continued, missing ones begun. Returns the table of what is finished, and the signal that stopped it early, or None.

    Raises:
        RunError: `out` holds something and `resuming` is False, or a run in it has other settings.
        OptionError: a run has an option that is unknown or out of range, or two have one name.
        UnknownNameError: a run has a model, optimizer or coordinate that is unknown.
        DataError: the data are missing or damaged.
    """
    from stiefelkit.training.run_folder import RunFolder, is_run, last_step

    _require_room(SUBJECT, out, [run.name for run in runs], resuming)
    configs = checked(runs)
    if len(configs) < len(runs):
        raise OptionError(f"{SUBJECT} needs runs with different names, got two of one name.")
    for config in {json.dumps([config.task, config.task_options]): config for config in configs.values()}.values():
        with config.within_memory():
            config.build_task().held_out()
    for name, config in configs.items():
        path, begun = out / name, None
        with contextlib.suppress(RunError):  # one that cannot be read fails by itself
            begun = RunFolder.open(path).config if is_run(path) else None
        if begun is not None:
            begun.continued(config, str(path))
    with reachable(SUBJECT, out):
        out.mkdir(parents=True, exist_ok=True)
    # what is finished first, so that a stop leaves it in the table
    ordered = sorted(configs, key=lambda name: last_step(out / name) < configs[name].steps)
    summaries: dict[str, Summary] = {}
    failed: dict[str, str] = {}
    with Interruption() as interruption:
        for name, result in _outcomes({name: configs[name] for name in ordered}, out, jobs, interruption):
            if not isinstance(result, str):
                summaries[name] = result
                scores = result.validation or result.test  # those to choose by, where there are any
                result = ", ".join(f"{key} {value:.4f}" for key, value in scores.items())
            elif interruption.signal is None:
                failed[name] = result
            write_json(out / SUMMARY, [dataclasses.asdict(cell) for cell in _cells(runs, summaries, failed)])
            if interruption.signal is None:
                display.note(f"{len(summaries) + len(failed)}/{len(runs)}  {name}: {result}")
    return _cells(runs, summaries, failed), interruption.signal


def _outcomes(
    configs: dict[str, Config], out: Path, jobs: int, interruption: Interruption
) -> Iterator[tuple[str, "Summary | str"]]:
    """Yields each run as it ends: its name, and its figures if it is finished, else why not."""
    context = multiprocessing.get_context("spawn")
    if "forkserver" in multiprocessing.get_all_start_methods():
        # a server that has imported torch starts each run by a fork of itself, which has no thread yet
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["stiefelkit.training.train", "stiefelkit.models"])
    at_work: dict[Connection, Any] = {}
    waiting, is_told = list(configs), False
    try:
        while waiting or at_work:
            while waiting and len(at_work) < jobs:
                name = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                words = (configs[name], out / name, data.place(), theirs)
                process = context.Process(target=_train, args=words, name=name)
                process.start()
                theirs.close()
                at_work[ours] = process
            ended = wait(list(at_work), 0.5)  # without a timeout a signal would wake nobody
            for ours in [ours for ours in at_work if ours in ended]:
                process = at_work.pop(ours)
                yield process.name, _answer(ours, process)
            if interruption.signal is not None:
                waiting = []
                for process in () if is_told else at_work.values():
                    process.terminate()
                is_told = True
    finally:
        for process in at_work.values():
            process.kill()


def _answer(ours: Connection, process: Any) -> "Summary | str":
    """Returns what a process said at its end; one that was killed says nothing."""
    with ours, contextlib.suppress(EOFError):
        return ours.recv()
    process.join()
    return f"its process ended with {process.exitcode}"


def _train(config: Config, path: Path, place: Path | None, answer: Connection) -> None:
    """Trains or resumes one run, and answers with its figures if it is finished, else with a sentence."""
    from stiefelkit.training.run_folder import is_run, summarise
    from stiefelkit.training.train import resume, train

    if hasattr(os, "setsid"):
        os.setsid()  # a Ctrl-C on the terminal is the parent's, who passes it on once
    try:
        with data.named(place):
            outcome = resume(path, config) if is_run(path) else train(config, path)
            answer.send(summarise(path) if outcome.signal is None else f"stopped at step {outcome.step}")
    except StiefelkitError as error:
        answer.send(str(error))


def _cells(runs: list[Run], summaries: Mapping[str, "Summary"], failed: Mapping[str, str]) -> list[Cell]:
    """Returns the table of a sweep, in the order of its runs."""
    varied = [key for key in runs[0].chosen if len({json.dumps(run.chosen[key]) for run in runs}) > 1]
    groups: dict[str, list[str]] = {}
    for run in runs:
        apart = {key: run.chosen[key] for key in varied if key != "seed"}
        groups.setdefault(_name(apart) or run.model, []).append(run.name)
    cells = []
    for name, names in groups.items():
        finished = [run for run in names if run in summaries]
        found = [summaries[run] for run in finished]
        lost = {run: failed[run] for run in names if run in failed}
        spreads = _spreads([summary.test for summary in found]), _spreads([summary.validation for summary in found])
        ratio = max((ratio for summary in found if (ratio := summary.orthogonality) is not None), default=None)
        time = statistics.median(summary.ms_per_step for summary in found) if found else None
        cells.append(Cell(name, finished, lost, *spreads, ratio, time))
    return cells


def _spreads(scores: list[dict[str, float]]) -> Spread:
    columns = {key: [score[key] for score in scores] for key in (scores[0] if scores else ())}
    return {key: (statistics.fmean(c), statistics.stdev(c) if len(c) > 1 else None) for key, c in columns.items()}


def _require_room(who: str, out: Path, names: Iterable[str], resuming: bool) -> None:
    """Raises RunError unless runs of these names may be put into a folder, or are there, and no links."""
    from stiefelkit.training.run_folder import is_run

    with reachable(who, out):
        if out.exists() and (not out.is_dir() or is_run(out)):
            kind = "run" if out.is_dir() else "file"
            raise RunError(f"{who} needs a folder of its own, got the {kind} {out}; choose another --out.")
        if not resuming and out.exists() and any(out.iterdir()):
            raise RunError(f"{who} needs a new or empty folder, got {out}; add --resume to continue what is there.")
    for path in (out / name for name in names):
        with reachable(who, path):
            refuse_links(path, out)


def compare(
    task: Task,
    models: Sequence[str],
    out: Path,
    settings: Settings,
    display: Silent,
    figures: Figures,
    named: Mapping[str, Any],
    *,
    resuming: bool,
    tensorboard: bool,
) -> "tuple[list[Summary], list[Path], int | None]":
    """Trains each model in a folder of its own under `out`, then draws their curves there.

    Returns what came of each model, and the figures; or nothing, and the signal that stopped it.

    The models run one after the other, so that their times can be compared. A learning rate of a coordinate is for the
    models that have it. Where `resuming`, finished runs are kept, others continued, missing ones begun; those that are
    there must have the options of the task that are `named`.

    Raises:
        OptionError: no model, or one named twice.
        UnknownNameError: no model has a coordinate that is given a learning rate.
        RunError: `out` holds something and `resuming` is False.
    """
    from stiefelkit.training.plot import plot
    from stiefelkit.training.run_folder import is_run, summarise
    from stiefelkit.training.train import resume, train

    who = "A comparison"
    if not models or len(set(models)) < len(models):
        raise OptionError(f"{who} needs one or more different models, got {', '.join(models) or 'none'}.")
    _require_room(who, out, models, resuming)
    configs = [Config.resolve(task, model, settings, strict=False) for model in models]
    by_coordinate = {table: settings.given().get(table, {}) for table in BY_COORDINATE}
    for table, name in [(table, name) for table, values in by_coordinate.items() for name in values]:
        if not any(name in getattr(config, table) for config in configs):
            known = {coordinate for config in configs for coordinate in config.coordinate_names()}
            raise UnknownNameError(f"None of {', '.join(models)} has a coordinate {name!r}{did_you_mean(name, known)}")
    for config in configs:  # a bad option of the last model must not be found out after hours
        config.build_optimizer(config.build_model())
    for config in configs:
        path = out / config.model
        if is_run(path):
            asked = settings.given() | {"task": task.name, "task_options": named, "model": config.model}
            for table, values in by_coordinate.items():
                asked[table] = {name: value for name, value in values.items() if name in getattr(config, table)}
            outcome = resume(path, asked, display, tensorboard=tensorboard)
            if outcome.already:
                display.note(f"{config.model} is finished at step {outcome.step}.")
        else:
            outcome = train(config, path, display, tensorboard=tensorboard)
        if outcome.signal is not None:
            return [], [], outcome.signal
    paths = [out / model for model in models]
    summaries = [summarise(path) for path in paths]
    write_json(out / "summary.json", [dataclasses.asdict(summary) for summary in summaries])
    return summaries, plot(paths, out, figures), None
