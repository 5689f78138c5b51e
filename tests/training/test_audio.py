"""Recordings as numbers: every format the same, and what holds no samples is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
from small_data import write

from stiefelkit.errors import DataError
from stiefelkit.training.data import recording

TONE = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(4000) / 8000)


@pytest.mark.parametrize("name", ["a.WAV", "a.flac", "a.sph"])
def test_every_format_has_the_samples_that_were_written(name: str, tmp_path: Path) -> None:
    samples, rate = recording(write(tmp_path / name, TONE))
    assert (rate, samples.dtype) == (8000, np.float32)
    assert np.abs(samples - TONE).max() < 1 / 2**15


def test_channels_are_averaged_and_other_rates_resampled(tmp_path: Path) -> None:
    samples, _ = recording(write(tmp_path / "a.flac", np.stack([TONE, 0 * TONE], axis=1)))
    assert np.abs(samples - TONE / 2).max() < 1 / 2**15
    tone = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(22050) / 44100)
    samples, now = recording(write(tmp_path / "a.wav", tone, 44100), 8000)
    assert now == 8000
    assert abs(len(samples) - 4000) <= 1
    assert np.abs(samples[200:3800] - TONE[200:3800]).max() < 0.01


@pytest.mark.parametrize(("name", "share"), [("a.wav", 0.0), ("a.sph", 0.0), ("a.flac", 0.999)])
def test_a_file_that_cannot_be_decoded_is_refused(name: str, share: float, tmp_path: Path) -> None:
    path = write(tmp_path / name, TONE)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match="whole"):
        recording(path)


def test_what_holds_no_numbers_is_refused_and_an_extra_that_is_missing_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in (np.array([]), np.array([0.1, np.nan])):
        path = write(tmp_path / "a.wav", content, subtype="FLOAT")
        with pytest.raises(DataError, match="finite"):
            recording(path)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match="soundfile"):
        recording(path)
