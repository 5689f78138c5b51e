"""One task over every combination of settings and seeds, several runs at a time on this machine.

A sweep is a TOML file: the options of `stiefelkit train`, and a table `[vary]` of lists. Each combination is a run in a
folder of its own, so a sweep that was stopped goes on where it was. Past one machine there are others' schedulers: each
run is one line of `stiefelkit train`, which `Run.command` gives.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stiefelkit.errors import OptionError, did_you_mean
from stiefelkit.numbers import settle_, whole
from stiefelkit.training.config import Config
from stiefelkit.training.recipes import Settings
from stiefelkit.training.summary import Summary
from stiefelkit.training.tasks import create, tasks

__all__ = ["Cell", "Run", "Sweep", "SweepPlan", "cells"]

WHO = "A sweep"
SEED = "seed"
LONGEST_NAME = 100
MOST = 10_000
"""Runs of a sweep at most."""
FIELDS = {item.name: item for item in dataclasses.fields(Settings)}
TABLES = {name for name, item in FIELDS.items() if item.default_factory is dict}


@dataclass(frozen=True)
class SweepPlan:
    """How a sweep runs.

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
        """Checks the number of jobs."""
        settle_(self, WHO, jobs=whole(1))


@dataclass(frozen=True)
class Run:
    """One combination.

    Args:
        name: of its folder, "lr=0.001,seed=2".
        chosen: what it has of each option that varies.
        task: the registry name.
        task_options: the fields of the task that the file gives.
        model: the name.
        settings: what the file gives; the recipe closes the rest.
    """

    name: str
    chosen: dict[str, Any]
    task: str
    task_options: dict[str, Any]
    model: str
    settings: Settings

    @property
    def config(self) -> Config:
        """The whole description of the run."""
        return Config.resolve(create(self.task, self.task_options), self.model, self.settings)

    def command(self, out: Path, data: Path | None = None) -> str:
        """The line that runs it alone, with the folder of the data if it is named."""
        words = ["stiefelkit", "train", self.task, "--model", self.model, "--out", str(out / self.name)]
        words += [] if data is None else ["--data", str(data)]
        for key, value in {**self.task_options, **self.settings.given()}.items():
            for inner, item in value.items() if isinstance(value, dict) else [("", value)]:
                option = (f"{key}.{inner}" if inner else key).replace("_", "-")
                if isinstance(item, bool) and not inner:  # options of a task are switches
                    words.append(f"--{option}" if item else f"--no-{option}")
                else:
                    words += [f"--{option}", _word(item)]
        return shlex.join(words)


