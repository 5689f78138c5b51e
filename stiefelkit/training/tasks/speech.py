"""Speech: predict the next frame of a short-time spectrum."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from stiefelkit.errors import DataError, OptionError, needs
from stiefelkit.numbers import FLAG, integer, optional, validate_fields_
from stiefelkit.training import data
from stiefelkit.training.recipes import recipes_of
from stiefelkit.training.tasks.task import Parted, Pieces

if TYPE_CHECKING:
    from torch import Tensor, nn

RATE, WINDOW, HOP = 8000, 256, 128
BINS = WINDOW // 2 + 1
FLOOR = 1e-5  # of a power |X|^2, for samples in [-1, 1]: silence is at -50 dB
WHO = "Task 'speech'"
CORE_TEST = frozenset(
    "fdhc0 felc0 fjlm0 fmgd0 fmld0 fnlp0 fpas0 fpkt0 mbpm0 mcmj0 mdab0 mgrt0 mjdh0 mjln0 mjmp0 mklt0 mlll0 mlnt0 mnjm0 "
    "mpam0 mtas1 mtls0 mwbt0 mwew0".split()
)
"""24 speakers, 192 sentences: those that the corpus itself names."""
DEVELOPMENT = frozenset(
    "fadg0 faks0 fcal1 fcmh0 fdac1 fdms0 fdrw0 fedw0 fgjd0 fjem0 fjmg0 fjsj0 fkms0 fmah0 fmml0 fnmr0 frew0 fsem0 majc0 "
    "mbdg0 mbns0 mbwm0 mcsh0 mdlf0 mdls0 mdvc0 mers0 mgjf0 mglb0 mgwt0 mjar0 mjfc0 mjsw0 mmdb1 mmdm2 mmjr0 mmwh0 mpdf0 "
    "mrcs0 mreb0 mrjm4 mrjr0 mroa0 mrtk0 mrws1 mtaa0 mtdt0 mteb0 mthc0 mwjg0".split()
)
"""50 speakers, 400 sentences (Halberstadt 1998)."""


@dataclass(frozen=True)
class Speech(Parted):
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
        standardized: the model reads and answers levels with mean 0 and deviation 1 over the training recordings, bin
            by bin; scores are those of decibels all the same. Without it, it has to learn first where they are.
    """

    train_size: int | None = None
    validation_speakers: int = 7
    standardized: bool = True

    name: ClassVar[str] = "speech"
    input_size: ClassVar[int] = BINS
    output_size: ClassVar[int] = BINS
    last_only: ClassVar[bool] = False
    headline: ClassVar[str] = "loss"
    loss_label: ClassVar[str] = "squared error of the next frame (dB^2)"
    recipes = recipes_of("speech")
    scores: ClassVar[tuple[str, ...]] = ("loss", "padded")

    def __post_init__(self) -> None:
        sizes = {"validation_speakers": integer(1), "train_size": optional(integer(1))}
        validate_fields_(self, "Speech", **sizes, standardized=FLAG)

    @property
    def baseline(self) -> dict[str, float]:
        total, real = line_errors(self._split("train"), self._split("test"))
        return {"loss": total / (real * BINS), "padded": total / (len(self._split("test")) * self._longest() * BINS)}

    def data_digest(self) -> str:
        return data.digest(path.read_bytes() for part in self._corpus().values() for path in part.paths)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the squared error, mean over the bins of all real frames."""
        total, real = squared_errors(output, y)
        return total / real

    def answer(self, model: nn.Module, x: Tensor) -> Tensor:
        if not self.standardized:
            return model(x)
        mean, deviation = (scale.to(x.device) for scale in scales(self._split("train")))
        return model((x - mean) / deviation) * deviation + mean

    def trimmed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        longest = int(y[..., 0].isfinite().sum(dim=1).max())
        return x[:, :longest], y[:, :longest]

    def totals(self, output: Tensor, y: Tensor) -> dict[str, tuple[float, float]]:
        """Returns the sum of squared errors over the number of real ones, and over that with all padding."""
        total, real = map(float, squared_errors(output, y))
        return {"loss": (total, real), "padded": (total, len(y) * self._longest() * BINS)}

    def _corpus(self) -> dict[str, Recordings]:
        return corpus(data.folder(self.name), self.validation_speakers)

    def _longest(self) -> int:
        """Returns the number of targets of the longest recording in any split."""
        return max(len(frames) for part in self._corpus().values() for frames in part.pieces) - 1

    def _split(self, name: str) -> Recordings:
        part = self._corpus()[name]
        return part if name != "train" or self.train_size is None else spaced(part, self.train_size)


@dataclass(frozen=True, eq=False)
class Recordings(Pieces):
    """Levels of each recording, (frames, 129) in decibels, and its file; targets behind the end are infinite."""

    filling: tuple[float, float] = (0.0, math.inf)
    paths: list[Path] = field(default_factory=list)


@functools.lru_cache(maxsize=2)
def spaced(part: Recordings, size: int) -> Recordings:
    """Returns evenly spaced recordings, so that they are of all speakers."""
    total = len(part)
    needs(size <= total, OptionError, "Speech", f"train_size <= {total}, the recordings that there are", size)
    chosen = [i * total // size for i in range(size)]
    return Recordings([part.pieces[i] for i in chosen], paths=[part.paths[i] for i in chosen])


@functools.lru_cache(maxsize=1)
def corpus(root: Path, validation_speakers: int) -> dict[str, Recordings]:
    """Reads the recordings of each split, the shortest first, but in "train"; raises DataError as `recordings` does."""
    read_in = {}
    for split, paths in recordings(root, validation_speakers).items():
        pairs = [(path, levels(path)) for path in paths]
        if split != "train":  # parts of recordings of one length have little padding
            pairs.sort(key=lambda pair: len(pair[1]))
        read_in[split] = Recordings([frames for _, frames in pairs], paths=[path for path, _ in pairs])
    return read_in


def levels(path: Path) -> Tensor:
    """Returns 10 log10(|X|^2 + 1e-5), (frames, 129), of each whole window of a recording at 8 kHz."""
    import torch

    samples, least = torch.from_numpy(data.recording(path, RATE)[0]), WINDOW + HOP
    words = f"recordings of {least} samples at {RATE} Hz or more"
    needs(len(samples) >= least, DataError, WHO, words, f"{len(samples)} in {path}; remove it")
    spectra = torch.fft.rfft(samples.unfold(0, WINDOW, HOP) * torch.hann_window(WINDOW, periodic=True, device="cpu"))
    return 10 * torch.log10(spectra.abs().square() + FLOOR)


@functools.lru_cache(maxsize=2)
def scales(part: Recordings) -> tuple[Tensor, Tensor]:
    """Returns mean and deviation of each bin; bins that never change have deviation 1."""
    import torch

    count = sum(map(len, part.pieces))
    mean, square = torch.zeros(2, BINS, dtype=torch.float64, device="cpu")
    for frames in map(torch.Tensor.double, part.pieces):
        mean += frames.sum(0)
        square += frames.square().sum(0)
    mean, variance = mean / count, (square / count - (mean / count).square()).clamp_min(0)
    return mean.float(), torch.where(variance > 1e-6, variance, 1.0).sqrt().float()


def squared_errors(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of squared errors where targets are real, and their number."""
    real = y.isfinite()
    return (output - y).where(real, 0.0).square().sum(), real.sum()


