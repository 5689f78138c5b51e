"""The log of a run: one JSON object a line."""

import contextlib
import hashlib
import json
import math
import os
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError
from stiefelkit.training.files import open_file, parse_json, read_file

__all__ = ["MEASURED", "Log", "check", "lines", "read"]

MEASURED = ("ms_per_step", "cpu_seconds", "wall_seconds", "peak_bytes", "peak_device_bytes")
"""Keys of a line that tell of the machine, and may differ where all else is the same."""
LAST_STEP = 2**53
"""Up to here a float holds every integer."""


class Log:
    """An append-only JSONL file that a checkpoint can cut back to where it was.

    Args:
        path: the file; made if missing.
        keep: number of bytes to keep; what lies behind belongs to steps that will be done again.

    Raises:
        RunError: the file is shorter than `keep`, or cannot be written.
    """

    def __init__(self, path: Path, keep: int = 0):
        kept = _content(path, keep)[:keep]
        self._size, self._sha, self._sums = len(kept), hashlib.sha256(kept), _sums(kept)
        try:
            # without a buffer: what a full disk refused must not come again when the file is closed
            self._file = os.fdopen(open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab", buffering=0)
            self._file.truncate(keep)
        except OSError as error:
            raise RunError(
                f"Log {path} needs to be a file that can be written, got {error.strerror!r}; "
                f"mend that, or start another run with another --out."
            ) from error

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
        self._sums += _sums(line)

    def sync(self) -> dict[str, Any]:
        """Waits until all lines are on the disk, and returns what `check` knows them by."""
        os.fsync(self._file.fileno())
        return {"bytes": self._size, "sha256": self._sha.hexdigest(), "lines": self._sums}

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def check(path: Path, mark: Mapping[str, Any]) -> None:
    """Compares the beginning of a log with what `Log.sync` returned.

    Raises:
        RunError: it is missing, too short or has changed; the message names the first line that has.
    """
    size, sums = mark["bytes"], mark["lines"]
    content = _content(path, size)
    if hashlib.sha256(content[:size]).hexdigest() == mark["sha256"]:
        return
    start = 0
    for number, line in enumerate(content[:size].splitlines(keepends=True), 1):
        if _sums(line) != sums[8 * (number - 1) : 8 * number]:
            raise RunError(
                f"Log {path} needs the {size} bytes that its checkpoint counts as they were written, got a change in "
                f"line {number}, which begins at byte {start}; put it back, or start another run with another --out."
            )
        start += len(line)
    raise RunError(
        f"Log {path} needs the {size} bytes that its checkpoint counts as they were written, got a change; "
        f"put them back, or start another run with another --out."
    )


def lines(path: Path) -> int:
    """Returns the number of whole lines of a log; none if there is no log.

    Raises:
        RunError: there is something that cannot be read.
    """
    return _content(path, 0).count(b"\n")


def read(path: Path, scores: Collection[str] = ("loss",)) -> list[dict[str, Any]]:
    """Returns the records of a log; a last line that is still being written is left out.

    Args:
        path: the file.
        scores: what an evaluation must hold, by name.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        content = read_file(path)
    except OSError as error:
        raise RunError(f"Run {path.parent} has no readable {path.name}; is it a run folder?") from error
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            record = parse_json(line)
            _check_record(record, scores)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise RunError(f"Log {path} is damaged at line {number}.") from error
        records.append(record)
    return records


def _check_record(record: dict[str, Any], scores: Collection[str]) -> None:
    numbers: list[Any]
    if record["kind"] == "train":
        numbers = [record[name] for name in ("loss", "gradient_norm", "ms_per_step")]
        for weight in record["orthogonality"].values():
            numbers += [weight["error"], weight["limit"], weight["error"] / weight["limit"]]
    elif record["kind"] in ("test", "validation"):
        numbers = [record[name] for name in scores]
    elif record["kind"] == "epoch":
        numbers = [record[name] for name in ("epoch", "cpu_seconds", "wall_seconds")]
    else:
        raise ValueError("unknown kind")
    if type(record["step"]) is not int or not 0 <= record["step"] <= LAST_STEP:
        raise ValueError("no step")
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise ValueError("no number")


def _content(path: Path, least: int) -> bytes:
    try:
        content = read_file(path)
    except FileNotFoundError as error:
        if not least and not path.is_symlink():
            return b""
        raise RunError(
            f"Log {path} needs to be there to resume its run, got none; start a run with another --out."
        ) from (error)
    except OSError as error:
        raise RunError(
            f"Log {path} needs to be a file that can be read, got {error.strerror!r}; "
            f"mend that, or start another run with another --out."
        ) from error
    if len(content) < least:
        raise RunError(
            f"Log {path} needs the {least} bytes that its checkpoint counts, got {len(content)}; start a new run."
        )
    return content


def _sums(content: bytes) -> str:
    """Eight hexadecimal digits for each line: too short to trust, but they tell where a change is."""
    return "".join(f"{zlib.crc32(line):08x}" for line in content.splitlines(keepends=True))
