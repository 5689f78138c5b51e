"""The folder of a run: config.json with a digest of what it says, log.jsonl, and checkpoints/."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import platform
import statistics
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from stiefelkit._version import __version__
from stiefelkit.errors import RunError, needs
from stiefelkit.files import open_file, parse_json, reachable, read_file, writable, write_json
from stiefelkit.machine import processor
from stiefelkit.training import checkpoint
from stiefelkit.training.config import Config
from stiefelkit.training.display import worst_ratio

CONFIG, CHECKPOINTS = "config.json", "checkpoints"
DIGEST, PROCESSOR = "sha256", "processor"
FACTS = ("parameters", "versions", "data")
"""What config.json says besides the config."""
LARGEST = 2**24
"""Bytes of a config at most."""
REMEDY = "put it back, or start another run with another --out"
MEASURED = ("ms_per_step", "cpu_seconds", "wall_seconds", "peak_bytes", "peak_device_bytes")
"""Keys of a line that tell of the machine, and may differ where all else is the same."""


def is_run(path: Path) -> bool:
    """Returns whether a path is the folder of a run."""
    with reachable("A run", path):
        return (path / CONFIG).is_file()


def last_step(path: Path) -> int:
    """Returns the step of the last checkpoint of a run, whole or not; -1 where there is none."""
    return max(map(checkpoint.step_of, checkpoint.checkpoints(path / CHECKPOINTS)), default=-1)


def versions(device: str) -> dict[str, str]:
    """Returns the versions, and the processor, on which the last bits of a run on `device` depend."""
    numbers = {"python": platform.python_version(), "stiefelkit": __version__, "torch": torch.__version__}
    return numbers | {PROCESSOR: processor(device)}


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run on the disk: its config, trainable parameters, versions, and the digest of the user's files, if any."""

    path: Path
    config: Config
    parameters: int
    versions: dict[str, str]
    data: str | None = None

    @property
    def log(self) -> Path:
        """The JSONL log."""
        return self.path / "log.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / CHECKPOINTS

    @staticmethod
    def refuse_existing(path: Path) -> None:
        """Raises RunError if there is something at `path` that a new run would overwrite."""
        if is_run(path):
            raise RunError(f"A new run needs a new folder, got {path}, which holds a run; add --resume to continue it.")
        with reachable("A new run", path):
            free = all(child.name.startswith(".") for child in path.iterdir()) if path.is_dir() else not path.exists()
        needs(free, RunError, "A new run", "a new or empty folder; choose another --out", str(path))

    @classmethod
    def create(cls, path: Path, config: Config, parameters: int, data: str | None = None) -> "RunFolder":
        """Makes the folder of a new run, or raises RunError."""
        cls.refuse_existing(path)
        folder = cls(path, config, parameters, versions(config.device), data)
        with writable("A new run", path):
            path.mkdir(parents=True, exist_ok=True)
        try:
            folder._write()
        except RunError:
            with contextlib.suppress(OSError):
                path.rmdir()
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Opens the folder of an existing run; raises RunError if it is missing or its config is not as written."""
        with reachable("Resuming or reading a run", path):
            needs(path.exists(), RunError, "Resuming or reading a run", "its folder", f"{path}, which does not exist")
        try:
            record = parse_json(read_file(path / CONFIG, most=LARGEST))
            if record.pop(DIGEST) != _digest(record):
                raise ValueError("it has changed")
            return cls(path, Config.from_json(record.pop("config"), str(path / CONFIG)), **record)
        except OSError as error:
            raise RunError(f"A run needs {CONFIG} in its folder, got none in {path}: {error.strerror}.") from error
        except RunError:
            raise
        except checkpoint.BROKEN as error:
            raise RunError(f"Run {path} needs {CONFIG} as it was written, got a damaged one; {REMEDY}.") from error

    def with_config(self, config: Config) -> "RunFolder":
        """Returns this folder with another config, written to the disk if it differs."""
        folder = dataclasses.replace(self, config=config)
        if folder != self:
            folder._write()
        return folder

    def record(self) -> dict[str, Any]:
        """Returns what config.json says, as JSON gives it back; a checkpoint holds a copy."""
        facts = {name: vars(self)[name] for name in FACTS if vars(self)[name] is not None}
        return json.loads(json.dumps({"config": dataclasses.asdict(self.config), **facts}))

    def check(self, state: Mapping[str, Any], step: int) -> None:
        """Raises RunError if config.json, but for steps that may be raised, or the log differ from a checkpoint's."""
        written, mark = state["config"], state["log"]
        config = Config.from_json(written["config"], "The checkpoint")
        if self.config.may_be_prolonged:
            config = dataclasses.replace(config, steps=self.config.steps)
        copy = dataclasses.replace(self, config=config, **{name: written.get(name) for name in FACTS})
        if copy.record() != self.record():
            raise RunError(
                f"Run {self.path} needs {CONFIG} as it was written, got another than the checkpoint of step {step} "
                f"has; {REMEDY}."
            )
        content = content_of(self.log, mark["bytes"])[: mark["bytes"]]
        if hashlib.sha256(content).hexdigest() != mark["sha256"]:
            raise RunError(f"Log {self.log} needs the lines that its checkpoint counts, got a change; {REMEDY}.")

    def check_data(self, digest: str | None) -> None:
        """Raises RunError if the user's files are not those that the run was started with, as far as that is known."""
        if self.data not in (None, digest):
            raise RunError(
                f"Run {self.path} needs the data that it was started with (sha256 {self.data[:12]}...), got others "
                f"({(digest or 'none')[:12]}...); name their folder with --data, or start another run."
            )

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Holds the folder for one process, or raises RunError; the system lets go when the process dies, however."""
        try:
            import fcntl
        except ImportError:  # no such lock outside POSIX
            yield
            return
        with writable("A run", self.path):
            file = os.fdopen(open_file(self.path / ".lock", os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(f"Run {self.path} is being trained by another process; wait or stop it.") from error
            yield

    def _write(self) -> None:
        record = self.record()
        write_json(self.path / CONFIG, record | {DIGEST: _digest(record)})


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


class Log:
    """An append-only JSONL file, cut back to the `keep` bytes that a checkpoint counts; RunError if it is shorter."""

    def __init__(self, path: Path, keep: int = 0):
        kept = content_of(path, keep)[:keep]
        self._size, self._sha = len(kept), hashlib.sha256(kept)
        with writable("A log", path):
            # without a buffer: what a full disk refused must not come again when the file is closed
            self._file = os.fdopen(open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab", buffering=0)
            self._file.truncate(keep)

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line, or nothing."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            left = line
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise
        self._size += len(line)
        self._sha.update(line)

    def sync(self) -> dict[str, Any]:
        """Waits until all lines are on the disk, and returns what `RunFolder.check` knows them by."""
        os.fsync(self._file.fileno())
        return {"bytes": self._size, "sha256": self._sha.hexdigest()}

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def content_of(path: Path, least: int = 0) -> bytes:
    """Returns a log of so many bytes or more, else raises RunError; one that is not there is empty."""
    try:
        content = read_file(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not least and not path.is_symlink():
            return b""
        raise RunError(f"Log {path} needs to be a file that can be read, got {error.strerror!r}; {REMEDY}.") from error
    needs(len(content) >= least, RunError, f"Log {path}", f"{least} bytes or more; {REMEDY}", len(content))
    return content


def read_log(path: Path, scores: Collection[str] = ("loss",)) -> list[dict[str, Any]]:
    """Returns the records of a log, whose evaluations hold `scores`, but for a half-written end; or raises RunError."""
    try:
        content = read_file(path)
    except OSError as error:
        raise RunError(f"Run {path.parent} has no readable {path.name}; is it a run folder?") from error
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            record = parse_json(line)
            _check_record(record, scores)
        except checkpoint.BROKEN as error:
            raise RunError(f"Log {path} is damaged at line {number}.") from error
        records.append(record)
    return records


def by_kind(folder: RunFolder) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of the log of a run by their kind: train, test, validation, epoch."""
    records = read_log(folder.log, folder.config.build_task().scores)
    kinds = ("train", "test", "validation", "epoch")
    return {kind: [record for record in records if record["kind"] == kind] for kind in kinds}


