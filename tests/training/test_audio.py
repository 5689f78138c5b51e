"""Recordings as numbers: every format the same, and what is damaged is said in one sentence."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from small_data import write

from stiefelkit.errors import DataError
from stiefelkit.training.audio import read

TONE = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(4000) / 8000)


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.sph", "a.WAV"])
def test_every_format_has_the_samples_that_were_written(name: str, tmp_path: Path) -> None:
    samples, rate = read(write(tmp_path / name, TONE))
    assert rate == 8000
    assert samples.dtype == np.float32
    assert np.abs(samples - TONE).max() < 1 / 2**15


def test_channels_are_averaged(tmp_path: Path) -> None:
    samples, _ = read(write(tmp_path / "a.flac", np.stack([TONE, 0 * TONE], axis=1)))
    assert np.abs(samples - TONE / 2).max() < 1 / 2**15


@pytest.mark.parametrize("rate", [16000, 11025, 44100])
def test_other_rates_are_resampled(rate: int, tmp_path: Path) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(rate // 2) / rate)
    samples, now = read(write(tmp_path / "a.wav", tone, rate), 8000)
    assert now == 8000
    assert abs(len(samples) - 4000) <= 1
    assert np.abs(samples[200:3800] - TONE[200:3800]).max() < 0.01


def _cut(share: float) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(share * len(content))]


DAMAGES = {
    "half": _cut(0.5),
    "all but the end": lambda content: content[:-2],
    "head": lambda content: content[:20],
    "nothing": lambda content: b"",
    "words": lambda content: b"no recording at all, but long enough to be one" * 9,
}


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.sph"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_is_not_whole_is_refused(name: str, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = write(tmp_path / name, TONE)
    path.write_bytes(damage(path.read_bytes()))
    refused(path, "whole")


@pytest.mark.parametrize("kind", ["RF64", "RIFX"])
def test_a_wav_of_any_kind_is_read_whole_or_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    written = ("RF64", "FILE") if kind == "RF64" else ("WAV", "BIG")
    soundfile.write(path, TONE, 8000, subtype="PCM_16", format=written[0], endian=written[1])
    assert path.read_bytes().startswith(kind.encode())
    assert len(read(path)[0]) == len(TONE)
    path.write_bytes(path.read_bytes()[:-100])
    refused(path, "whole")


def _sized(content: bytes, riff: int, samples: int) -> bytes:
    """A WAV whose header says that it has so many bytes after the eighth, and so many of samples."""
    place = content.index(b"data") + 4
    sizes = [size.to_bytes(4, "little") for size in (riff, samples)]
    return content[:4] + sizes[0] + content[8:place] + sizes[1] + content[place + 4 :]


BYTES, HEAD = 2 * len(TONE), 36
"""Of the samples, and of what a small WAV has before them, after the eighth byte."""
STREAMS = [
    (0x7FFFF000 + HEAD, 0x7FFFF000),
    (0x7FFFF000, 0x7FFFF000 - HEAD),
    (0x80000000 + HEAD, 0x80000000),
    (0x80000000, BYTES),
    (0xFFFFFFFF, 0xFFFFFFFF),
]


@pytest.mark.parametrize("sizes", [*STREAMS, (HEAD + BYTES + 6, BYTES), (HEAD + BYTES, BYTES + 6), (0, BYTES)])
def test_a_whole_wav_is_read_whatever_its_sizes(sizes: tuple[int, int], tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", TONE)
    path.write_bytes(_sized(path.read_bytes(), *sizes))
    assert np.abs(read(path)[0] - TONE).max() < 1 / 2**15


@pytest.mark.parametrize("riff", [0, HEAD + BYTES, 0x7FFFF000, 0xFFFFFFFF])
def test_a_cut_wav_is_known_by_the_size_of_its_samples(riff: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", TONE)
    path.write_bytes(_sized(path.read_bytes(), riff, BYTES)[:-100])
    refused(path, "lacks its last 100 bytes")


@pytest.mark.parametrize(("subtype", "field"), [("ULAW", b"-s1 1"), ("ALAW", b"-s1 1"), ("PCM_16", b"-i 2")])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_nist_file_is_known_by_the_number_of_its_samples(
    subtype: str, field: bytes, channels: int, tmp_path: Path
) -> None:
    samples = np.stack([TONE] * channels, axis=1)
    path = write(tmp_path / "a.sph", samples, subtype=subtype)
    content = path.read_bytes()
    assert b"sample_n_bytes " + field in content
    assert np.abs(read(path)[0] - TONE).max() < 0.02
    width = 2 if subtype == "PCM_16" else 1
    path.write_bytes(content[: -100 * channels * width])
    refused(path, "lacks its last 100 samples")


def test_a_cut_wav_is_known_also_behind_many_words(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", TONE)
    words = b"LIST" + (4 + 8 + 5000).to_bytes(4, "little") + b"INFOICMT" + (5000).to_bytes(4, "little") + b"a" * 5000
    content = path.read_bytes()
    longer = _sized(content[:36] + words + content[36:], HEAD + BYTES + len(words), BYTES)
    path.write_bytes(longer)
    assert len(read(path)[0]) == len(TONE)
    path.write_bytes(longer[:-100])
    refused(path, "lacks its last 100 bytes")


def test_a_recording_in_blocks_that_lacks_its_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", TONE, subtype="MS_ADPCM")
    assert np.abs(read(path)[0][: len(TONE)] - TONE).max() < 0.05
    path.write_bytes(path.read_bytes()[:-300])
    refused(path, "lacks its last 300 bytes")


def test_kinds_that_nobody_can_tell_whole_and_counts_that_are_missing_are_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", TONE, 8000, format="AIFF")
    refused(tmp_path / "a.wav", "which is AIFF")
    path = write(tmp_path / "a.flac", TONE)
    content = bytearray(path.read_bytes())
    content[21] &= 0xF0  # of STREAMINFO, the number of samples
    content[22:26] = bytes(4)
    path.write_bytes(content)
    refused(path, "say how many samples")


def test_bits_that_have_changed_are_noticed_where_the_format_can_tell(tmp_path: Path) -> None:
    path = write(tmp_path / "a.flac", TONE)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    refused(path, "whole")


@pytest.mark.parametrize("content", [np.array([]), np.array([0.1, np.nan]), np.array([np.inf, 0.1])])
def test_no_samples_and_samples_that_are_no_numbers_are_refused(content: np.ndarray, tmp_path: Path) -> None:
    refused(write(tmp_path / "a.wav", content, subtype="FLOAT"), "finite")


def test_samples_and_rates_that_nobody_means_are_refused(tmp_path: Path) -> None:
    refused(
        write(tmp_path / "a.wav", np.array([0.1, 1e38]), subtype="FLOAT"), "between -1 and 1, got .* with one of 1e"
    )
    refused(write(tmp_path / "b.wav", TONE, 2**31 - 1), "1,000,000 samples a second at most, got .* 2,147,483,647")


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "a.wav", "No such file")


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.wav", TONE)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    refused(path, r'soundfile.*pip install "stiefelkit\[speech\]"', named="")


def refused(path: Path, words: str, named: str | None = None) -> None:
    with pytest.raises(DataError, match=words) as caught:
        read(path)
    sentence = str(caught.value)
    assert len(sentence.splitlines()) == 1
    assert sentence.endswith(".")
    assert (str(path) if named is None else named) in sentence
