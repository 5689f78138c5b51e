"""Files that are whole: a kill leaves the old one or the new one, and JSON is what it was written as, or refused."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError

__all__ = ["parse_json", "reachable", "sync_directory", "writable", "write_atomically", "write_json", "write_synced"]


@contextlib.contextmanager
def reachable(who: str, path: Path) -> Iterator[None]:
    """Turns what the system says of a path, such as that its name is too long, into a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{who} needs a place that can be reached, got {path}: {error.strerror}; choose another."
        ) from error


@contextlib.contextmanager
def writable(who: str, path: Path) -> Iterator[None]:
    """Turns what the system says of writing to a path into a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{who} needs a place that can be written, got {path}: {error.strerror}.") from error


def parse_json(content: bytes) -> Any:
    """Returns what JSON says, if it says one thing only and no number is beyond a float.

    Raises:
        ValueError: it is no JSON, too deeply nested, or holds a key twice, NaN, infinity or a larger number.
    """
    try:
        numbers: dict[str, Any] = {"parse_float": _finite_number, "parse_constant": _finite_number, "parse_int": _whole}
        return json.loads(content, object_pairs_hook=_unique, **numbers)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key comes twice")
    return entries


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def _whole(text: str) -> int:
    if len(text) > 300:  # float(10**308) is the last that does not overflow
        raise ValueError("an integer is too large")
    return int(text)


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
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunError(f"File {path} cannot be written: {error.strerror}; nothing in it has changed.") from error
    with reachable(f"File {path.name}", path.parent):
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
