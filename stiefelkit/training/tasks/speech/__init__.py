"""Speech: predict the next frame of a short-time spectrum."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stiefelkit.errors import OptionError
from stiefelkit.numbers import FLAG, integer, optional, validate_fields_
from stiefelkit.training import data
from stiefelkit.training.recipes import LRU_RATES, Recipe, of_planes
from stiefelkit.training.tasks.task import Task, evaluating

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stiefelkit.training.tasks.speech.corpus import Corpus

__all__ = ["Speech"]

_of = functools.partial(Recipe.of, steps=3000, batch_size=28, eval_every=300, checkpoint_every=300)
RECIPES = {
    "scornn": _of(224, rates={"skew": 1e-3}, options=lambda n: {"negative": n // 10}),
    "scurnn": _of(128, 5e-3, rates={"skew": 1e-4}),
    "full_urnn": _of(128, optimizer="multiplicative_cayley", rates={"stiefel": 1e-3}),
    "restricted_urnn": _of(158),
    "ornn": _of(256, options=lambda n: {"reflections": n // 4}),
    "eurnn": _of(212, options=lambda n: {"layers": 2}),
    "exprnn": _of(224, rates={"skew": 1e-4}),
    "lie_urnn": _of(128),
    "margin_rnn": _of(187, rates={"skew": 1e-4}),
    "goru": _of(128),
    "rotrnn": _of(140, 4e-3, optimizer="adamw", rates={"angle": 1e-3, "log_rate": 1e-3}, options=of_planes),
    "lru": _of(140, 4e-3, optimizer="adamw", rates=LRU_RATES),
    "irnn": _of(187, clip_norm=1.0),
    "henaff_rnn": _of(187, clip_norm=1.0),
    "gru": _of(101, clip_norm=1.0),
    "lstm": _of(84, clip_norm=1.0),
}
"""About 83,000 parameters, the smallest size of the papers' tables.

