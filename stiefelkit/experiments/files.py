"""Writing so that a kill at any moment leaves either the old file or the new one, never half of one."""

import json
import math
import os
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError

__all__ = ["sync_directory", "write_atomically", "write_json", "write_synced"]


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file and waits until it is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file in one step: a temporary sibling is written, synced and renamed."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, content)
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"File {path} cannot be written: {error.strerror}; nothing in it has changed.") from error
    sync_directory(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Replaces a file by JSON in one step; NaN and infinity, for which JSON has no word, become null."""
    write_atomically(path, (json.dumps(_finite(content), indent=2, allow_nan=False) + "\n").encode())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk; does nothing where directories cannot be opened."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
