"""An experiment of a paper, run again: trained, resumed, and compared with the figure that the paper has."""

import dataclasses
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError
from stiefelkit.training import checkpoint
from stiefelkit.training.board import Board
from stiefelkit.training.display import Silent
from stiefelkit.training.files import parse_json, read_file, write_json
from stiefelkit.training.memory import processor
from stiefelkit.training.papers import Reproduction, Row
from stiefelkit.training.run_folder import CHECKPOINTS, PROCESSOR, RunFolder, by_kind, is_run
from stiefelkit.training.train import RunOutcome, resume, train

__all__ = ["DIVERGED", "Finding", "Score", "finding", "last_step", "made_by", "note", "opened", "reproduce"]

MADE = "reproduced.json"
DIVERGED = "diverged"


@dataclass(frozen=True)
class Score:
    """An evaluation that stands for a run: the task's headline on the held-out set, and the steps done then."""

    test: float
    step: int


@dataclass(frozen=True)
class Finding:
    """What came of a run: the evaluation that is best on the held-out set, that on examples set apart, and the last."""

    best_test: Score
    best_validation: Score | None
    last: Score
    epochs: float
    records: dict[str, list[dict[str, Any]]] = field(repr=False)


def reproduce(
    row: Row,
    out: Path,
    plan: Reproduction | None = None,
    display: Silent | None = None,
    board: Board | None = None,
) -> RunOutcome:
    """Trains as a row of a paper's table says, or goes on where a run of it stopped.

    What the plan leaves open is as in the paper, or as the run began.

    Raises:
        RunError: the folder holds another run, or something else.
        DataError: the data are missing or damaged.
        DivergedError: as in `train`.
    """
    named = (plan or Reproduction()).settings(row)
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
    return max(map(checkpoint.step_of, checkpoint.checkpoints(out / CHECKPOINTS)), default=-1)


def opened(path: Path, row: Row) -> RunFolder:
    """Returns the folder of a run of an experiment.

    Raises:
        RunError: there is none, or it differs from the experiment in more than seed, length, threads and device.
    """
    folder = RunFolder.open(path)
    free = {name: getattr(folder.config, name) for name in ("seed", "steps", "threads", "device")}
    begun, wanted = (vars(config) for config in (folder.config, dataclasses.replace(row.config(), **free)))
    for name, value in wanted.items():
        if begun[name] != value:
            raise RunError(
                f"A run of {row.name} needs {name} = {value!r}, got {begun[name]!r} in {path}; move it out of the "
                f"folder of the experiments."
            )
    return folder


def finding(path: Path) -> Finding:
    """Returns what came of a run; raises RunError if it is missing, damaged or has not been evaluated yet."""
    folder = RunFolder.open(path)
    task, records = folder.config.build_task(), by_kind(folder)
    sign = 1 if task.headline == "accuracy" else -1
    scores = {
        kind: {line["step"]: line[task.headline] for line in lines}
        for kind, lines in records.items()
        if kind in ("test", "validation")
    }
    test, validation = scores.get("test"), scores.get("validation", {})
    if not test:
        raise RunError(f"Run {path} needs an evaluation in its log, got none yet; continue it.")
    best = max(test, key=lambda step: sign * test[step])
    chosen = max(validation, key=lambda step: sign * validation[step], default=None)
    last = max(test)
    return Finding(
        best_test=Score(test[best], best),
        best_validation=None if chosen is None else Score(test[chosen], chosen),
        last=Score(test[last], last),
        epochs=last / task.batches_per_epoch(folder.config.batch_size),
        records=records,
    )


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
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
