"""The log of a run: one JSON object a line."""

import json
import os
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError

__all__ = ["Log", "read"]


class Log:
    """An append-only JSONL file that a checkpoint can cut back to where it was.

    Args:
        path: the file; made if missing.
        keep: number of bytes to keep; what lies behind belongs to steps that will be done again.

    Raises:
        RunError: the file is shorter than `keep`.
    """

    def __init__(self, path: Path, keep: int = 0):
        if keep and not path.exists():
            raise RunError(f"Log {path} needs to be there to resume its run, got none; start a run with another --out.")
        self._file = open(path, "ab")
        size = self._file.tell()
        if size < keep:
            self._file.close()
            raise RunError(
                f"Log {path} needs the {keep} bytes that its checkpoint counts, got {size}; start a new run."
            )
        self._file.truncate(keep)
        self._file.seek(keep)

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line."""
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def sync(self) -> int:
        """Waits until all lines are on the disk, and returns their size in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a log; a last line that is still being written is left out.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise RunError(f"Run {path.parent} has no readable {path.name}; is it a run folder?") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            _ = record["step"], record["kind"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"Log {path} is damaged at line {number}.") from error
        records.append(record)
    return records