@functools.lru_cache(maxsize=2)
def line_errors(train: Recordings, test: Recordings) -> tuple[float, int]:
    """Returns the sum of squared errors of the best straight line for each bin, and the number of targets."""
    import torch

    sums = torch.zeros(5, BINS, dtype=torch.float64, device="cpu")
    for frames in map(torch.Tensor.double, train.pieces):
        x, y = frames[:-1], frames[1:]
        sums += torch.stack([part.sum(0) for part in (torch.ones_like(x), x, y, x * x, x * y)])
    count, x, y, xx, xy = sums
    slope = (xy - x * y / count) / (xx - x * x / count).clamp_min(1e-12 * count)
    line, offset = slope.float(), ((y - slope * x) / count).float()
    errors = (float((line * each[:-1] + offset - each[1:]).square().sum()) for each in test.pieces)
    return sum(errors), sum(len(each) - 1 for each in test.pieces)


def recordings(root: Path, validation_speakers: int) -> dict[str, list[Path]]:
    """Returns the files of each part: TIMIT's own parts, without SA sentences, where TRAIN holds folders DR1 to DR8.

    Of other folders `validation_speakers` of TRAIN, evenly spaced by name, are held out for validation.
    """
    inside = [{child.name.lower(): child for child in _folders(folder)} for folder in (root, *_folders(root))]
    halves = [(folders["train"], folders["test"]) for folders in inside if {"train", "test"} <= folders.keys()]
    layout = "one folder with TRAIN and TEST in it, and in these a folder for each speaker"
    needs(len(halves) == 1, DataError, WHO, layout, f"{root} with {len(halves)} of that kind; {data.REMEDY}")
    regions = [[dr for dr in _folders(half) if re.fullmatch("dr[1-8]", dr.name.lower())] for half in halves[0]]
    if regions[0]:
        train, test = (_speakers(half, r"sa\d") for half in regions)
        missing = sorted((DEVELOPMENT | CORE_TEST) - test.keys())
        words = f"the development and core test speakers of TIMIT in {root}"
        needs(not missing, DataError, WHO, words, f"none of {', '.join(missing)}")
        chosen = {"train": (train, {*train}), "valid": (test, DEVELOPMENT), "test": (test, CORE_TEST)}
    else:
        train, test = (_speakers([half]) for half in halves[0])
        names, count = list(train), validation_speakers
        words = f"more than {count} speakers in {root}, to hold {count} of them out for validation"
        needs(count < len(names), DataError, WHO, words, f"{len(names)}; set --validation-speakers")
        held = {names[(2 * k + 1) * len(names) // (2 * count)] for k in range(count)}
        chosen = {"train": (train, train.keys() - held), "valid": (train, held), "test": (test, {*test})}
    paths = {
        split: [path for name, files in speakers.items() if name in some for path in files]
        for split, (speakers, some) in chosen.items()
    }
    needs(all(paths.values()), DataError, WHO, f"recordings ({', '.join(data.AUDIO)}) in each part", str(root))
    return paths


def _folders(root: Path) -> list[Path]:
    return sorted(root.glob("[!.]*/"))


def _speakers(parents: Iterable[Path], left_out: str = "(?!)") -> dict[str, list[Path]]:
    """Maps a name to recordings; a copy in another format, SX37.WAV.wav beside SX37.WAV, is none of its own."""
    recordings, ending = {}, re.compile(rf"({'|'.join(map(re.escape, data.AUDIO))})+$", re.IGNORECASE)
    for speaker in (speaker for parent in parents for speaker in _folders(parent)):
        files: dict[Path, Path] = {}
        for path in sorted(speaker.rglob("[!.]*")):
            name = ending.sub("", path.name).lower()
            if ending.search(path.name) and not re.fullmatch(left_out, name):
                files.setdefault(path.with_name(name), path)
        if files:
            recordings[speaker.name.lower()] = list(files.values())
    return recordings
