"""The training loop: logs, evaluates, saves, stops cleanly and resumes exactly."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stiefelkit.errors import NonFiniteError, RunError
from stiefelkit.training import checkpoint
from stiefelkit.training.config import Config
from stiefelkit.training.display import Silent
from stiefelkit.training.interruption import Interruption
from stiefelkit.training.log import Log, check, lines
from stiefelkit.training.run_folder import RunFolder, versions
from stiefelkit.training.session import Session
from stiefelkit.training.threads import threads

__all__ = ["RunOutcome", "resume", "train"]


@dataclass(frozen=True)
class RunOutcome:
    """How a call of `train` or `resume` ended.

    Args:
        path: the run folder.
        step: optimizer steps done.
        signal: number of the signal that stopped it early, or None.
        already: the run had been finished before, and nothing was done.
    """

    path: Path
    step: int
    signal: int | None = None
    already: bool = False


def train(config: Config, out: Path, display: Silent | None = None) -> RunOutcome:
    """Trains a new model.

    Everything that can be refused is refused before the folder appears.

    Args:
        config: what to do.
        out: the folder of the run, which must be new or empty.
        display: what to show; nothing if left out.

    Raises:
        RunError: the folder holds something.
        DataError: its data are missing or damaged.
        NonFiniteError: the loss, a gradient or a weight became NaN or infinite; the last checkpoint is kept.
    """
    RunFolder.refuse_existing(out)
    with threads(config.threads):
        session = Session.start(config)
        _read_data(session)
        folder = RunFolder.create(out, config, session.parameters)
        with folder.claimed():
            return _run(session, folder, Log(folder.log), display or Silent())


def resume(out: Path, asked: Mapping[str, Any] | None = None, display: Silent | None = None) -> RunOutcome:
    """Continues a run from its last whole checkpoint, to the same bits that an uninterrupted run gives.

    A run that died before its first checkpoint starts again.

    Args:
        out: the folder of the run.
        asked: fields of `Config` that the user named; they must be what the run was started with.
        display: what to show; nothing if left out.

    Raises:
        RunError: there is no such run, it was started with other settings, its config or its log is not what was
            written, or no checkpoint is whole.
        OptionError: it does not fit into memory.
        DataError: its data are missing or damaged.
        NonFiniteError: as in `train`.
    """
    display = display or Silent()
    folder = RunFolder.open(out)
    with folder.claimed():
        config = folder.config.continued(asked or {}, str(out))
        latest = _latest(folder)
        if latest is not None:
            step, state, notes = latest
            notes += _unchanged(folder, step, state)
            if step > config.steps:
                raise RunError(f"Run {out} is at step {step}: resuming needs --steps {step} or more.")
            if step == config.steps:
                return RunOutcome(out, step, already=True)
            for note in [*notes, *_changes(folder)]:
                display.note(note)
        with threads(config.threads):
            session, bytes_kept = Session.start(config), 0
            if latest is not None:
                _, state, _ = latest
                try:
                    session.restore(step, state)
                    bytes_kept = int(state["log"]["bytes"] if "log" in state else state["log_bytes"])
                except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                    raise RunError(
                        f"Resuming run {out} needs a whole checkpoint, got one without its parts."
                    ) from error
            _read_data(session)
            folder = folder.with_config(config)
            return _run(session, folder, Log(folder.log, bytes_kept), display)


def _read_data(session: Session) -> None:
    """Notices now what of the data cannot be read, or held."""
    with session.config.within_memory():
        session.task.held_out()
        session.task.validation()
        session.task.batch(0, session.config.batch_size, session.config.seed)


def _latest(folder: RunFolder) -> tuple[int, dict[str, Any], list[str]] | None:
    """Returns the last whole checkpoint, or None if the run died before it had one and nothing would be lost."""
    begun = lines(folder.log)
    if not folder.checkpoints.is_dir() and os.path.lexists(folder.checkpoints):
        raise RunError(f"Resuming run {folder.path} needs a folder of checkpoints, got another thing of that name.")
    try:
        latest = checkpoint.latest(folder.checkpoints)
    except RunError:
        # the state of step 0 follows from the config
        if begun or any(checkpoint.step_of(path) for path in checkpoint.checkpoints(folder.checkpoints)):
            raise
        return None
    if latest is None and begun:
        raise RunError(
            f"Resuming run {folder.path} needs a checkpoint, got none but {begun} lines in its log; "
            f"put the checkpoints back, or remove {folder.log} to start again at step 0."
        )
    return latest


def _unchanged(folder: RunFolder, step: int, state: Mapping[str, Any]) -> list[str]:
    """Compares config and log with what the checkpoint knows of them, and returns what the user should know."""
    if "log" not in state:
        return [
            f"Run {folder.path} was saved before there were digests: whether it was changed since, nobody can tell."
        ]
    folder.check(state["config"], step)
    check(folder.log, state["log"])
    return []


def _changes(folder: RunFolder) -> list[str]:
    now = versions()
    return [
        f"Run {folder.path} began with {name} {before}, now it is {now.get(name)}: the last bits may differ."
        for name, before in folder.versions.items()
        if before != now.get(name)
    ]


def _run(session: Session, folder: RunFolder, log: Log, display: Silent) -> RunOutcome:
    config, saved = session.config, session.step

    def save() -> int:
        state = session.state()
        with _writing(folder):
            # the lines reach the disk before the checkpoint that counts them
            around = {"config": folder.record(), "log": log.sync()}
            checkpoint.save(folder.checkpoints, session.step, state | around)
        return session.step

    def write(record: dict[str, Any]) -> None:
        with _writing(folder):
            log.write(record)
        display.record(record)

    def due(every: int) -> bool:
        return session.step % every == 0 or session.step == config.steps

    with contextlib.closing(log), config.within_memory(), Interruption() as interruption:
        display.begin(f"{config.task} {config.model}", session.step, config.steps)
        try:
            if session.step == 0:
                saved = save()
            while session.step < config.steps and interruption.signal is None:
                session.advance()
                display.stepped(session.step, session.window.loss / session.window.steps)
                if due(config.log_every):
                    write(session.train_record())
                if session.ends_epoch:
                    write(session.epoch_record())
                if due(config.eval_every):
                    for record in session.test_records():
                        write(record)
                if due(config.checkpoint_every):
                    saved = save()
            if saved != session.step:
                saved = save()
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}; the checkpoint of step {saved} is kept in {folder.path}.") from error
        finally:
            display.end()
    return RunOutcome(folder.path, session.step, interruption.signal if session.step < config.steps else None)


@contextlib.contextmanager
def _writing(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"Run {folder.path} cannot be written: {error.strerror}; mend that, then continue it with --resume."
        ) from error
