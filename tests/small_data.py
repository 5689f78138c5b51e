"""Folders of data that tests make: speech of many speakers, TIMIT's layout, a text, a tone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile

from stiefelkit.testing import seeds
from stiefelkit.training.tasks.speech import CORE_TEST, DEVELOPMENT

RATE = 8000


def write(path: Path, samples: np.ndarray, rate: int = RATE, subtype: str = "PCM_16") -> Path:
    """Writes a recording in the format of its ending; NIST SPHERE for .sph and for capitals."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {".wav": "WAV", ".flac": "FLAC", ".sph": "NIST", ".WAV": "NIST"}
    soundfile.write(path, samples, rate, subtype, format=kinds[path.suffix])
    return path


def voices() -> Callable[[float], np.ndarray]:
    """Returns what makes a recording of so many seconds: filtered noise that grows and fades, each another."""
    source = np.random.default_rng(seeds.seed(15))

    def voice(duration: float) -> np.ndarray:
        noise = source.normal(size=round(duration * RATE))
        swell = 0.1 * np.sin(np.linspace(0.2, 3.0, len(noise))) ** 2
        return swell * np.convolve(noise, [1.0, 0.9, 0.5], "same")

    return voice


def speech(root: Path, speakers: int = 10, each: int = 8, ending: str = ".wav") -> Path:
    """Writes train/SPEAKER and test/SPEAKER, with recordings of several lengths."""
    voice = voices()
    for half, count in (("train", speakers), ("test", 3)):
        for speaker in range(count):
            for k in range(each):
                duration = 0.06 + 0.01 * ((3 * k + speaker) % 11)
                write(root / half / f"{half[0]}{speaker:02}" / f"u{k}{ending}", voice(duration))
    return root


def timit(root: Path, others: int = 3) -> Path:
    """Writes TRAIN/DRn/SPEAKER of four speakers, and TEST with the development, the core test and other speakers."""
    voice = voices()
    test = [*sorted(DEVELOPMENT | CORE_TEST), *(f"mxxx{k}" for k in range(others))]
    for half, names in (("TRAIN", [f"ftra{k}" for k in range(4)]), ("TEST", test)):
        for k, name in enumerate(names):
            for sentence in ("SA1", "SX37"):
                write(root / half / f"DR{1 + k % 8}" / name.upper() / f"{sentence}.WAV", voice(0.06))
    return root


def text(path: Path, lines: int = 200) -> Path:
    """Writes lines of words, in which each word has a favourite successor."""
    source = np.random.default_rng(seeds.seed(16))
    words = ["abc", "bad", "cab", "dab", "ebb", "fade"]
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = source.integers(len(words), size=(lines, 8))
    path.write_text("\n".join(" ".join(words[k] for k in row) for row in drawn))
    return path


def every(root: Path) -> Path:
    """Writes the data of every task that reads some."""
    speech(root / "speech")
    text(root / "chars" / "words.txt", 700)
    write(root / "waveform" / "tone.wav", 0.5 * np.sin(np.arange(4000) ** 1.2 / 9))
    return root
