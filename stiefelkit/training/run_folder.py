"""The folder of a run: config.json, log.jsonl and checkpoints/, and who may write there.

config.json carries the digest of what it says, not of its layout. It cannot lie in the checkpoints alone: the steps of
a run may be raised on resuming, and a kill between the two writes must leave both of them right.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from stiefelkit._version import __version__
from stiefelkit.errors import RunError
from stiefelkit.training import checkpoint
from stiefelkit.training.config import Config
from stiefelkit.training.files import (
    open_file,
    parse_json,
    reachable,
    read_file,
    remove,
    sync_directory,
    write_atomically,
    write_synced,
)
from stiefelkit.training.processor import processor

__all__ = ["CHECKPOINTS", "PROCESSOR", "RunFolder", "is_run", "versions"]

CONFIG, LOG, CHECKPOINTS, LOCK = "config.json", "log.jsonl", "checkpoints", ".lock"
DIGEST, DATA, PROCESSOR = "sha256", "data", "processor"
LARGEST = 2**24
"""Bytes of a config at most."""
REMEDY = "put it back, or start another run with another --out"


def is_run(path: Path) -> bool:
    """Returns whether a path is the folder of a run."""
    with reachable("A run", path):
        return (path / CONFIG).is_file()


def versions(device: str) -> dict[str, str]:
    """Returns the versions, and the processor, on which the last bits of a run on `device` depend."""
    return {
        "python": platform.python_version(),
        "stiefelkit": __version__,
        "torch": torch.__version__,
        PROCESSOR: processor(device),
    }


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run on the disk.

    Args:
        path: the folder.
        config: what the run was started with.
        parameters: number of trainable parameters of its model.
        versions: versions of Python, torch and stiefelkit, and the processor, that the run was started with; without a
            processor in runs older than that.
        sealed: config.json holds its digest; False in runs that began before there were digests.
        data: digest of the user's files that it was started with; None without any, or in runs older than that.
    """

    path: Path
    config: Config
    parameters: int
    versions: dict[str, str]
    sealed: bool = True
    data: str | None = None

    @property
    def log(self) -> Path:
        """The JSONL log."""
        return self.path / LOG

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / CHECKPOINTS

    @staticmethod
    def refuse_existing(path: Path) -> None:
        """Raises RunError if there is something at `path` that a new run would overwrite."""
        if is_run(path):
            raise RunError(f"A new run needs a new folder, got {path}, which holds a run; add --resume to continue it.")
        with reachable("A new run", path):
            free = all(child.name.startswith(".") for child in path.iterdir()) if path.is_dir() else not path.exists()
        if not free:
            raise RunError(f"A new run needs a new or empty folder, got {path}; choose another --out.")

    @classmethod
    def create(cls, path: Path, config: Config, parameters: int, data: str | None = None) -> "RunFolder":
        """Makes the folder of a new run: it appears at once, with its config.

        Raises:
            RunError: something is there already, or the place cannot be written.
        """
        cls.refuse_existing(path)
        folder = cls(path, config, parameters, versions(config.device), data=data)
        with reachable("A new run", path):
            if path.exists():
                write_atomically(path / CONFIG, folder._content())
                return folder
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove(temporary)
            temporary.mkdir()
            write_synced(temporary / CONFIG, folder._content())
            os.rename(temporary, path)
            sync_directory(path.parent)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise RunError(f"A new run needs a place that can be written, got {path}: {error.strerror}.") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Opens the folder of an existing run.

        Raises:
            RunError: the folder is missing or is not the folder of a run.
        """
        with reachable("Resuming or reading a run", path):
            if not path.exists():
                raise RunError(f"Resuming or reading a run needs its folder, got {path}, which does not exist.")
        try:
            content = parse_json(read_file(path / CONFIG, most=LARGEST))
            sealed = DIGEST in content
            record = {name: content[name] for name in ("config", "parameters", "versions")}
            record |= {DATA: content[DATA]} if DATA in content else {}
            count = len(record) + sealed
        except OSError as error:
            raise RunError(f"A run needs {CONFIG} in its folder, got none in {path}: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"A run needs a whole {CONFIG}, but {path / CONFIG} is damaged; {REMEDY}.") from error
        if len(content) != count or (sealed and content[DIGEST] != _digest(record)):
            raise RunError(f"Run {path} needs {CONFIG} as it was written, got {_edited(path, record)}; {REMEDY}.")
        config = Config.from_json(record["config"], str(path / CONFIG))
        whole = isinstance(record["versions"], dict) and type(record["parameters"]) is int
        if not whole or not isinstance(record.get(DATA, ""), str):
            raise RunError(f"A run needs a whole {CONFIG}, but {path / CONFIG} is damaged; {REMEDY}.")
        return cls(path, config, record["parameters"], record["versions"], sealed, record.get(DATA))

    def with_config(self, config: Config) -> "RunFolder":
        """Returns this folder with another config, written to the disk if it differs or has no digest."""
        folder = dataclasses.replace(self, config=config, sealed=True)
        if folder != self:
            write_atomically(self.path / CONFIG, folder._content())
        return folder

    def record(self) -> dict[str, Any]:
        """Returns what config.json says, as JSON gives it back; a checkpoint holds a copy."""
        record = {
            "config": dataclasses.asdict(self.config),
            "parameters": self.parameters,
            "versions": self.versions,
            **({} if self.data is None else {DATA: self.data}),
        }
        return json.loads(json.dumps(record))

    def check(self, recorded: Mapping[str, Any], step: int) -> None:
        """Compares config.json with the copy in a checkpoint; more steps are no difference where they may be raised.

        Raises:
            RunError: they differ; the message names the field.
        """
        written = Config.from_json(recorded["config"], "The checkpoint")  # fields that are newer get their defaults
        facts = {name: recorded.get(name) for name in ("parameters", "versions", DATA)}
        copy = dataclasses.replace(self, config=written, **facts)
        changes = _differences(copy.record(), self.record())
        if self.config.may_be_prolonged:
            changes.pop("steps", None)
        if not self.sealed:
            raise RunError(f"Run {self.path} needs {CONFIG} as it was written, got one without {DIGEST}; {REMEDY}.")
        if changes:
            raise RunError(f"Run {self.path} needs {CONFIG} as it was written, got {_first(changes, step)}; {REMEDY}.")

    def check_data(self, digest: str | None) -> None:
        """Raises RunError if the user's files are not those that the run was started with, as far as that is known."""
        if self.data not in (None, digest):
            raise RunError(
                f"Run {self.path} needs the data that it was started with (sha256 {self.data[:12]}...), got others "
                f"({(digest or 'none')[:12]}...); name their folder with --data, or start another run with another "
                f"--out."
            )

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Holds the folder for one process; the system lets go when the process dies, however it dies.

        Raises:
            RunError: another process is training in this folder.
        """
        try:
            import fcntl
        except ImportError:  # no such lock outside POSIX
            yield
            return
        try:
            file = os.fdopen(open_file(self.path / LOCK, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
        except OSError as error:
            raise RunError(f"Run {self.path} cannot be written: {error.strerror}.") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(f"Run {self.path} is being trained by another process; wait or stop it.") from error
            yield

    def _content(self) -> bytes:
        record = self.record()
        return (json.dumps(record | {DIGEST: _digest(record)}, indent=2) + "\n").encode()


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _edited(path: Path, record: dict[str, Any]) -> str:
    """Says which field of an edited config.json is not that of a checkpoint."""
    for saved in reversed(checkpoint.checkpoints(path / CHECKPOINTS)):
        try:
            step, state = checkpoint.load(saved)
        except RunError:
            continue
        if "config" in state:
            changes = _differences(state["config"], record)
            return _first(changes, step) if changes else f"a {DIGEST} that is not of its content"
    return f"content that its {DIGEST} is not of"


def _differences(before: dict[str, Any], now: dict[str, Any], within: str = "") -> dict[str, tuple[Any, Any]]:
    """Maps the name of each field that differs, also in its type, to what it was and what it is."""
    changes = {}
    for name in [*before, *(name for name in now if name not in before)]:
        label = "" if not within and name == "config" else f"{within}{name}"
        old, new = before.get(name, "nothing"), now.get(name, "nothing")
        if isinstance(old, dict) and isinstance(new, dict):
            changes |= _differences(old, new, f"{label}." if label else "")
        elif (name in before) != (name in now) or json.dumps(old, sort_keys=True) != json.dumps(new, sort_keys=True):
            changes[label or name] = (old, new)
    return changes


def _first(changes: dict[str, tuple[Any, Any]], step: int) -> str:
    # steps last: they may differ from those of a checkpoint without an edit
    label, (before, now) = min(changes.items(), key=lambda change: change[0] == "steps")
    return f"{label} = {now!r} where the checkpoint of step {step} has {before!r}"
