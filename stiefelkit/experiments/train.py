"""The training loop: logs, evaluates, saves, stops cleanly and resumes exactly."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stiefelkit.errors import NonFiniteError, RunError
from stiefelkit.experiments import checkpoint
from stiefelkit.experiments.config import Config
from stiefelkit.experiments.display import Silent
from stiefelkit.experiments.interruption import Interruption
from stiefelkit.experiments.log import Log
from stiefelkit.experiments.run_folder import RunFolder, versions
from stiefelkit.experiments.session import Session
from stiefelkit.experiments.threads import threads

__all__ = ["Outcome", "resume", "train"]


@dataclass(frozen=True)
class Outcome:
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


def train(config: Config, out: Path, display: Silent | None = None) -> Outcome:
    """Trains a new model.

    Everything that can be refused is refused before the folder appears.

    Args:
        config: what to do.
        out: the folder of the run, which must be new or empty.
        display: what to show; nothing if left out.

    Raises:
        RunError: the folder holds something.
        NonFiniteError: the loss, a gradient or a weight became NaN or infinite; the last checkpoint is kept.
    """
    RunFolder.refuse_existing(out)
    with threads(config.threads):
        session = Session.start(config)
        session.task.held_out()  # a data set that cannot be read is noticed now
        folder = RunFolder.create(out, config, session.parameters)
        with folder.claimed():
            return _run(session, folder, Log(folder.log), display or Silent())


def resume(out: Path, asked: Mapping[str, Any] | None = None, display: Silent | None = None) -> Outcome:
    """Continues a run from its last whole checkpoint, to the same bits that an uninterrupted run gives.

    Args:
        out: the folder of the run.
        asked: fields of `Config` that the user named; they must be what the run was started with.
        display: what to show; nothing if left out.

    Raises:
        RunError: there is no such run, it was started with other settings, or no checkpoint is whole.
        NonFiniteError: as in `train`.
    """
    display = display or Silent()
    folder = RunFolder.open(out)
    with folder.claimed():
        config = folder.config.continued(asked or {}, str(out))
        found = checkpoint.latest(folder.checkpoints)
        if found is None and folder.log.exists() and folder.log.stat().st_size:
            raise RunError(f"Resuming run {out} needs a checkpoint, got none; start another run with another --out.")
        with threads(config.threads):
            session, bytes_kept = Session.start(config), 0
            if found:
                step, state, notes = found
                if step > config.steps:
                    raise RunError(f"Run {out} is at step {step}: resuming needs --steps {step} or more.")
                if step == config.steps:
                    return Outcome(out, step, already=True)
                for note in [*notes, *_changes(folder)]:
                    display.note(note)
                try:
                    session.restore(step, state)
                    bytes_kept = int(state["log_bytes"])
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise RunError(
                        f"Resuming run {out} needs a whole checkpoint, got one without its parts."
                    ) from error
            log = Log(folder.log, bytes_kept)
            return _run(session, folder.with_config(config), log, display)


def _changes(folder: RunFolder) -> list[str]:
    now = versions()
    return [
        f"Run {folder.path} began with {name} {before}, now it is {now.get(name)}: the last bits may differ."
        for name, before in folder.versions.items()
        if before != now.get(name)
    ]


def _run(session: Session, folder: RunFolder, log: Log, display: Silent) -> Outcome:
    config, saved = session.config, session.step

    def save() -> int:
        state = session.state()
        with _writing(folder):
            # the lines reach the disk before the checkpoint that counts them
            checkpoint.save(folder.checkpoints, session.step, state | {"log_bytes": log.sync()})
        return session.step

    def write(record: dict[str, Any]) -> None:
        with _writing(folder):
            log.write(record)
        display.record(record)

    def due(every: int) -> bool:
        return session.step % every == 0 or session.step == config.steps

    with contextlib.closing(log), Interruption() as interruption:
        display.begin(f"{config.task} {config.model}", session.step, config.steps)
        try:
            if session.step == 0:
                saved = save()
            while session.step < config.steps and interruption.signal is None:
                session.advance()
                display.stepped(session.step, session.window.loss / session.window.steps)
                if due(config.log_every):
                    write(session.train_record())
                if due(config.eval_every):
                    write(session.test_record())
                if due(config.checkpoint_every):
                    saved = save()
            if saved != session.step:
                saved = save()
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}; the checkpoint of step {saved} is kept in {folder.path}.") from error
        finally:
            display.end()
    return Outcome(folder.path, session.step, interruption.signal if session.step < config.steps else None)


@contextlib.contextmanager
def _writing(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"Run {folder.path} cannot be written: {error.strerror}; its last checkpoint is kept for --resume."
        ) from error
