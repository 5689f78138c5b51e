"""The training loop: logs, evaluates, saves, stops cleanly and resumes exactly."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stiefelkit.checks import usable_device
from stiefelkit.errors import DivergedError, NonFiniteError, RunError
from stiefelkit.machine import threads
from stiefelkit.models import count_parameters
from stiefelkit.training import checkpoint, data
from stiefelkit.training.config import Config
from stiefelkit.training.display import Curves, Silent, require_tensorboard
from stiefelkit.training.ranks import Interruption, Ranks
from stiefelkit.training.run_folder import Log, RunFolder, content_of, read_log, versions
from stiefelkit.training.session import Session, Window


@dataclass(frozen=True)
class RunOutcome:
    """The end of `train` or `resume`: the steps done, the signal that stopped it early, nothing left to do."""

    path: Path
    step: int
    signal: int | None = None
    already: bool = False


def train(
    config: Config, out: Path, display: Silent | None = None, *, tensorboard: bool = False, ranks: Ranks | None = None
) -> RunOutcome:
    """Trains a new model into the new or empty folder `out`, by ranks each of which calls this.

    All that can be refused is refused before the folder appears. Raises DivergedError if the loss, a gradient or a
    weight became NaN or infinite; the last checkpoint is kept.
    """
    ranks = ranks or Ranks()
    ranks.first(lambda: RunFolder.refuse_existing(out))
    with threads(config.threads), data.on(config.device), contextlib.ExitStack() as held:
        with ranks.together():
            session = _started(config, tensorboard, ranks)
            digest = session.task.data_digest()
        ranks.same("data", digest)

        def created() -> RunFolder:
            folder = RunFolder.create(out, config, count_parameters(session.model), digest)
            held.enter_context(folder.claimed())
            return folder

        return _run(session, ranks.first(created), 0, display or Silent(), tensorboard)


def resume(
    out: Path,
    asked: Mapping[str, Any] | Config | None = None,
    display: Silent | None = None,
    *,
    tensorboard: bool = False,
    ranks: Ranks | None = None,
) -> RunOutcome:
    """Continues a run from its last whole checkpoint, to the same bits that an uninterrupted run gives.

    A run that died before its first checkpoint starts again. `asked` are fields of `Config` that the user named, or a
    config, all of it: as the run was started with. Another number of ranks changes the last bits.
    """
    display, ranks = display or Silent(), ranks or Ranks()
    with contextlib.ExitStack() as held:

        def opened() -> tuple[RunFolder, Config, tuple[int, dict[str, Any]] | None]:
            folder = RunFolder.open(out)
            held.enter_context(folder.claimed())
            config = folder.config.continued(asked or {}, str(out))
            last = _latest(folder)
            if last is None:
                return folder, config, None
            step, state, notes = last
            folder.check(state, step)
            if step > config.steps:
                raise RunError(f"Run {out} is at step {step}: resuming needs --steps {step} or more.")
            if step == config.steps:
                return folder, config, (step, state)
            usable_device(f"Resuming run {out}", config.device, "resume it where there is one")
            now = versions(config.device)
            for name, old in folder.versions.items():
                if old != (new := now.get(name)):
                    notes.append(f"Run {out} began with {name} {old}, now it is {new}: the last bits may differ.")
            for note in notes:
                display.note(note)
            return folder, config, (step, state)

        folder, config, last = ranks.first(opened)
        if last is not None and last[0] == config.steps:
            return RunOutcome(out, config.steps, already=True)
        with threads(config.threads), data.on(config.device):
            with ranks.together():
                folder.check_data(config.build_task().data_digest())
                session, kept = _started(config, tensorboard, ranks), 0
                if last is not None:
                    step, state = last
                    session.restore(step, state)
                    kept = state["log"]["bytes"]
            ranks.same("data", session.task.data_digest())
            folder = ranks.first(lambda: folder.with_config(config))
            return _run(session, folder, kept, display, tensorboard)


def _started(config: Config, tensorboard: bool, ranks: Ranks) -> Session:
    """Returns the session at step 0, once data can be read and held."""
    if tensorboard:
        require_tensorboard()
    ranks.check(config)
    session = Session.start(config, ranks)
    with config.within_memory():
        session.task.held_out()
        session.task.validation()
        session.task.batch(0, config.batch_size, config.seed)
    return session


def _latest(folder: RunFolder) -> tuple[int, dict[str, Any], list[str]] | None:
    """Returns the last whole checkpoint, or None if the run died before it had one and nothing would be lost."""
    begun = content_of(folder.log).count(b"\n")
    if not folder.checkpoints.is_dir() and os.path.lexists(folder.checkpoints):
        raise RunError(f"Resuming run {folder.path} needs a folder of checkpoints, got another thing of that name.")
    latest = checkpoint.latest(folder.checkpoints)
    if latest is None and begun:
        raise RunError(
            f"Resuming run {folder.path} needs a checkpoint, got none but {begun} lines in its log; "
            f"put the checkpoints back, or remove {folder.log} to start again at step 0."
        )
    return latest


def _run(session: Session, folder: RunFolder, kept: int, display: Silent, tensorboard: bool) -> RunOutcome:
    config, ranks, saved = session.config, session.ranks, session.step
    with Interruption() as ranks.interruption, ranks.together(), contextlib.ExitStack() as held:
        log = held.enter_context(contextlib.closing(Log(folder.log, kept))) if ranks.is_first else None
        curves = None
        if log and tensorboard:
            before = read_log(folder.log, session.task.scores) if session.step else ()
            with _writing(folder):
                curves = Curves(folder.path, before)
            held.enter_context(contextlib.closing(curves.writer))
        held.enter_context(config.within_memory())

        def save() -> int:
            if log is not None:
                state = session.state()
                with _writing(folder):
                    # the lines reach the disk before the checkpoint that counts them
                    around = {"config": folder.record(), "log": log.sync()}
                    if curves:
                        curves.writer.flush()
                    checkpoint.save(folder.checkpoints, session.step, state | around)
            return session.step

        def note() -> None:
            if log is None:
                return
            for record in _records(session):
                with _writing(folder):
                    log.write(record)
                    if curves:
                        curves.write(record)
                display.record(record)

        display.begin(f"{config.task} {config.model}", session.step, config.steps)
        try:
            if session.step == 0:
                saved = save()
            while session.step < config.steps and ranks.signal is None:
                session.advance()
                display.stepped(session.step, session.window.loss / session.window.steps)
                note()
                if _due(session, config.checkpoint_every):
                    saved = save()
            if saved != session.step:
                saved = save()
        except NonFiniteError as error:
            is_told = isinstance(error, DivergedError)
            found = error.found if is_told else f"a number is not finite at step {session.step}"
            raise DivergedError(f"{error}; the checkpoint of step {saved} is kept in {folder.path}.", found) from error
        finally:
            display.end()
    return RunOutcome(folder.path, session.step, ranks.signal if session.step < config.steps else None)


def _records(session: Session) -> Iterator[dict[str, Any]]:
    is_due = _due(session, session.config.log_every)
    if is_due or session.step == 1:  # the first step tells at once what a step costs, and that the loss is finite
        yield session.train_record()
    if is_due:
        session.window = Window()
    if session.ends_epoch:
        yield session.epoch_record()
    if _due(session, session.config.eval_every):
        yield from session.test_records()


def _due(session: Session, every: int) -> bool:
    return session.step % every == 0 or session.step == session.config.steps


@contextlib.contextmanager
def _writing(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"Run {folder.path} cannot be written: {error.strerror}; mend that, then continue it with --resume."
        ) from error