@dataclass(frozen=True)
class Sweep:
    """What a file asks for.

    Args:
        fixed: the options that all runs have.
        vary: option, "lr" or "rates.skew", to the values that it takes.
    """

    fixed: Mapping[str, Any]
    vary: Mapping[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> "Sweep":
        """Returns the sweep that the content of a file describes.

        Raises:
            OptionError: `[vary]` is no table of lists, or one is empty or holds a value twice.
        """
        fixed = {key.replace("-", "_"): value for key, value in options.items()}
        vary = fixed.pop("vary", {})
        if not isinstance(vary, Mapping):
            raise OptionError(f"{WHO} needs a table [vary] of lists, got {vary!r}.")
        lists = {}
        for key, values in _flat(vary).items():
            if not isinstance(values, list) or not values:
                raise OptionError(f"{WHO} needs a list of values for vary.{key}, got {values!r}.")
            if len({json.dumps(value) for value in values}) < len(values):
                raise OptionError(f"{WHO} needs different values for vary.{key}, got {values!r}.")
            lists[key] = values
        return cls(fixed, lists)

    def runs(self) -> list[Run]:
        """Every run, the last list fastest.

        Raises:
            OptionError: there is no such option, or no task or model, or there are more runs than a sweep may have.
            UnknownNameError: no task has this name.
        """
        count = math.prod(map(len, self.vary.values()))
        if count > MOST:
            raise OptionError(f"{WHO} needs {MOST:,} combinations at most, got {count:,}; shorten the lists of [vary].")
        runs = []
        for values in itertools.product(*self.vary.values()):
            chosen = dict(zip(self.vary, values, strict=True))
            runs.append(_run(self.fixed, chosen))
        return runs


@dataclass(frozen=True)
class Cell:
    """The runs of a sweep that differ by their seed alone.

    Args:
        name: what they have in common of what varies.
        runs: names of the finished ones.
        failed: name to sentence of those that could not be finished.
        scores: mean and standard deviation over the seeds on the held-out set, by the name of the score; one run has no
            deviation.
        validation: the same on the examples set apart to choose by; empty where the task has none.
        orthogonality: worst error over limit of all; None without orthogonal weights.
        ms_per_step: median; None where no run is finished.
    """

    name: str
    runs: list[str]
    failed: dict[str, str]
    scores: dict[str, tuple[float, float | None]]
    validation: dict[str, tuple[float, float | None]]
    orthogonality: float | None
    ms_per_step: float | None


def cells(runs: list[Run], summaries: Mapping[str, Summary], failed: Mapping[str, str]) -> list[Cell]:
    """Returns the table of a sweep, in the order of its runs.

    Args:
        runs: all runs.
        summaries: name to summary of those that are finished.
        failed: name to sentence of those that failed.
    """
    varied = [key for key in runs[0].chosen if len({json.dumps(run.chosen[key]) for run in runs}) > 1] if runs else []
    groups: dict[str, list[str]] = {}
    for run in runs:
        apart = {key: run.chosen[key] for key in varied if key != SEED}
        groups.setdefault(_name(apart) or run.model, []).append(run.name)
    return [_cell(name, names, summaries, failed) for name, names in groups.items()]


def _cell(name: str, names: list[str], summaries: Mapping[str, Summary], failed: Mapping[str, str]) -> Cell:
    finished = [summaries[run] for run in names if run in summaries]
    ratios = [summary.orthogonality for summary in finished if summary.orthogonality is not None]
    return Cell(
        name,
        [run for run in names if run in summaries],
        {run: failed[run] for run in names if run in failed},
        _spreads([summary.test for summary in finished]),
        _spreads([summary.validation for summary in finished]),
        max(ratios, default=None),
        statistics.median(summary.ms_per_step for summary in finished) if finished else None,
    )


def _spreads(scores: list[dict[str, float]]) -> dict[str, tuple[float, float | None]]:
    """Mean and standard deviation of each score."""
    columns = {key: [score[key] for score in scores] for key in (scores[0] if scores else ())}
    return {
        key: (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
        for key, values in columns.items()
    }


def _run(fixed: Mapping[str, Any], chosen: dict[str, Any]) -> Run:
    asked = _flat(fixed) | chosen
    task, model = asked.pop("task", None), asked.pop("model", None)
    if not isinstance(task, str) or not isinstance(model, str):
        raise OptionError(f'{WHO} needs task = "..." and model = "..." in its file, got {task!r} and {model!r}.')
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
            raise OptionError(f"{WHO} of {task} knows no option {key!r}{did_you_mean(key, known)}")
    return Run(_name(chosen) or model, chosen, task, task_options, model, Settings(**settings))


def _word(value: Any) -> str:
    """The word of a value on the command line; an optimizer with its options is one word, "rmsprop lr=0.001"."""
    if isinstance(value, Mapping):
        return " ".join([value["optimizer"], *(f"{k}={_word(v)}" for k, v in value.items() if k != "optimizer")])
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of tables under names with a dot, and underscores for dashes."""
    flat = {}
    for key, value in _underscored(options).items():
        flat |= {f"{key}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _underscored(value: Any) -> Any:
    """Tables with underscores for dashes in their keys, however deep they lie."""
    if isinstance(value, list):
        return [_underscored(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {key.replace("-", "_"): _underscored(item) for key, item in value.items()}


def _name(chosen: Mapping[str, Any]) -> str:
    """A folder's name for a combination: readable, and cut with a digest where it would be too long."""
    words = ",".join(f"{key}={value}" for key, value in chosen.items()).replace("/", "_")
    if len(words) <= LONGEST_NAME:
        return words
    return f"{words[:LONGEST_NAME]}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"
