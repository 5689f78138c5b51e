"""Recordings as numbers, by soundfile: WAV, FLAC, NIST SPHERE, of any rate and any number of channels."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from stiefelkit.errors import DataError, needs

if TYPE_CHECKING:
    import numpy as np

ENDINGS = (".wav", ".flac", ".sph")
STREAMED = 0x7FFF0000
"""From here on a size in a WAV is that of a writer that could not know it."""


def read(path: Path, rate: int | None = None) -> tuple[np.ndarray, int]:
    """Returns the samples of a recording, float32 in [-1, 1], the mean of its channels, and how many are a second."""
    import numpy as np

    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: a package without the library that it wraps
        raise DataError(
            'Reading audio needs soundfile, got an installation without; pip install "stiefelkit[speech]".'
        ) from error
    try:
        head = path.read_bytes()[:1024]
        with soundfile.SoundFile(path) as sound:
            samples, written, log = sound.read(dtype="float32", always_2d=True), sound.samplerate, sound.extra_info
            count = sound.frames
    except OSError as error:
        raise DataError(f"Audio needs a file that can be read, got {path}: {error.strerror}.") from error
    except (MemoryError, ValueError, soundfile.SoundFileError) as error:
        reason = str(error).rpartition(": ")[2].rstrip(".")
        raise DataError(f"Audio needs a whole WAV, FLAC or NIST SPHERE file, got {path}: {reason}.") from error
    # decoders read what there is, and log the rest
    announced = re.search(rb"^sample_count\s+-i\s+(\d+)", head, re.MULTILINE)
    count = int(announced[1]) if announced and head.startswith(b"NIST") else count
    sizes = re.search(r"^data : (\d+) \(should be (\d+)\)$", log, re.MULTILINE)
    is_cut = count > len(samples) or (sizes is not None and int(sizes[2]) < int(sizes[1]) < STREAMED)
    needs(not is_cut, DataError, "Audio", "whole files", f"{path}, which lacks its end; put a whole one there")
    finite = samples.size > 0 and bool(np.isfinite(samples).all())
    needs(finite, DataError, "Audio", "one finite sample or more", f"{path} with none, NaN or infinity")
    mono = samples.mean(axis=1)
    if rate in (None, written):
        return mono, written
    from scipy.signal import resample_poly

    divisor = math.gcd(rate, written)
    return resample_poly(mono, rate // divisor, written // divisor).astype(np.float32), rate
