"""The recordings of a folder as short-time spectra, read once: levels in decibels, and back with true phases."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stiefelkit.errors import DataError
from stiefelkit.training import data
from stiefelkit.training.audio import read
from stiefelkit.training.tasks.speech.layout import recordings

__all__ = [
    "BINS",
    "HOP",
    "RATE",
    "WINDOW",
    "Corpus",
    "batch_of",
    "corpus",
    "digest",
    "examples",
    "levels",
    "rebuilt",
    "scales",
]

RATE, WINDOW, HOP = 8000, 256, 128
BINS = WINDOW // 2 + 1
FLOOR = 1e-5
"""Of a power |X|^2, for samples in [-1, 1]: silence is at -50 dB."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Files and levels of each recording, (frames, 129) in decibels, by split: the shortest first, but in "train"."""

    paths: dict[str, list[Path]]
    frames: dict[str, list[Tensor]]

    @property
    def longest(self) -> int:
        """Number of targets of the longest recording in any split."""
        return max(len(frames) for split in self.frames.values() for frames in split) - 1

    def samples(self, split: str) -> list[Tensor]:
        """Returns the recordings themselves, which are not kept."""
        return [_samples(path) for path in self.paths[split]]


@functools.lru_cache(maxsize=1)
def corpus(root: Path, validation_speakers: int) -> Corpus:
    """Reads a folder.

    Raises:
        DataError: the layout is not known, or a file is damaged or too short for an input and a target.
    """
    paths = recordings(root, validation_speakers)
    frames = {split: [_levels(path) for path in files] for split, files in paths.items()}
    for split in ("valid", "test"):  # parts of recordings of one length have little padding
        order = sorted(range(len(paths[split])), key=lambda i: len(frames[split][i]))
        paths[split], frames[split] = [paths[split][i] for i in order], [frames[split][i] for i in order]
    return Corpus(paths, frames)


@functools.lru_cache(maxsize=2)
def scales(corpus: Corpus, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns mean and deviation of each bin over some training recordings; bins that never change have deviation 1."""
    count, total, squares = 0, torch.zeros(BINS, dtype=torch.float64), torch.zeros(BINS, dtype=torch.float64)
    for recording in (corpus.frames["train"][i].double() for i in chosen):
        count, total, squares = count + len(recording), total + recording.sum(0), squares + recording.square().sum(0)
    mean = total / count
    variance = (squares / count - mean.square()).clamp_min(0)
    return mean.float(), torch.where(variance > 1e-6, variance, 1.0).sqrt().float()


@functools.lru_cache(maxsize=4)
def examples(corpus: Corpus, split: str) -> tuple[Tensor, Tensor]:
    """Returns x and y of a whole split, the same tensors each time."""
    return batch_of(corpus.frames[split])


@functools.lru_cache(maxsize=2)
def digest(corpus: Corpus) -> str:
    """Returns what the files of all splits are known by, in the order of the splits."""
    return data.digest(path.read_bytes() for paths in corpus.paths.values() for path in paths)


def batch_of(frames: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns x and y of recordings: each frame, and the one that follows; zero and infinity after the end.

    The last frame has no successor, so that it is no input; a target is infinite exactly where its input is padding.
    """
    x = pad_sequence([recording[:-1] for recording in frames], batch_first=True)
    y = pad_sequence([recording[1:] for recording in frames], batch_first=True, padding_value=float("inf"))
    return x, y


def _samples(path: Path) -> Tensor:
    samples, _ = read(path, RATE)
    return torch.from_numpy(samples)


def _levels(path: Path) -> Tensor:
    samples = _samples(path)
    if len(samples) < WINDOW + HOP:
        raise DataError(
            f"Task 'speech' needs recordings of {WINDOW + HOP} samples at {RATE} Hz or more, got {len(samples)} in "
            f"{path}; remove it, or put a whole one there."
        )
    return levels(samples)


def levels(samples: Tensor) -> Tensor:
    """Returns 10 log10(|X|^2 + 1e-5) of each whole window, (frames, 129): none begins before or ends after the signal.

    Args:
        samples: (length,), at 8 kHz, in [-1, 1].
    """
    return 10 * torch.log10(_spectra(samples).abs().square() + FLOOR)


def rebuilt(samples: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a signal from its second frame on, and what it becomes with predicted magnitudes and its own phases.

    `predicted` has the levels of all frames but the first. Frames are added by weighted overlap (Griffin and Lim 1984),
    which gives the samples themselves back if the levels are the true ones.
    """
    true = _spectra(samples)[1:]
    magnitudes = (10 ** (predicted / 10) - FLOOR).clamp_min(0).sqrt()
    return _signal(true), _signal(torch.polar(magnitudes, true.angle()))


@functools.cache
def _window() -> Tensor:
    return torch.hann_window(WINDOW, periodic=True)


def _spectra(samples: Tensor) -> Tensor:
    return torch.fft.rfft(samples.unfold(0, WINDOW, HOP) * _window())


def _signal(spectra: Tensor) -> Tensor:
    # centred, istft leaves out half a window at each end, where one frame alone, near zero, says what is there
    return torch.istft(spectra.mT, WINDOW, HOP, window=_window(), center=True)