The sizes and rates of scornn, scurnn, lstm, full_urnn and restricted_urnn are the papers', but for the optimizer of
scornn's `skew`, RMSprop there, and the rate of scurnn, 1e-3 there, with which it takes several times the steps: its
first answers are far too loud. The mesh of goru wants a power of two, which leaves it larger. Batches of 28 are those
of Wisdom et al. 2016; models other than scornn, scurnn and lstm have not been tried.
"""


@dataclass(frozen=True)
class Speech(Task):
    """Reads speech frame by frame, and must predict the next frame of its spectrum.

    Frames are 129 levels in decibels, 10 log10(|X|^2 + 1e-5), of windows of 256 samples (periodic Hann) every 128, at
    8 kHz; other rates are resampled. Input: frames 1 to L-1 of a recording; target: frames 2 to L. Recordings of a
    batch are padded behind their end, after the logarithm, where there is no target.

    "loss" is the squared error in dB^2, averaged over the bins of frames that are real. "padded" is the papers' mean:
    the same sum over real frames, divided by what there were if each recording had the length of the longest of the
    corpus. Its value says how much padding there is, too, so that corpora cannot be compared by it.

    The data are a folder of yours (--data DIR or STIEFELKIT_DATA) with WAV, FLAC or NIST SPHERE files: TIMIT as it is
    distributed, split as in the papers, without SA sentences; or TRAIN/SPEAKER and TEST/SPEAKER, of whose training
    speakers some are held out for validation. The extra [speech] reads them. The baseline is the best straight line
    from each bin of the last frame.

    Reference: Wisdom et al. 2016, in the form of Helfrich et al. 2018, who print figures that this task is not made to
    reproduce: neither published the code of it.

    Args:
        train_size: recordings to train on, out of all training speakers; all if left out.
        validation_speakers: training speakers to hold out, where the data are not TIMIT.
        quality: judge what is predicted by ear, too: SegSNR, STOI and PESQ of signals with the predicted magnitudes and
            the true phases.
        standardized: the model reads and answers levels with mean 0 and deviation 1 over the training recordings, bin
            by bin; scores are those of decibels all the same. Without it, it has to learn first where they are.
    """

    train_size: int | None = None
    validation_speakers: int = 7
    quality: bool = False
    standardized: bool = True

    name: ClassVar[str] = "speech"
    input_size: ClassVar[int] = 129
    output_size: ClassVar[int] = 129
    last_only: ClassVar[bool] = False
    headline: ClassVar[str] = "loss"
    loss_label: ClassVar[str] = "squared error of the next frame (dB^2)"
    recipes: ClassVar[dict[str, Recipe]] = RECIPES

    def __post_init__(self) -> None:
        sizes = {"validation_speakers": integer(1), "train_size": optional(integer(1))}
        validate_fields_(self, "Speech", **sizes, quality=FLAG, standardized=FLAG)

    @property
    def scores(self) -> tuple[str, ...]:
        """Both means, and the scores of quality if they are asked for."""
        return ("loss", "padded", *(("segsnr", "stoi", "pesq") if self.quality else ()))

    @property
    def baseline(self) -> dict[str, float]:
        """The scores of the best straight line from each bin of the last frame."""
        from stiefelkit.training.tasks.speech.quality import line_scores

        return dict(line_scores(self._corpus(), self._chosen(), self.quality))

    @property
    def sequences(self) -> int:
        """Number of training recordings."""
        return len(self._corpus().frames["train"]) if self.train_size is None else self.train_size

    def batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns some recordings of the epoch's own shuffle, which is drawn from (seed, epoch)."""
        from stiefelkit.training.tasks.speech.corpus import batch_of

        frames, chosen = self._corpus().frames["train"], self._chosen()
        return batch_of([frames[chosen[i]] for i in self._visited(step, batch_size, seed).tolist()])

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Returns the test recordings, the shortest first."""
        return self._judgeable("test")

    def validation(self) -> tuple[Tensor, Tensor]:
        """Returns those of the validation speakers, the shortest first."""
        return self._judgeable("valid")

    def data_digest(self) -> str:
        """Returns that of the recordings of all splits."""
        return self._corpus().digest

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the squared error, mean over the bins of all real frames."""
        total, real = self._errors(output, y)
        return total / real

    def answer(self, model: nn.Module, x: Tensor) -> Tensor:
        """Returns predicted levels in decibels."""
        if not self.standardized:
            return model(x)
        from stiefelkit.training.tasks.speech.corpus import scales

        mean, deviation = (scale.to(x.device) for scale in scales(self._corpus(), self._chosen()))
        return model((x - mean) / deviation) * deviation + mean

    def trimmed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns recordings without the padding behind the longest of them."""
        longest = int(y[..., 0].isfinite().sum(dim=1).max())
        return x[:, :longest], y[:, :longest]

    def totals(self, output: Tensor, y: Tensor) -> dict[str, tuple[float, float]]:
        """Returns the sum of squared errors over the number of real ones, and over that with all padding."""
        total, real = self._errors(output, y)
        padded = len(y) * self._corpus().longest * self.output_size
        return {"loss": (float(total), float(real)), "padded": (float(total), padded)}

    def evaluate(
        self, model: nn.Module, chunk: int | None = None, examples: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, float]:
        """Returns both means, and the quality if it is asked for and the examples are those of a split, with sound."""
        examples = self.held_out() if examples is None else examples
        scores = super().evaluate(model, chunk, examples)
        known = self._corpus().examples if self.quality else {}
        heard = next((split for split, (x, _) in known.items() if x is examples[0]), None)
        if heard is None:
            return scores
        from stiefelkit.training.tasks.speech.quality import judged

        with evaluating(model) as device:
            return scores | judged(
                self._corpus(), heard, lambda x: self.answer(model, x.unsqueeze(0).to(device)).squeeze(0).cpu()
            )

    def _errors(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        real = y.isfinite()
        return torch.where(real, output - y, 0.0).square().sum(), real.sum()

    def _judgeable(self, split: str) -> tuple[Tensor, Tensor]:
        if self.quality:
            from stiefelkit.training.tasks.speech import quality

            quality.installed()
            quality.require_judgeable(self._corpus(), split)
        return self._corpus().examples[split]

    def _corpus(self) -> Corpus:
        from stiefelkit.training.tasks.speech.corpus import corpus

        return corpus(data.folder(self.name), self.validation_speakers)

    def _chosen(self) -> tuple[int, ...]:
        """Returns the recordings to train on."""
        return _spaced(self.sequences, len(self._corpus().frames["train"]))


@functools.lru_cache(maxsize=2)
def _spaced(size: int, total: int) -> tuple[int, ...]:
    """Indices that are evenly spaced, so that a part of the recordings is of all speakers."""
    if size > total:
        raise OptionError(f"Speech needs train_size <= {total}, the recordings that there are, got {size}.")
    return tuple(i * total // size for i in range(size))
