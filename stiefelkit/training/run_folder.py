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
from typing import IO, Any

import torch

from stiefelkit._version import __version__
from stiefelkit.errors import RunError, needs
from stiefelkit.files import importing, open_file, parse_json, reachable, read_file, read_json, writable, write_json
from stiefelkit.machine import processor
from stiefelkit.numbers import integer
from stiefelkit.training import checkpoint
from stiefelkit.training.config import Config

CONFIG, LOG, CHECKPOINTS = "config.json", "log.jsonl", "checkpoints"
DIGEST, PROCESSOR = "sha256", "processor"
REMEDY = "put it back, or start another run with another --out"
State = dict[str, Any]  # entries of a checkpoint
MEASURED = ("ms_per_step", "cpu_seconds", "peak_bytes", "peak_device_bytes")
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
        return self.path / LOG

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / CHECKPOINTS

    def checkpoint(self, step: int) -> Path:
        """The place of the checkpoint of a step."""
        return checkpoint.place_of(self.checkpoints, step)

    @staticmethod
    def refuse_existing(path: Path) -> None:
        """Raises RunError if there is something at `path` that a new run would overwrite."""
        got = f"{path}, which holds a run; add --resume to continue it"
        needs(not is_run(path), RunError, "A new run", "a new folder", got)
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
        folder.write()
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Opens the folder of an existing run; raises RunError if it is missing or its config is not as written."""
        with reachable("Resuming or reading a run", path):
            needs(path.exists(), RunError, "Resuming or reading a run", "its folder", f"{path}, which does not exist")
        with importing("A run", path / CONFIG, RunError):
            record = read_json(path / CONFIG)
            if record.pop(DIGEST) != _digest(record):
                raise ValueError(f"it has changed; {REMEDY}")
            return cls.of_record(path, record)

    @classmethod
    def of_record(cls, path: Path, record: Mapping[str, Any]) -> "RunFolder":
        """Returns the run at a path that `record` has described; raises errors of any kind if it does not."""
        return cls(path, **{**record, "config": Config(**record["config"])})

    def record(self) -> dict[str, Any]:
        """Returns what config.json says, as JSON gives it back; a checkpoint holds a copy."""
        facts = {name: fact for name, fact in dataclasses.asdict(self).items() if name != "path" and fact is not None}
        return json.loads(json.dumps(facts))

    def write(self) -> None:
        """Writes config.json."""
        record = self.record()
        write_json(self.path / CONFIG, record | {DIGEST: _digest(record)})

    def latest(self) -> tuple[int, State | None, list[str]]:
        """Returns step and state of the last whole checkpoint of this run, and a sentence for each damaged one.

        There is none if the run died before its first one, and nothing would be lost. Raises RunError if there is none
        otherwise, or if config.json, but for steps that may be raised, or the log differ from the checkpoint's.
        """
        is_folder = self.checkpoints.is_dir() or not os.path.lexists(self.checkpoints)
        needs(is_folder, RunError, f"Run {self.path}", "a folder of checkpoints", "another thing of that name")
        latest, content = checkpoint.latest(self.checkpoints), content_of(self.log)
        if latest is None:
            begun = content.count(b"\n")
            remedy = f"put the checkpoints back, or remove {self.log} to start again at step 0"
            got = f"none but {begun} lines in its log; {remedy}"
            needs(begun == 0, RunError, f"Run {self.path}", "a checkpoint", got)
            return 0, None, []
        step, state, _ = latest
        with importing("Resuming", self.checkpoint(step), RunError):
            copy, mark = self.of_record(self.path, state["config"]), state["log"]
            size, digest = integer(0).require("Its log", "bytes", mark["bytes"]), mark["sha256"]
        if self.config.may_be_prolonged:
            copy = dataclasses.replace(copy, config=dataclasses.replace(copy.config, steps=self.config.steps))
        got = f"another than the checkpoint of step {step} has; {REMEDY}"
        needs(copy.record() == self.record(), RunError, f"Run {self.path}", f"{CONFIG} as it was written", got)
        is_same = len(content) >= size and hashlib.sha256(content[:size]).hexdigest() == digest
        got = f"a change; {REMEDY}"
        needs(is_same, RunError, f"Log {self.log}", "the lines that its checkpoint counts", got)
        return latest

    def check_data(self, digest: str | None) -> None:
        """Raises RunError if the user's files are not those that the run was started with, as far as that is known."""
        got = f"others ({(digest or 'none')[:12]}...); name their folder with --data, or start another run"
        words = f"the data that it was started with (sha256 {(self.data or '')[:12]}...)"
        needs(self.data in (None, digest), RunError, f"Run {self.path}", words, got)

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

    def _written_log(self) -> IO[bytes]:
        return os.fdopen(open_file(self.log, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab")

    def cut_log(self, size: int) -> None:
        """Cuts the log back to the bytes that a checkpoint counts, or makes it; raises RunError where it cannot."""
        with writable("A log", self.log), self._written_log() as file:
            file.truncate(size)

    def append(self, record: dict[str, Any]) -> None:
        """Appends one line to the log; half of it, where the disk is full, goes when the run goes on."""
        with self._written_log() as file:
            file.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def sync_log(self) -> dict[str, Any]:
        """Waits until all lines are on the disk, and returns what `latest` knows them by."""
        with self._written_log() as file:
            os.fsync(file)
        content = content_of(self.log)
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def content_of(path: Path) -> bytes:
    """Returns what a log says, nothing if it is not there; raises RunError if it cannot be read."""
    try:
        return read_file(path, most=checkpoint.LARGEST) if os.path.lexists(path) else b""
    except OSError as error:
        raise RunError(f"Log {path} needs to be a file that can be read, got {error.strerror!r}; {REMEDY}.") from error


def read_log(path: Path, scores: Collection[str] = ("loss",)) -> list[dict[str, Any]]:
    """Returns the records of a log, whose evaluations hold `scores`, but for a half-written end; or raises RunError."""
    records = []
    for number, line in enumerate(content_of(path).split(b"\n")[:-1], 1):
        with importing(f"A log at line {number}", path, RunError):
            records.append(parse_json(line))
            _check_record(records[-1], scores)
    return records


def worst_ratio(record: Mapping[str, Any]) -> float | None:
    """Returns the largest error over limit of a record's weights, or None without such weights."""
    weights = record.get("orthogonality", {}).values()
    return max((weight["error"] / weight["limit"] for weight in weights), default=None)


def by_kind(folder: RunFolder) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of the log of a run by their kind: train, test, validation, epoch."""
    records = read_log(folder.log, folder.config.build_task().scores)
    kinds = ("train", "test", "validation", "epoch")
    return {kind: [record for record in records if record["kind"] == kind] for kind in kinds}


def _check_record(record: dict[str, Any], scores: Collection[str]) -> None:
    kinds = {"train": ("loss", "gradient_norm", "ms_per_step"), "epoch": ("epoch", "cpu_seconds")}
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
