"""Recordings as numbers: WAV, FLAC, NIST SPHERE, of any rate and any number of channels, if they are whole."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stiefelkit.errors import DataError

__all__ = ["ENDINGS", "needed", "read"]

ENDINGS = (".wav", ".flac", ".sph")
LOUDEST, FASTEST = 1e6, 1_000_000
"""Larger samples, and more a second, are not meant as such."""
STREAMED = 0xFFFFFFFF
"""The size in a WAV whose writer did not know it."""
UNKNOWN = 2**62
"""So many samples a decoder names where a FLAC does not say how many there are."""
HEADER = 2**16
"""Bytes in which the samples of a WAV begin."""
MAGIC = (b"RIFF", b"RIFX", b"RF64", b"fLaC", b"ID3", b"NIST_1A")
"""How the files begin that are known well enough to tell whether they are whole."""


@contextlib.contextmanager
def needed(package: str) -> Iterator[None]:
    """Turns a failure to import one of the packages for audio into a DataError with what to install."""
    try:
        yield
    except (ImportError, OSError) as error:  # OSError: a package without the library that it wraps
        raise DataError(
            f'Reading and judging audio needs {package}, got an installation without; pip install "stiefelkit[speech]".'
        ) from error


def read(path: Path, rate: int | None = None) -> tuple[np.ndarray, int]:
    """Returns the samples of a recording, float32 in [-1, 1], the mean of its channels, and how many are a second.

    Args:
        path: of the file, whose content says its format.
        rate: samples per second; those of the file if left out, resampled by a polyphase filter if they are others.

    Raises:
        DataError: it is missing, damaged, shorter than it says, holds no finite samples or none of any loudness, or
            says more than a million of them a second; or soundfile is missing.
    """
    with needed("soundfile"):
        import soundfile
    try:
        short = _missing_bytes(path)
        if soundfile.info(path).frames >= UNKNOWN:
            raise DataError(f"Audio needs files that say how many samples they hold, got {path}; encode it anew.")
        samples, written = soundfile.read(path, dtype="float32", always_2d=True)
    except OSError as error:
        raise DataError(f"Audio needs a file that can be read, got {path}: {error.strerror}.") from error
    except soundfile.SoundFileError as error:
        reason = str(error).rpartition(": ")[2].rstrip(".")
        raise DataError(f"Audio needs a whole WAV, FLAC or NIST SPHERE file, got {path}: {reason}.") from error
    if short > 0:
        raise DataError(
            f"Audio needs whole files, got {path}, which lacks its last {short} bytes; put a whole one there."
        )
    if not samples.size or not np.isfinite(samples).all():
        raise DataError(f"Audio needs one finite sample or more, got {path} with {_holds(samples)}.")
    loudest = float(np.abs(samples).max())
    if loudest > LOUDEST:
        raise DataError(f"Audio needs samples between -1 and 1, got {path} with one of {loudest:.3g}.")
    if written > FASTEST:
        raise DataError(f"Audio needs {FASTEST:,} samples a second at most, got {path} with {written:,}.")
    mono = samples.mean(axis=1)
    if rate in (None, written):
        return mono, written
    with needed("scipy"):
        from scipy.signal import resample_poly
    divisor = math.gcd(rate, written)
    return resample_poly(mono, rate // divisor, written // divisor).astype(np.float32), rate


def _holds(samples: np.ndarray) -> str:
    return "NaN or infinity" if samples.size else "none"


def _missing_bytes(path: Path) -> int:
    """Returns how many bytes a WAV or NIST file lacks, which decoders pass over; a FLAC that lacks some they refuse."""
    with path.open("rb") as file:
        head = file.read(HEADER)
    size = path.stat().st_size
    if size and not head.startswith(MAGIC):
        raise DataError(f"Audio needs a whole WAV, FLAC or NIST SPHERE file, got {path}, which begins as none of them.")
    if head[:4] in (b"RIFF", b"RIFX", b"RF64"):
        return _end_of_wav(head) - size
    if head[:7] == b"NIST_1A":
        words = [line.split() for line in head.decode("latin-1").splitlines()]
        numbers = {line[0]: int(line[2]) for line in words if len(line) == 3 and line[1] == "-i" and line[2].isdigit()}
        frame = numbers.get("channel_count", 1) * numbers.get("sample_n_bytes", 2)
        header = int(words[1][0]) if words[1:2] and words[1] and words[1][0].isdigit() else 1024
        return header + numbers.get("sample_count", 0) * frame - size
    return 0


def _end_of_wav(head: bytes) -> int:
    """Where the last byte of a WAV should be, by the sizes of all and of its samples; 0 where none is known."""
    order = "big" if head[:4] == b"RIFX" else "little"

    def number(start: int, count: int) -> int:
        return int.from_bytes(head[start : start + count], order)

    announced, wide, place = number(4, 4), 0, 12
    end = 0 if announced in (0, STREAMED) else announced + 8
    while place + 8 <= len(head):
        name, length, start = head[place : place + 4], number(place + 4, 4), place + 8
        if name == b"ds64":  # of an RF64: the sizes that do not fit into 32 bits
            end, wide = number(start, 8) + 8, number(start + 8, 8)
        elif name == b"data":
            length = wide if length == STREAMED else length
            return max(end, start + length)
        place = start + length + length % 2
    return end