def _check_record(record: dict[str, Any], scores: Collection[str]) -> None:
    kinds = {"train": ("loss", "gradient_norm", "ms_per_step"), "epoch": ("epoch", "cpu_seconds", "wall_seconds")}
    kinds |= {"test": scores, "validation": scores}
    numbers = [record["step"], *(record[name] for name in kinds[record["kind"]])]
    if record["kind"] == "train":
        numbers += [weight["error"] / weight["limit"] for weight in record["orthogonality"].values()]
    if type(record["step"]) is not int or not all(map(math.isfinite, numbers)):
        raise ValueError("no number")


@dataclasses.dataclass(frozen=True)
class Summary:
    """Last scores of a run, the median CPU time of a step, and the worst error over limit of the whole log."""

    model: str
    step: int
    test: dict[str, float]
    validation: dict[str, float]
    parameters: int
    ms_per_step: float
    orthogonality: float | None


def summarise(path: Path) -> Summary:
    """Returns the figures of a run; raises RunError if it is missing, damaged or has not been evaluated yet."""
    folder = RunFolder.open(path)
    records, scores = by_kind(folder), folder.config.build_task().scores
    train, test, validation = (records[kind] for kind in ("train", "test", "validation"))
    if not train or not test:
        raise RunError(f"Run {path} needs an evaluation in its log, got none yet; continue it with --resume.")
    ratios = [ratio for record in train if (ratio := worst_ratio(record)) is not None]
    return Summary(
        model=folder.config.model,
        step=test[-1]["step"],
        test={key: test[-1][key] for key in scores},
        validation={key: validation[-1][key] for key in scores} if validation else {},
        parameters=folder.parameters,
        ms_per_step=statistics.median(record["ms_per_step"] for record in train),
        orthogonality=max(ratios, default=None),
    )
