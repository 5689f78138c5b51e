"""Recordings as numbers: every format the same, and what is damaged is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from small_data import write

from stiefelkit.errors import DataError
from stiefelkit.training.audio import read

TONE = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(4000) / 8000)


@pytest.mark.parametrize("name", ["a.WAV", "a.flac", "a.sph"])
def test_every_format_has_the_samples_that_were_written(name: str, tmp_path: Path) -> None:
    samples, rate = read(write(tmp_path / name, TONE))
    assert rate == 8000
    assert samples.dtype == np.float32
    assert np.abs(samples - TONE).max() < 1 / 2**15


def test_channels_are_averaged(tmp_path: Path) -> None:
    samples, _ = read(write(tmp_path / "a.flac", np.stack([TONE, 0 * TONE], axis=1)))
    assert np.abs(samples - TONE / 2).max() < 1 / 2**15


@pytest.mark.parametrize("rate", [44100])
def test_other_rates_are_resampled(rate: int, tmp_path: Path) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(rate // 2) / rate)
    samples, now = read(write(tmp_path / "a.wav", tone, rate), 8000)
    assert now == 8000
    assert abs(len(samples) - 4000) <= 1
    assert np.abs(samples[200:3800] - TONE[200:3800]).max() < 0.01


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.sph"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_file_that_is_not_whole_is_refused(name: str, share: float, tmp_path: Path) -> None:
    path = write(tmp_path / name, TONE)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    refused(path, "whole")


def test_a_cut_big_endian_wav_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, TONE, 8000, subtype="PCM_16", endian="BIG")
    assert len(read(path)[0]) == len(TONE)
    path.write_bytes(path.read_bytes()[:-100])
    refused(path, "whole")


@pytest.mark.parametrize("size", [0x7FFFF000, 0xFFFFFFFF])
def test_a_wav_whose_writer_could_not_know_its_size_is_read(size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", TONE)
    content = path.read_bytes()
    place = content.index(b"data") + 4
    path.write_bytes(content[:place] + size.to_bytes(4, "little") + content[place + 4 :])
    assert np.abs(read(path)[0] - TONE).max() < 1 / 2**15


@pytest.mark.parametrize("channels", [1, 2])
def test_a_nist_file_is_known_by_the_number_of_its_samples(channels: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.sph", np.stack([TONE] * channels, axis=1))
    path.write_bytes(path.read_bytes()[: -200 * channels])
    refused(path, "whole")


def test_bits_that_have_changed_are_noticed_where_the_format_can_tell(tmp_path: Path) -> None:
    path = write(tmp_path / "a.flac", TONE)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    refused(path, "whole")


@pytest.mark.parametrize("content", [np.array([]), np.array([0.1, np.nan])])
def test_no_samples_and_samples_that_are_no_numbers_are_refused(content: np.ndarray, tmp_path: Path) -> None:
    refused(write(tmp_path / "a.wav", content, subtype="FLOAT"), "finite")


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.wav", TONE)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match="soundfile"):
        read(path)


def refused(path: Path, word: str) -> None:
    with pytest.raises(DataError, match=word):
        read(path)
