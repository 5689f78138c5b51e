"""The training loop, of one model or of several: logs, evaluates, saves, stops cleanly and resumes exactly."""

import contextlib
import dataclasses
import functools
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from stiefelkit.checks import usable_device
from stiefelkit.errors import DivergedError, NonFiniteError, OptionError, RunError, StiefelkitError, needs
from stiefelkit.figure import Figures
from stiefelkit.files import MALFORMED, importing, reachable, refuse_links, write_json
from stiefelkit.machine import threads
from stiefelkit.models import count_parameters
from stiefelkit.training import checkpoint, data
from stiefelkit.training.config import Config, check_coordinates
from stiefelkit.training.display import Screen, Terminal
from stiefelkit.training.plot import plot
from stiefelkit.training.recipes import Settings
from stiefelkit.training.run_folder import RunFolder, State, Summary, is_run, summarise, versions
from stiefelkit.training.session import Session, Window
from stiefelkit.training.tasks import Task

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@dataclasses.dataclass(frozen=True)
class RunOutcome:
    """The end of `train` or `resume`: the steps done, the signal that stopped it early, nothing left to do."""

    path: Path
    step: int
    signal: int | None = None
    already: bool = False


@contextlib.contextmanager
def _noted() -> Iterator[list[int]]:
    """Gives a list that gets the first SIGINT, SIGTERM or SIGHUP, unless ignored; a second one acts at once."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    heeded = [number for number in SIGNALS if is_main and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(config: Config, out: Path, display: Terminal | None = None) -> RunOutcome:
    """Trains a new model into the new or empty folder `out`.

    All that can be refused is refused before the folder appears. Raises DivergedError if the loss, a gradient or a
    weight became NaN or infinite; the last checkpoint is kept.
    """
    RunFolder.refuse_existing(out)
    with threads(config.threads), data.on(config.device):
        session, digest = _started(config)
        folder = RunFolder.create(out, config, count_parameters(session.model), digest)
        with folder.claimed():
            return _run(session, folder, None, display or Terminal(Screen(quiet=True)))


def resume(out: Path, asked: Mapping[str, Any] | Config | None = None, display: Terminal | None = None) -> RunOutcome:
    """Continues a run from its last whole checkpoint, to the same bits that an uninterrupted run gives.

    A run that died before its first checkpoint starts again. `asked` are fields of `Config` that the user named, or a
    config, all of it: as the run was started with.
    """
    display, who, folder = display or Terminal(Screen(quiet=True)), f"Resuming run {out}", RunFolder.open(out)
    with folder.claimed():
        config = folder.config.continued(asked or {}, str(out))
        step, state, notes = folder.latest()
        needs(step <= config.steps, RunError, who, f"--steps {step} or more", config.steps)
        if step == config.steps:
            return RunOutcome(out, step, already=True)
        usable_device(who, config.device, "resume it where there is one")
        now = versions(config.device)
        for name, old in folder.versions.items():
            if now.get(name) != old:
                notes.append(f"Run {out} began with {name} {old}, now it is {now.get(name)}: bits may differ.")
        for note in notes:
            display.note(note)
        with threads(config.threads), data.on(config.device):
            session, _ = _started(config, folder)
            if state is not None:
                with importing(who, folder.checkpoint(step), RunError):
                    session.restore(step, state)
            if config != folder.config:
                folder = dataclasses.replace(folder, config=config)
                folder.write()
            return _run(session, folder, state, display)


def _started(config: Config, folder: RunFolder | None = None) -> tuple[Session, str | None]:
    """Returns the session at step 0 and the digest of its data, once they can be read and held."""
    task = config.build_task()
    digest = task.data_digest()
    if folder is not None:
        folder.check_data(digest)
    session = Session.start(config)
    with config.within_memory():
        task.held_out()
        task.validation()
        task.batch(0, config.batch_size, config.seed)
    return session, digest


def _run(session: Session, folder: RunFolder, state: State | None, display: Terminal) -> RunOutcome:
    config, begun = session.config, session.step
    saved = begun
    writing = functools.partial(
        reachable, "A run", folder.path, "written", "; mend that, then continue it with --resume"
    )
    with _noted() as noted, config.within_memory():
        folder.cut_log(state["log"]["bytes"] if state else 0)

        def save() -> int:
            state = session.state()
            with writing():
                # the lines reach the disk before the checkpoint that counts them
                around = {"config": folder.record(), "log": folder.sync_log()}
                checkpoint.save(folder.checkpoints, session.step, state | around)
            return session.step

        display.begin(f"{config.task} {config.model}", session.step, config.steps)
        try:
            if session.step == 0:
                saved = save()
            while session.step < config.steps and not noted:
                session.advance()
                display.stepped(session.step, session.window.loss / session.window.steps)
                for record in _records(session):
                    with writing():
                        folder.append(record)
                    display.record(record)
                if _due(session, config.checkpoint_every):
                    saved = save()
            if saved != session.step:
                saved = save()
        except NonFiniteError as error:
            is_told = isinstance(error, DivergedError)
            found = error.found if is_told else f"a number is not finite at step {session.step}"
            raise DivergedError(f"{error}; the checkpoint of step {saved} is kept in {folder.path}.", found) from error
        except MALFORMED as error:
            if state is None or session.step > begun or isinstance(error, StiefelkitError):
                raise
            with importing("Resuming", folder.checkpoint(begun), RunError):  # of the state of an optimizer
                raise
        finally:
            display.end()
    return RunOutcome(folder.path, session.step, noted[0] if noted and session.step < config.steps else None)


def _records(session: Session) -> Iterator[dict[str, Any]]:
    is_due = _due(session, session.config.log_every)
    if is_due or session.step == 1:  # the first step tells at once what a step costs, and that the loss is finite
        yield session.train_record()
    if is_due:
        session.window = Window()
    yield from session.epoch_records()
    if _due(session, session.config.eval_every):
        yield from session.test_records()


def _due(session: Session, every: int) -> bool:
    return session.step % every == 0 or session.step == session.config.steps


def compare(
    task: Task,
    models: Sequence[str],
    out: Path,
    settings: Settings,
    display: Terminal,
    figures: Figures,
    resuming: bool,
) -> tuple[list[Summary], list[Path], int | None]:
    """Trains each model in a folder of its own under `out`, then draws their curves there.

    Returns the figures of each run, and the plots; or nothing, and the signal that stopped it. A learning rate of a
    coordinate is for the models that have it. Where `resuming`, finished runs are kept, others continued as they began,
    and missing ones begun.
    """
    who, listed = "A comparison", ", ".join(models)
    needs(0 < len(models) == len(set(models)), OptionError, who, "one or more different models", listed or "none")
    with reachable(who, out):
        if out.exists() and (not out.is_dir() or is_run(out)):
            raise RunError(f"{who} needs a folder of its own, got {out}; choose another --out.")
        is_new = resuming or not out.exists() or not any(out.iterdir())
        needs(is_new, RunError, who, "a new or empty folder", f"{out}; add --resume to continue what is there")
    for model in models:
        with reachable(who, out / model):
            refuse_links(out / model, out)
    configs = [Config.resolve(task, model, settings, strict=False) for model in models]
    check_coordinates(configs, settings)
    for config in configs:  # a bad option of the last model must not be found out after hours
        config.build_optimizer(config.build_model())
    for config in configs:
        path = out / config.model
        if is_run(path):
            outcome = resume(path, config, display)
            if outcome.already:
                display.note(f"{config.model} is finished at step {outcome.step}.")
        else:
            outcome = train(config, path, display)
        if outcome.signal is not None:
            return [], [], outcome.signal
    paths = [out / model for model in models]
    summaries = [summarise(path) for path in paths]
    write_json(out / "summary.json", [dataclasses.asdict(summary) for summary in summaries])
    return summaries, plot(paths, out, figures), None
