"""Runs of a sweep, several processes at a time."""

import contextlib
import json
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from stiefelkit.errors import OptionError, RunError, StiefelkitError
from stiefelkit.training import checkpoint, data
from stiefelkit.training.config import Config
from stiefelkit.training.display import Silent
from stiefelkit.training.files import reachable, refuse_links, write_atomically
from stiefelkit.training.interruption import Interruption
from stiefelkit.training.run_folder import CHECKPOINTS, RunFolder, is_run
from stiefelkit.training.summary import Summary, summarise
from stiefelkit.training.sweep import Cell, Run, cells
from stiefelkit.training.train import resume, train

__all__ = ["SweepOutcome", "checked", "run_sweep"]

SUMMARY = "sweep.json"


@dataclass(frozen=True)
class SweepOutcome:
    """What a call of `run_sweep` found.

    Args:
        cells: the table, of what is finished.
        signal: number of the signal that stopped it early, or None.
    """

    cells: list[Cell]
    signal: int | None = None


def run_sweep(
    runs: list[Run], out: Path, *, jobs: int = 1, resuming: bool = False, display: Silent | None = None
) -> SweepOutcome:
    """Runs what is not finished, `jobs` at a time, and writes sweep.json into the folder after each.

    Every run, and the data, are checked before the first begins. One that fails is noted, and the others go on. The
    first SIGINT or SIGTERM has the runs at work save and stop.

    Args:
        runs: of `Sweep.runs`.
        out: folder with one run each; new or empty unless `resuming`.
        jobs: processes.
        resuming: keep finished runs, continue the others, begin those that are missing.
        display: what to show: a sentence for each run.

    Raises:
        RunError: `out` holds something and `resuming` is False, or a run in it has other settings.
        OptionError: a run has an option that is unknown or out of range.
        UnknownNameError: a run has a model, optimizer or coordinate that is unknown.
        DataError: the data are missing or damaged.
    """
    display = display or Silent()
    with reachable("A sweep", out):
        if out.exists() and (not out.is_dir() or is_run(out) or (not resuming and any(out.iterdir()))):
            raise RunError(f"A sweep needs a new or empty folder, got {out}; add --resume to continue what is there.")
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise OptionError("A sweep needs runs with different names, got two of one name.")
    configs = checked(runs)
    for config in {json.dumps([config.task, config.task_options]): config for config in configs.values()}.values():
        with config.within_memory():
            config.build_task().held_out()
    for name, config in configs.items():
        with reachable("A sweep", out / name):
            refuse_links(out / name, out)
        _check_begun(config, out / name)
    with reachable("A sweep", out):
        out.mkdir(parents=True, exist_ok=True)
    summaries: dict[str, Summary] = {}
    failed: dict[str, str] = {}
    with Interruption() as interruption:
        # What is finished comes first: a stop leaves it in the table.
        order = sorted(configs, key=lambda name: not _is_finished(configs[name], out / name))
        for name, sentence in _outcomes({name: configs[name] for name in order}, out, jobs, interruption):
            if sentence is None:
                try:
                    summaries[name] = summarise(out / name)
                except StiefelkitError as error:
                    sentence = str(error)
            if sentence is not None and interruption.signal is None:
                failed[name] = sentence
            table = cells(runs, summaries, failed)
            write_atomically(out / SUMMARY, (json.dumps([asdict(cell) for cell in table], indent=2) + "\n").encode())
            if interruption.signal is None:
                done = f"{len(summaries) + len(failed)}/{len(runs)}"
                display.note(f"{done}  {name}: {sentence or _scores(summaries[name])}")
    return SweepOutcome(cells(runs, summaries, failed), interruption.signal)


def checked(runs: list[Run]) -> dict[str, Config]:
    """Returns the config of each run by its name.

    Raises:
        OptionError: a run has an option that is unknown or out of range.
        UnknownNameError: a run has a model, optimizer or coordinate that is unknown.
        DataError: the size of a run's training set is that of data which are missing or damaged.
    """
    configs = {run.name: run.config for run in runs}
    for config in configs.values():
        config.build_task().batches_per_epoch(config.batch_size)
        config.build_optimizer(config.build_model())
    return configs


def _outcomes(
    configs: dict[str, Config], out: Path, jobs: int, interruption: Interruption
) -> Iterator[tuple[str, str | None]]:
    """Yields each run as it ends: its name, and None if it is finished, else why not."""
    context = _context()
    waiting, at_work = list(configs), {}
    told = False
    try:
        while waiting or at_work:
            while waiting and len(at_work) < jobs and interruption.signal is None:
                name = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_train, args=(configs[name], out / name, data.place(), theirs), name=name
                )
                process.start()
                theirs.close()
                at_work[name] = process, ours
            if interruption.signal is not None:
                waiting = []
                if not told:
                    for process, _ in at_work.values():
                        process.terminate()
                told = True
            # A timeout, since a signal wakes nobody who waits without.
            wait([process.sentinel for process, _ in at_work.values()], 0.5)
            for name in [name for name, (process, _) in at_work.items() if not process.is_alive()]:
                process, ours = at_work.pop(name)
                process.join()
                yield name, _answer(ours, process.exitcode)
    finally:
        for process, _ in at_work.values():
            process.kill()


def _check_begun(config: Config, path: Path) -> None:
    """Raises RunError if a run was started with other settings; one that cannot be read fails by itself."""
    try:
        begun = RunFolder.open(path).config if is_run(path) else None
    except RunError:
        return
    if begun is not None:
        begun.continued(config, str(path))


def _answer(ours: Connection, exitcode: int | None) -> str | None:
    """What a process that has ended said; one that was killed says nothing."""
    # A closed pipe has something to read, too: its end.
    with ours, contextlib.suppress(EOFError):
        if ours.poll():
            return ours.recv()
    return f"its process ended with {exitcode}"


def _is_finished(config: Config, path: Path) -> bool:
    """Whether the last checkpoint is that of the last step, as far as names say."""
    saved = checkpoint.checkpoints(path / CHECKPOINTS)
    return bool(saved) and checkpoint.step_of(saved[-1]) >= config.steps


def _context() -> Any:
    """A server that has imported torch and starts each run by a fork of itself, which has no thread yet."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stiefelkit.training.sweep_runs", "stiefelkit.models"])
    return context


def _train(config: Config, path: Path, place: Path | None, answer: Connection) -> None:
    """Trains or resumes one run, and answers None if it is finished, else with a sentence."""
    if hasattr(os, "setsid"):
        os.setsid()  # a Ctrl-C on the terminal is the parent's, who passes it on once
    try:
        with data.named(place):
            outcome = resume(path, config) if is_run(path) else train(config, path)
    except StiefelkitError as error:
        return answer.send(str(error))
    answer.send(None if outcome.signal is None else f"stopped at step {outcome.step}")


def _scores(summary: Summary) -> str:
    """The scores to choose by: of validation, where there are any."""
    return ", ".join(f"{key} {value:.4f}" for key, value in (summary.validation or summary.test).items())
