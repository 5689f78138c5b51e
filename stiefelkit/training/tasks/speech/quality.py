"""Quality of predicted frames by ear, SegSNR, STOI and PESQ; and the baseline, a line for each bin."""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stiefelkit.errors import DataError
from stiefelkit.training.audio import needed
from stiefelkit.training.tasks.speech.corpus import BINS, RATE, Corpus, rebuilt

UNJUDGED = "Quality {} needs a recording that is long and loud enough to be judged, got none."
SEGMENT = 240
"""30 ms."""
QUIETEST, LOUDEST = -10.0, 35.0
"""A segment counts with at least and at most so many decibels."""


def installed() -> None:
    """Raises DataError, with what to install, if pystoi or pesq is missing."""
    with needed("pystoi"):
        import pystoi  # noqa: F401
    with needed("pesq"):
        import pesq  # noqa: F401  # pyright: ignore[reportMissingImports]


def quality(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Returns the mean over pairs of true and rebuilt samples, at 8 kHz, of each score of `JUDGES`; higher is better.

    Segmental SNR in decibels, over segments of 30 ms cut off at -10 and 35; STOI in [0, 1]; PESQ of narrow band
    (ITU-T P.862 with the mapping of P.862.1), 1 to 4.5. A recording that STOI or PESQ cannot judge, since it is too
    short or silent, is left out of that mean. Raises DataError if pystoi or pesq is missing, or a score has no
    recording that it can judge.
    """
    installed()
    kept: dict[str, list[float]] = {name: [] for name in JUDGES}
    for true, heard in pairs:
        for name, judge in JUDGES.items():
            score = judge(true, heard)
            if score is not None:
                kept[name].append(score)
    for name, scores in kept.items():
        if not scores:
            raise DataError(UNJUDGED.format(name))
    return {name: float(np.mean(scores)) for name, scores in kept.items()}


@functools.lru_cache(maxsize=4)
def require_judgeable(corpus: Corpus, split: str) -> None:
    """Raises DataError unless every score has a recording that it can judge."""
    left = JUDGES
    for samples, frames in zip(corpus.samples(split), corpus.frames[split], strict=True):
        if len(frames) > 2:
            true, heard = (part.numpy() for part in rebuilt(samples, frames[1:]))
            left = {name: judge for name, judge in left.items() if judge(true, heard) is None}
        if not left:
            return
    raise DataError(UNJUDGED.format(next(iter(left))))


def judged(corpus: Corpus, split: str, predict: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Returns the quality of recordings of a split with levels that `predict` makes of all frames but the last."""
    recordings = zip(corpus.samples(split), corpus.frames[split], strict=True)
    # of two frames one is predicted, which has no other to be added to
    rebuilds = (rebuilt(samples, predict(frames[:-1])) for samples, frames in recordings if len(frames) > 2)
    return quality((true.numpy(), heard.numpy()) for true, heard in rebuilds)


def _segsnr(true: np.ndarray, heard: np.ndarray) -> float | None:
    count = len(true) // SEGMENT
    signal, noise = (part[: count * SEGMENT].reshape(count, SEGMENT).astype(float) for part in (true, heard - true))
    power = np.square(signal).sum(axis=1)
    tiny = np.finfo(float).tiny
    ratios = 10 * np.log10((power + tiny) / (np.square(noise).sum(axis=1) + tiny))
    spoken = ratios[power > 0]
    return float(np.clip(spoken, QUIETEST, LOUDEST).mean()) if len(spoken) else None


def _stoi(true: np.ndarray, heard: np.ndarray) -> float | None:
    from pystoi import stoi

    with warnings.catch_warnings():
        # it warns, and returns 1e-5, where less than 0.4 s are not silent
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return float(stoi(true, heard, RATE))
        except (RuntimeWarning, ValueError):
            return None


def _pesq(true: np.ndarray, heard: np.ndarray) -> float | None:
    from pesq import PesqError, pesq  # pyright: ignore[reportMissingImports]

    score = pesq(RATE, true, heard, "nb", on_error=PesqError.RETURN_VALUES)
    return float(score) if score > 0 else None


JUDGES = {"segsnr": _segsnr, "stoi": _stoi, "pesq": _pesq}


@dataclass(frozen=True, eq=False)
class Line:
    """The best prediction of a level from that of the same bin one frame before, a straight line for each bin."""

    slope: Tensor
    offset: Tensor

    @classmethod
    def fitted(cls, frames: Sequence[Tensor]) -> "Line":
        """Returns the lines of least squares over some recordings."""
        sums = torch.zeros(5, BINS, dtype=torch.float64, device="cpu")
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
    """Returns what lines fitted to the chosen training recordings score on the test set; by ear, too, if asked."""
    line, test = Line.fitted([corpus.frames["train"][i] for i in chosen]), corpus.frames["test"]
    total = sum(float((line(recording[:-1]) - recording[1:]).square().sum()) for recording in test)
    real = sum(len(recording) - 1 for recording in test)
    scores = {"loss": total / (real * BINS), "padded": total / (len(test) * corpus.longest * BINS)}
    return scores | (judged(corpus, "test", line) if quality else {})
