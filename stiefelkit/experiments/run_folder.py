"""The folder of a run: config.json, log.jsonl and checkpoints/, and who may write there."""

import contextlib
import dataclasses
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stiefelkit._version import __version__
from stiefelkit.errors import RunError
from stiefelkit.experiments.config import Config
from stiefelkit.experiments.files import sync_directory, write_atomically, write_synced

__all__ = ["RunFolder", "is_run", "versions"]

CONFIG, LOG, CHECKPOINTS, LOCK = "config.json", "log.jsonl", "checkpoints", ".lock"


def is_run(path: Path) -> bool:
    """Returns whether a path is the folder of a run."""
    return (path / CONFIG).is_file()


def versions() -> dict[str, str]:
    """Returns the versions on which the last bits of a run depend."""
    return {"python": platform.python_version(), "stiefelkit": __version__, "torch": torch.__version__}


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run on the disk.

    Args:
        path: the folder.
        config: what the run was started with.
        parameters: number of trainable parameters of its model.
        versions: versions of Python, torch and stiefelkit that the run was started with.
    """

    path: Path
    config: Config
    parameters: int
    versions: dict[str, str] = dataclasses.field(default_factory=versions)

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
        if path.is_dir() and is_run(path):
            raise RunError(f"A new run needs a new folder, got {path}, which holds a run; add --resume to continue it.")
        if path.exists() and not (path.is_dir() and all(child.name.startswith(".") for child in path.iterdir())):
            raise RunError(f"A new run needs a new or empty folder, got {path}; choose another --out.")

    @classmethod
    def create(cls, path: Path, config: Config, parameters: int) -> "RunFolder":
        """Makes the folder of a new run: it appears at once, with its config.

        Raises:
            RunError: something is there already, or the place cannot be written.
        """
        cls.refuse_existing(path)
        folder = cls(path, config, parameters)
        try:
            if path.exists():
                write_atomically(path / CONFIG, folder._content())
                return folder
            temporary = path.with_name(f".{path.name}.tmp")
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write_synced(temporary / CONFIG, folder._content())
            os.rename(temporary, path)
            sync_directory(path.parent)
        except OSError as error:
            raise RunError(f"A new run needs a place that can be written, got {path}: {error.strerror}.") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Opens the folder of an existing run.

        Raises:
            RunError: the folder is missing or is not the folder of a run.
        """
        if not path.exists():
            raise RunError(f"Resuming or reading a run needs its folder, got {path}, which does not exist.")
        try:
            content = json.loads((path / CONFIG).read_bytes())
        except OSError as error:
            raise RunError(f"A run needs {CONFIG} in its folder, but {path} has none.") from error
        except ValueError as error:
            raise RunError(f"A run needs a whole {CONFIG}, but {path / CONFIG} is damaged.") from error
        try:
            config, parameters, versions = content["config"], content["parameters"], content["versions"]
        except (KeyError, TypeError) as error:
            raise RunError(f"A run needs a whole {CONFIG}, but {path / CONFIG} is damaged.") from error
        return cls(path, Config.from_json(config, str(path / CONFIG)), parameters, versions)

    def with_config(self, config: Config) -> "RunFolder":
        """Returns this folder with another config, written to the disk if it differs."""
        folder = dataclasses.replace(self, config=config)
        if config != self.config:
            write_atomically(self.path / CONFIG, folder._content())
        return folder

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
            file = open(self.path / LOCK, "w")
        except OSError as error:
            raise RunError(f"Run {self.path} cannot be written: {error.strerror}.") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(f"Run {self.path} is being trained by another process; wait or stop it.") from error
            yield

    def _content(self) -> bytes:
        content: dict[str, Any] = {
            "config": dataclasses.asdict(self.config),
            "parameters": self.parameters,
            "versions": self.versions,
        }
        return (json.dumps(content, indent=2) + "\n").encode()
