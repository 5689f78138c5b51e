"""Reads and replaces files whole, which may come from anybody, in folders that may, too.

What is read goes through `importing`, which names the file in whatever error. Files are opened through the descriptor
of their folder, without following links, and only if they are regular: no link leads a writer elsewhere, and no pipe
keeps a reader waiting. A `root` is the folder that the user has named, which may be a link; below it nothing may.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import math
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from stiefelkit.errors import CheckpointError, OptionError, RunError, StiefelkitError, needs, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST = 2**24  # bytes of JSON and TOML that are read, if nothing else is said
MALFORMED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError,
    AssertionError, SafetensorError,
)  # fmt: skip
"""Exceptions raised by malformed files, and by names that no file can have."""
_HAS_DESCRIPTORS = os.open in os.supports_dir_fd


@contextlib.contextmanager
def importing(
    who: str, path: str | os.PathLike[str], error: type[StiefelkitError] = CheckpointError, what: str = "a whole file"
) -> Iterator[None]:
    """Turns whatever is raised by a file that is not as it should be into an `error` that names the file."""
    try:
        yield
    except MALFORMED as problem:
        reason = problem.strerror if isinstance(problem, OSError) else None
        if isinstance(problem, KeyError):
            reason = f"it lacks {shown(*problem.args)}"
        reason = (reason or str(problem).partition("\n")[0] or type(problem).__name__).removesuffix(".")[:1000]
        raise error(f"{who} needs {what}, got {shown(str(path), 300)}: {reason}.") from problem


_writing = functools.partial(importing, what="a folder that can be written")


def free_place(who: str, folder: str | os.PathLike[str]) -> Path:
    """Returns the place of a folder that is empty or not there; raises OptionError for another."""
    with _writing(who, folder):
        place = Path(folder)
        is_free = not place.exists() or (place.is_dir() and not any(place.iterdir()))
    needs(is_free, OptionError, who, "a folder that is empty or not there", shown(str(folder), 300))
    return place


@contextlib.contextmanager
def whole_folder(who: str, folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a new folder beside one that is empty or not there, which takes its place when all has been written."""
    place = free_place(who, folder)
    beside = place.parent / f".{uuid.uuid4().hex}"
    with _writing(who, folder), contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        if place.exists():
            place.rmdir()
        beside.rename(place)


@contextlib.contextmanager
def reachable(who: str, path: Path, what: str = "reached", remedy: str = "; choose another") -> Iterator[None]:
    """Turns an OSError into a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{who} needs a place that can be {what}, got {path}: {error.strerror}{remedy}.") from error


writable = functools.partial(reachable, what="written", remedy="")  # turns an OSError of writing into a RunError


def parse_json(content: bytes) -> dict[str, Any]:
    """Returns an object of JSON; raises ValueError if it is none, too deeply nested, holds a key twice or NaN."""
    try:
        found = json.loads(content, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"the key {shown(twice)} comes twice")
    return entries


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{shown(text)} is no finite number")
    return float(text)


def parse_tensors(content: bytes) -> dict[str, Tensor]:
    """Returns the tensors of a file of safetensors, in which no name comes twice."""
    from safetensors.torch import load

    tensors = load(content)  # of two with one name and place the last
    parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return tensors


def checked_cast(name: str, value: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
    """Returns a tensor of a file in a dtype; raises CheckpointError unless kind and shape fit, and numbers afterwards.

    Real numbers of 16 to 64 bits fit a real dtype, complex ones a complex dtype, if what they are cast to is finite;
    integers and flags fit where the cast changes none of them. Any shape fits if none is given; `name` is the entry.
    """
    import torch

    real, unreal = (torch.float16, torch.bfloat16, torch.float32, torch.float64), (torch.complex64, torch.complex128)
    is_fit = shape is None or value.shape == tuple(shape)
    needs(is_fit, CheckpointError, name, f"shape {shape}", f"{tuple(value.shape)}")
    if dtype.is_floating_point or dtype.is_complex:
        known = unreal if dtype.is_complex else real
        needs(value.dtype in known, CheckpointError, name, f"one of {known}", str(value.dtype))
        cast = value.to(dtype)
        needs(bool(cast.isfinite().all()), CheckpointError, name, f"finite numbers that {dtype} holds", "others")
        return cast
    is_exact = not (value.is_floating_point() or value.is_complex()) and all(
        torch.equal(value.to(dtype).to(to), value.to(to)) for to in (value.dtype, torch.float64)
    )
    needs(is_exact, CheckpointError, name, f"numbers that {dtype} holds", f"others, of {value.dtype}")
    return value.to(dtype)


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


def read_json(path: Path, root: Path | None = None, most: int = LARGEST) -> dict[str, Any]:
    """Returns the object in a JSON file of at most so many bytes."""
    return parse_json(read_file(path, root, most))


def make_folder(path: Path, root: Path | None = None) -> None:
    """Makes a folder, unless something is there, which the next step in it refuses if it is none."""
    with _held(path, root) as (place, held), contextlib.suppress(FileExistsError):
        os.mkdir(place, **held)


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
