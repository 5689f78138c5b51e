"""Recordings as numbers, by soundfile: WAV, FLAC, NIST SPHERE, of any rate and any number of channels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from stiefelkit.errors import DataError, needs

if TYPE_CHECKING:
    import numpy as np

ENDINGS = (".wav", ".flac", ".sph")


def read(path: Path, rate: int | None = None) -> tuple[np.ndarray, int]:
    """Returns the samples of a recording, float32 in [-1, 1], the mean of its channels, and how many are a second."""
    import numpy as np

    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: a package without the library that it wraps
        words = 'soundfile, got an installation without; pip install "stiefelkit[speech]"'
        raise DataError(f"Reading audio needs {words}.") from error
    try:
        samples, written = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, MemoryError, ValueError, soundfile.SoundFileError) as error:
        raise DataError(f"Audio needs a whole WAV, FLAC or NIST SPHERE file, got {path}: {error}") from error
    finite = samples.size > 0 and bool(np.isfinite(samples).all())
    needs(finite, DataError, "Audio", "one finite sample or more", f"{path} with none, NaN or infinity")
    mono = samples.mean(axis=1)
    if rate in (None, written):
        return mono, written
    from scipy.signal import resample_poly

    divisor = math.gcd(rate, written)
    return resample_poly(mono, rate // divisor, written // divisor).astype(np.float32), rate
