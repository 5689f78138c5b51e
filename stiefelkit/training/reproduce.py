"""An experiment of a paper, run again: trained, resumed, and compared with the figure that the paper has."""

import dataclasses
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError
from stiefelkit.training import checkpoint
from stiefelkit.training.board import Board
from stiefelkit.training.display import Silent
from stiefelkit.training.files import parse_json, read_file, write_json
from stiefelkit.training.log import read
from stiefelkit.training.papers import Row
from stiefelkit.training.processor import processor
from stiefelkit.training.reproduction import Reproduction
from stiefelkit.training.run_folder import CHECKPOINTS, PROCESSOR, RunFolder, is_run
from stiefelkit.training.train import RunOutcome, resume, train

__all__ = ["DIVERGED", "Finding", "Score", "finding", "last_step", "made_by", "note", "reproduce", "require_settings"]

MADE = "reproduced.json"
DIVERGED = "diverged"


@dataclass(frozen=True)
class Score:
    """An evaluation that stands for a run.

    Args:
        test: on the held-out set, in the task's headline.
        step: optimizer steps done then.
    """

    test: float
    step: int


@dataclass(frozen=True)
class Finding:
    """What came of a run, by both ways to choose an evaluation.

    Args:
        step: of the last evaluation.
        best_test: that which is best on the held-out set itself, as papers report it: too good by the choice.
        best_validation: that which is best on examples set apart to choose by; None where there are none.
        last: the last one.
        epochs: epochs of the training data done.
    """

    step: int
    best_test: Score
    best_validation: Score | None
    last: Score
    epochs: float


def reproduce(
    row: Row,
    out: Path,
    plan: Reproduction | None = None,
    display: Silent | None = None,
    board: Board | None = None,
) -> RunOutcome:
    """Trains as a row of a paper's table says, or goes on where a run of it stopped.

    Args:
        row: the experiment.
        out: the folder of the run.
        plan: how far, and on what; what it leaves open is as in the paper, or as the run began.
        display: what to show; nothing if left out.
        board: where its curves can be watched; nowhere if left out.

    Raises:
        RunError: the folder holds another run, or something else.
        DataError: the data are missing or damaged.
        DivergedError: as in `train`.
    """
    plan = plan or Reproduction()
    named = plan.settings(row)
    config = row.config(named)
    if not is_run(out):
        return train(config, out, display, board=board)
    begun, done = RunFolder.open(out).config, last_step(out)
    if begun.steps != config.steps and not config.may_be_prolonged:
        raise RunError(
            f"Run {out} needs --epochs {begun.steps // row.epoch}, over which its rates fall, got "
            f"{config.steps // row.epoch} epochs; start another run with another --out."
        )
    kept = [name for name in ("seed", "threads", "device") if getattr(named, name) is None]
    asked = dataclasses.replace(config, **{name: getattr(begun, name) for name in kept})
    if done >= config.steps:
        begun.continued(dataclasses.replace(asked, steps=begun.steps), str(out))
        return RunOutcome(out, done, already=True)
    return resume(out, asked, display, board=board)


def last_step(out: Path) -> int:
    """Returns the step of the last checkpoint of a run, whole or not; -1 where there is no run."""
    saved = checkpoint.checkpoints(out / CHECKPOINTS)
    return checkpoint.step_of(saved[-1]) if saved else -1


def require_settings(folder: RunFolder, row: Row) -> None:
    """Raises RunError unless a run has the settings of an experiment: all but seed, length, threads and device."""
    free = {name: getattr(folder.config, name) for name in ("seed", "steps", "threads", "device")}
    begun, wanted = (vars(config) for config in (folder.config, dataclasses.replace(row.config(), **free)))
    for name, value in wanted.items():
        if begun[name] != value:
            raise RunError(
                f"A run of {row.name} needs {name} = {value!r}, got {begun[name]!r} in {folder.path}; "
                f"move it out of the folder of the experiments."
            )


def finding(path: Path) -> Finding:
    """Returns what came of a run.

    Raises:
        RunError: the folder is missing, damaged, or the run has not been evaluated yet.
    """
    folder = RunFolder.open(path)
    task = folder.config.build_task()
    records = read(folder.log, task.scores)
    sign = 1 if task.headline == "accuracy" else -1
    test = {record["step"]: record[task.headline] for record in records if record["kind"] == "test"}
    validation = {record["step"]: record[task.headline] for record in records if record["kind"] == "validation"}
    if not test:
        raise RunError(f"Run {path} needs an evaluation in its log, got none yet; continue it.")
    best = max(test, key=lambda step: sign * test[step])
    chosen = max(validation, key=lambda step: sign * validation[step], default=None)
    last = max(test)
    return Finding(
        step=last,
        best_test=Score(test[best], best),
        best_validation=None if chosen is None else Score(test[chosen], chosen),
        last=Score(test[last], last),
        epochs=last / task.batches_per_epoch(folder.config.batch_size),
    )


def note(path: Path, row: Row, command: str, diverged: str = "") -> None:
    """Writes into the folder of a run by which commands, commits of the package and processors it was made.

    Args:
        path: the run.
        row: the experiment.
        command: that which went on with it.
        diverged: what was not finite, and at which step, where that ended it.
    """
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
    """The commit of the package's source, with a + if it was changed since; empty outside of a checkout."""
    here = Path(__file__).parent
    words = ["git", "-C", str(here), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
