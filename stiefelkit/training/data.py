"""The data of tasks: in the folder of --data, in that of STIEFELKIT_DATA, or a download checked by its hash.

A task that reads the user's own files calls `folder("speech")`; one that reads files which everybody has lists them as
`File` and calls `content(file, "mnist")`. The folder is no option of a task, so that a run goes on where its data lie
elsewhere: `place()` says what it is now, and `device()` where the tensors of a task are wanted. Prepare the data once,
in a cached function of both and of the options that matter, and call that in `batch` and `held_out`, which both run
before the folder of a run appears. A task that pays no heed to the device has its batches moved one by one.
"""

import contextlib
import gzip
import hashlib
import itertools
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from stiefelkit.errors import DataError, needs
from stiefelkit.files import importing

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
VARIABLE = "STIEFELKIT_DATA"
AUDIO = (".wav", ".flac", ".sph")  # endings of recordings
REMEDY = f"name its folder with --data DIR or {VARIABLE}"

_named: ContextVar[Path | None] = ContextVar("named", default=None)
_device: ContextVar[str] = ContextVar("device", default="cpu")


@dataclass(frozen=True)
class File:
    """A file that everybody has: its name without .gz, the digest of its unpacked content, where to get it."""

    name: str
    sha256: str
    urls: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


def named(path: Path | None) -> contextlib.AbstractContextManager[None]:
    """Has data be looked for in a folder, as --data does; None leaves it to the environment."""
    return _holding(_named, path if path is not None else _named.get())


def on(device: str) -> contextlib.AbstractContextManager[None]:
    """Has tasks that keep their data in memory keep them on a device, and answer with tensors there."""
    return _holding(_device, device)


@contextlib.contextmanager
def _holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def device() -> str:
    """Returns the device that `on` has named; the CPU if it has named none."""
    return _device.get()


def digest(pieces: Iterable[bytes]) -> str:
    """Returns what some files are known by, in their order: the sha256 of the sha256 of each.

    >>> digest([b"ab", b"c"]) == digest([b"a", b"bc"])
    False
    """
    return hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()


def place() -> Path | None:
    """Returns the folder that --data or else STIEFELKIT_DATA names, or None; raises DataError if it is not there."""
    path = _named.get() or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    needs(path is None or path.is_dir(), DataError, "Task", "an existing folder of data", f"{path}; {REMEDY}")
    return path


def folder(name: str) -> Path:
    """Returns the folder of a task's data: NAME in that of `place`, or else that itself; raises DataError without."""
    path = place()
    if path is None:
        raise DataError(f"Task {name!r} needs your own data, got no folder; {REMEDY}.")
    return path / name if (path / name).is_dir() else path


def content(file: File, name: str) -> bytes:
    """Returns what a file holds, unpacked and known by its digest, from the folder of data or from the network."""
    path = place()
    homes = () if path is None else (path / name, path, path / name.upper() / "raw", path / name / "raw", path / "raw")
    for home, known in itertools.product(homes, (file.name, *file.aliases)):
        for candidate in (home / known, home / f"{known}.gz"):
            if candidate.is_file():
                return _checked(file, candidate, "put a whole one there")
    where, reasons = f"none in {path}" if path else "no folder of data", []
    try:
        import pooch
    except ImportError as error:
        remedy = f'{where} and no pooch; pip install "stiefelkit[data]", or {REMEDY}'
        raise DataError(f"{file.name} needs to be fetched, got {remedy}.") from error
    pooch.get_logger().setLevel("WARNING")  # or it tells the digest of each file, and what to do with it
    for url in file.urls:
        try:
            # the digest is that of the content: mirrors pack it each in their own way
            fetched = Path(pooch.retrieve(url, None, url.rpartition("/")[2], pooch.os_cache("stiefelkit")))
            try:
                return _checked(file, fetched, REMEDY)
            except DataError:
                fetched.unlink()
                raise
        except Exception as error:  # whatever the clients of the protocols raise
            reasons.append(f"{url} ({type(error).__name__}: {str(error).rstrip('.')})")
    raise DataError(f"{file.name} needs to be fetched, got {where} and nothing from {', '.join(reasons)}; {REMEDY}.")


def _checked(file: File, path: Path, remedy: str) -> bytes:
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DataError(f"{file.name} needs to be a whole file, got {path}: {reason}; {remedy}.") from error
    sha256 = hashlib.sha256(content).hexdigest()
    words, got = f"the sha256 {file.sha256[:16]}...", f"{sha256[:16]}... in {path}; {remedy}"
    needs(sha256 == file.sha256, DataError, file.name, words, got)
    return content


def recording(path: Path, rate: int | None = None) -> "tuple[np.ndarray, int]":
    """Returns the samples of a WAV, FLAC or NIST SPHERE, float32 in [-1, 1], the mean of channels, and their rate."""
    import numpy as np

    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: a package without the library that it wraps
        words = 'soundfile, got an installation without; pip install "stiefelkit[speech]"'
        raise DataError(f"Reading audio needs {words}.") from error
    with importing("Audio", path, DataError):
        samples, written = soundfile.read(path, dtype="float32", always_2d=True)
    finite = samples.size > 0 and bool(np.isfinite(samples).all())
    needs(finite, DataError, "Audio", "one finite sample or more", f"{path} with none, NaN or infinity")
    mono = samples.mean(axis=1)
    if rate in (None, written):
        return mono, written
    from scipy.signal import resample_poly

    divisor = math.gcd(rate, written)
    return resample_poly(mono, rate // divisor, written // divisor).astype(np.float32), rate
