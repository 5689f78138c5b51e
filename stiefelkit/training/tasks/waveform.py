"""Sequence generation: say a piece of a recording by heart."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from stiefelkit.checks import of_type
from stiefelkit.errors import DataError, needs
from stiefelkit.numbers import at_least, integer, validate_fields_
from stiefelkit.training import data
from stiefelkit.training.recipes import recipes_of
from stiefelkit.training.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor

WHO = "Task 'waveform'"


@dataclass(frozen=True)
class Waveform(Task):
    """Generates a short excerpt of a recording from an input of ones.

    Input: T times the number 1. Target: T samples, scaled to the largest magnitude 1. There is one sequence, for
    training and for the score alike: what is measured is what a net of a given size can hold. The loss is the
    normalized squared error, NMSE: divided by the variance of the excerpt, so that its mean scores 1.

    The data are a folder of yours (--data DIR or STIEFELKIT_DATA) with WAV, FLAC or NIST SPHERE files, which the extra
    [speech] reads. The papers take five consecutive excerpts of 320 samples of music at 44.1 kHz, 7 ms each, one net
    for each, and the mean of the five scores.

    Reference: Koutnik et al. 2014 (Clockwork RNN), in the form of Mhammedi et al. 2017.

    Args:
        T: samples of an excerpt.
        excerpt: which of the consecutive excerpts, from 0.
        start: seconds from the start of the file to the first excerpt.
        file: the recording in the folder of data; the first by name if left out.
    """

    T: int = 320
    excerpt: int = 0
    start: float = 0.0
    file: str = ""

    name: ClassVar[str] = "waveform"
    train_size: ClassVar[int] = 1
    input_size: ClassVar[int] = 1
    output_size: ClassVar[int] = 1
    last_only: ClassVar[bool] = False
    headline: ClassVar[str] = "loss"
    loss_label: ClassVar[str] = "normalized squared error"
    recipes = recipes_of("waveform")

    def __post_init__(self) -> None:
        validate_fields_(self, "Waveform", T=integer(2), excerpt=integer(0), start=at_least(0), file=of_type(str))

    @property
    def baseline(self) -> dict[str, float]:
        """The mean of the excerpt, all the time."""
        return {"loss": 1.0}

    def batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        self.batches_per_epoch(batch_size)
        return self.held_out()

    def held_out(self) -> tuple[Tensor, Tensor]:
        import torch

        y = _excerpt(data.folder(self.name), self.file, self.start, self.excerpt, self.T)
        return torch.ones(1, self.T, 1, device="cpu"), y

    def data_digest(self) -> str:
        return data.digest([_recording(data.folder(self.name), self.file).read_bytes()])

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the squared error over the variance."""
        return (output.squeeze(-1) - y).square().mean() / y.var(correction=0)


@functools.lru_cache(maxsize=8)
def _excerpt(folder: Path, file: str, start: float, excerpt: int, length: int) -> Tensor:
    import torch

    path = _recording(folder, file)
    samples, rate = data.recording(path)
    first = round(start * rate) + excerpt * length
    y = torch.from_numpy(samples[first : first + length])
    is_whole = len(y) == length and bool(y.min() < y.max())
    words = f"an excerpt of {length} samples from {first} on that is not constant"
    needs(is_whole, DataError, WHO, words, f"{len(samples)} in {path}; set --start, --excerpt or --file")
    return (y / y.abs().max()).unsqueeze(0)


def _recording(folder: Path, file: str) -> Path:
    paths = [folder / file] if file else sorted(p for p in folder.rglob("[!.]*") if p.suffix.lower() in data.AUDIO)
    words = f"a recording ({', '.join(data.AUDIO)})"
    needs(bool(paths) and paths[0].is_file(), DataError, WHO, words, f"none in {folder / file}")
    return paths[0]
