"""Recordings as numbers: WAV, FLAC, NIST SPHERE, of any rate and any number of channels, if they are whole."""

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stiefelkit.errors import DataError

ENDINGS = (".wav", ".flac", ".sph")
LOUDEST, FASTEST = 1e6, 1_000_000
"""Larger samples, and more a second, are not meant as such."""
STREAMED = 0x7FFF0000
"""From here on a size in a WAV is that of a writer that could not know it."""
UNKNOWN = 2**62
"""So many samples a decoder names where a FLAC does not say how many there are."""
HEADER = 2**16
"""Bytes in which the fields of a NIST file stand."""
CHECKED = ("WAV", "WAVEX", "RF64", "NIST", "FLAC")
"""Formats that say how many samples they hold."""


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
        with path.open("rb") as file:
            head = file.read(HEADER)
        with soundfile.SoundFile(path) as sound:
            if sound.format not in CHECKED:
                raise DataError(f"Audio needs a WAV, FLAC or NIST SPHERE file, got {path}, which is {sound.format}.")
            if sound.frames >= UNKNOWN:
                raise DataError(f"Audio needs files that say how many samples they hold, got {path}; encode it anew.")
            samples, written = sound.read(dtype="float32", always_2d=True), sound.samplerate
            lacking = _lacking(sound, head, len(samples))
    except OSError as error:
        raise DataError(f"Audio needs a file that can be read, got {path}: {error.strerror}.") from error
    except soundfile.SoundFileError as error:
        reason = str(error).rpartition(": ")[2].rstrip(".")
        raise DataError(f"Audio needs a whole WAV, FLAC or NIST SPHERE file, got {path}: {reason}.") from error
    if lacking:
        raise DataError(f"Audio needs whole files, got {path}, which lacks its last {lacking}; put a whole one there.")
    if not samples.size or not np.isfinite(samples).all():
        held = "NaN or infinity" if samples.size else "none"
        raise DataError(f"Audio needs one finite sample or more, got {path} with {held}.")
    loudest = float(np.abs(samples).max())
    if loudest > LOUDEST:
        raise DataError(f"Audio needs samples between -1 and 1, got {path} with one of {loudest:.3g}.")
    if written > FASTEST:
        raise DataError(f"Audio needs {FASTEST:,} samples a second at most, got {path} with {written:,}.")
    mono = samples.mean(axis=1)
    if rate in (None, written):
        return mono, written
    from scipy.signal import resample_poly

    divisor = math.gcd(rate, written)
    return resample_poly(mono, rate // divisor, written // divisor).astype(np.float32), rate


def _lacking(sound: Any, head: bytes, count: int) -> str:
    """Returns what a file says that it holds and does not, in words: decoders read what there is, and log the rest."""
    log = sound.extra_info
    fields = head.partition(b"end_head")[0].decode("latin-1") if sound.format == "NIST" else log
    field = {"NIST": r"sample_count\s+-i", "RF64": r"  Frames\s+:"}.get(sound.format)
    frames = re.search(rf"^{field}\s+(\d+)", fields, re.MULTILINE) if field else None
    lacking = (int(frames[1]) if frames else sound.frames) - count
    if lacking > 0:
        return f"{lacking} samples"
    whole = _sizes("RIF[FX]", log)
    samples = _sizes("data", log) or whole  # of a long log the end is missing
    announced, there = samples or (0, 0)
    if whole and 0 < whole[0] == whole[1] < STREAMED:
        return ""
    return f"{announced - there} bytes" if there < announced < STREAMED else ""


def _sizes(chunk: str, log: str) -> tuple[int, ...]:
    """Returns what a decoder's log says of the size of a chunk: announced, and there."""
    found = re.search(rf"^{chunk} : (\d+)(?: \(should be (\d+)\))?$", log, re.MULTILINE)
    return (int(found[1]), int(found[2] or found[1])) if found else ()
