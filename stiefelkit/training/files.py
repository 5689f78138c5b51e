"""Reads and replaces files whole, in folders that may come from anybody.

Files are opened through the descriptor of their folder, without following links, and only if they are regular: no link
leads a writer elsewhere, and no pipe keeps a reader waiting. A `root` is the folder that the user has named, which may
be a link; below it nothing may.
"""

import contextlib
import errno
import itertools
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError

_HAS_DESCRIPTORS = os.open in os.supports_dir_fd


@contextlib.contextmanager
def reachable(who: str, path: Path, what: str = "reached", remedy: str = "; choose another") -> Iterator[None]:
    """Turns an OSError into a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{who} needs a place that can be {what}, got {path}: {error.strerror}{remedy}.") from error


def writable(who: str, path: Path) -> contextlib.AbstractContextManager[None]:
    """Turns an OSError of writing into a RunError."""
    return reachable(who, path, "written", "")


def parse_json(content: bytes) -> Any:
    """Returns what JSON says; raises ValueError if it is none, too deeply nested, or holds a key twice or NaN."""
    try:
        return json.loads(content, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key comes twice")
    return entries


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no finite number")


def open_file(path: Path, flags: int, root: Path | None = None) -> int:
    """Opens a regular file with flags of `os.open`; one to write has no other name, and `os.O_RDWR` for pipes."""
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with _held(path, root) as (place, held):
        descriptor = os.open(place, flags, 0o666, **held)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        fault = errno.EINVAL, "it is no regular file"
    elif found.st_nlink > 1 and flags & os.O_RDWR:
        fault = errno.EMLINK, "it is a hard link to a file with other names"
    else:
        return descriptor
    os.close(descriptor)
    raise OSError(*fault, str(path))


@contextlib.contextmanager
def _held(path: Path, root: Path | None) -> Iterator[tuple[Any, dict[str, int]]]:
    """Gives a path's last part and its folder as `dir_fd`, or where the system has none the path, if free of links."""
    root = path.parent if root is None else root
    *folders, name = path.relative_to(root).parts
    if not _HAS_DESCRIPTORS:
        refuse_links(path, root)
        yield path, {}
        return
    held = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=held)
            os.close(held)
            held = inner
        yield name, {"dir_fd": held}
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            refuse_links(path, root)
        error.filename = str(path)
        raise
    finally:
        os.close(held)


def refuse_links(path: Path, root: Path) -> None:
    """Raises OSError if a path, or a folder between it and its root, is a link."""
    for place in itertools.takewhile(lambda place: place != root, (path, *path.parents)):
        if place.is_symlink():
            raise OSError(errno.ELOOP, "it is a link", str(place))


def read_file(path: Path, root: Path | None = None, most: int | None = None) -> bytes:
    """Returns the content of a regular file; one of more than `most` bytes, or than fit into memory, is an OSError."""
    with os.fdopen(open_file(path, os.O_RDONLY, root), "rb") as file:
        if most is None or os.fstat(file.fileno()).st_size <= most:
            with contextlib.suppress(MemoryError, OverflowError):
                return file.read()
    raise OSError(errno.EFBIG, "it is too large", str(path))


def make_folder(path: Path, root: Path | None = None) -> None:
    """Makes a folder, unless it is there."""
    with _held(path, root) as (place, held):
        try:
            os.mkdir(place, **held)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(place, **held, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP if path.is_symlink() else errno.ENOTDIR, "it is no folder") from None


def remove(path: Path, root: Path | None = None) -> None:
    """Removes a file, a link (not what it leads to), or a folder with all that it holds; what is missing is fine."""
    with _held(path, root) as (place, held), contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(place, **held, follow_symlinks=False).st_mode):
            shutil.rmtree(place, dir_fd=held.get("dir_fd"))
        else:
            os.unlink(place, **held)


def rename(path: Path, name: str, root: Path | None = None) -> None:
    """Gives a file or folder another name where it is, in one step, in the place of a file of that name."""
    with _held(path, root) as (place, held):
        other = name if held else path.with_name(name)
        os.replace(place, other, src_dir_fd=held.get("dir_fd"), dst_dir_fd=held.get("dir_fd"))


def write_synced(path: Path, content: bytes, root: Path | None = None) -> None:
    """Writes a new file and waits until it is on the disk."""
    with os.fdopen(open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, root), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def refuse_special(path: Path) -> None:
    """Raises OSError if a device, a pipe or a socket is there, or a link to one or to what is open, as /dev/stdout."""
    is_open = path.is_symlink() and os.readlink(path).startswith("/proc/")
    if is_open or (path.exists() and not (path.is_file() or path.is_dir())):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a regular file, or a link, in one step: a temporary sibling is written, synced and renamed."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        refuse_special(path)  # which root would replace
        remove(temporary)  # what a kill, or somebody else, has left there
        write_synced(temporary, content)
        rename(temporary, path.name)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunError(f"File {path} cannot be written: {error.strerror}; nothing in it has changed.") from error
    with reachable(f"File {path.name}", path.parent):
        sync_directory(path.parent)


def write_json(path: Path, content: object) -> None:
    """Replaces a file by JSON in one step; NaN and infinity, for which JSON has no word, become null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda word: None)
    write_atomically(path, (json.dumps(finite, indent=2) + "\n").encode())


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
