"""What can be predicted of a frame without memory: the baseline of speech."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stiefelkit.training.tasks.speech.corpus import Corpus
from stiefelkit.training.tasks.speech.quality import judged
from stiefelkit.training.tasks.speech.spectra import BINS

__all__ = ["Line", "line_scores"]


@dataclass(frozen=True, eq=False)
class Line:
    """The best prediction of a level from that of the same bin one frame before, a straight line for each bin.

    Args:
        slope: (129,).
        offset: (129,).
    """

    slope: Tensor
    offset: Tensor

    @classmethod
    def fitted(cls, frames: Sequence[Tensor]) -> "Line":
        """Returns the lines of least squares over some recordings."""
        sums = torch.zeros(5, BINS, dtype=torch.float64)
        for recording in frames:
            x, y = recording[:-1].double(), recording[1:].double()
            sums += torch.stack([torch.ones_like(x).sum(0), x.sum(0), y.sum(0), (x * x).sum(0), (x * y).sum(0)])
        count, x, y, xx, xy = sums
        slope = (xy - x * y / count) / (xx - x * x / count).clamp_min(1e-12 * count)
        return cls(slope.float(), ((y - slope * x) / count).float())

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the predictions, of the shape of the frames before."""
        return self.slope * x + self.offset


@functools.lru_cache(maxsize=2)
def line_scores(corpus: Corpus, chosen: Sequence[int], quality: bool) -> dict[str, float]:
    """Returns what lines fitted to some training recordings score on the test recordings.

    Args:
        corpus: the recordings.
        chosen: those to fit, by their place in "train".
        quality: judge by ear, too.
    """
    line, test = Line.fitted([corpus.frames["train"][i] for i in chosen]), corpus.frames["test"]
    total = sum(float((line(recording[:-1]) - recording[1:]).square().sum()) for recording in test)
    real = sum(len(recording) - 1 for recording in test)
    scores = {"loss": total / (real * BINS), "padded": total / (len(test) * corpus.longest * BINS)}
    return scores | (judged(corpus, "test", line) if quality else {})
