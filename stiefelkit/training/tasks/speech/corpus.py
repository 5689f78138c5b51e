"""The recordings of a folder, read once: which are for training, validation and test, and their short-time spectra."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stiefelkit.errors import DataError
from stiefelkit.training import data
from stiefelkit.training.audio import ENDINGS, read

RATE, WINDOW, HOP = 8000, 256, 128
BINS = WINDOW // 2 + 1
FLOOR = 1e-5
"""Of a power |X|^2, for samples in [-1, 1]: silence is at -50 dB."""
Speakers = Mapping[str, list[Path]]

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


@dataclass(frozen=True, eq=False)
class Corpus:
    """Files and levels of each recording, (frames, 129) in decibels, by split: the shortest first, but in "train"."""

    paths: dict[str, list[Path]]
    frames: dict[str, list[Tensor]]

    @functools.cached_property
    def longest(self) -> int:
        """Number of targets of the longest recording in any split."""
        return max(len(frames) for split in self.frames.values() for frames in split) - 1

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the files of all splits, in the order of the splits."""
        return data.digest(path.read_bytes() for paths in self.paths.values() for path in paths)

    @functools.cached_property
    def examples(self) -> dict[str, tuple[Tensor, Tensor]]:
        """X and y of the whole of each split that is held out."""
        return {split: batch_of(self.frames[split]) for split in ("valid", "test")}

    def samples(self, split: str) -> list[Tensor]:
        """Returns the recordings themselves, which are not kept."""
        return [torch.from_numpy(read(path, RATE)[0]) for path in self.paths[split]]


@functools.lru_cache(maxsize=1)
def corpus(root: Path, validation_speakers: int) -> Corpus:
    """Reads a folder; raises DataError if its layout is not known, or a file is damaged, or too short for a target."""
    paths = recordings(root, validation_speakers)
    frames = {split: [_levels(path) for path in files] for split, files in paths.items()}
    for split in ("valid", "test"):  # parts of recordings of one length have little padding
        order = sorted(range(len(paths[split])), key=lambda i: len(frames[split][i]))
        paths[split], frames[split] = [paths[split][i] for i in order], [frames[split][i] for i in order]
    return Corpus(paths, frames)


@functools.lru_cache(maxsize=2)
def scales(corpus: Corpus, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns mean and deviation of each bin over some training recordings; bins that never change have deviation 1."""
    recordings = [corpus.frames["train"][i] for i in chosen]
    count = sum(map(len, recordings))
    mean, square = torch.zeros(2, BINS, dtype=torch.float64, device="cpu")
    for recording in map(torch.Tensor.double, recordings):
        mean += recording.sum(0)
        square += recording.square().sum(0)
    mean, square = mean / count, square / count
    variance = (square - mean.square()).clamp_min(0)
    return mean.float(), torch.where(variance > 1e-6, variance, 1.0).sqrt().float()


def batch_of(frames: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns x and y of recordings: each frame, and the one that follows; zero and infinity after the end.

    The last frame has no successor, so that it is no input; a target is infinite exactly where its input is padding.
    """
    x = pad_sequence([recording[:-1] for recording in frames], batch_first=True)
    y = pad_sequence([recording[1:] for recording in frames], batch_first=True, padding_value=float("inf"))
    return x, y


def _levels(path: Path) -> Tensor:
    samples = torch.from_numpy(read(path, RATE)[0])
    if len(samples) < WINDOW + HOP:
        raise DataError(
            f"Task 'speech' needs recordings of {WINDOW + HOP} samples at {RATE} Hz or more, got {len(samples)} in "
            f"{path}; remove it, or put a whole one there."
        )
    return levels(samples)


def levels(samples: Tensor) -> Tensor:
    """Returns 10 log10(|X|^2 + 1e-5), (frames, 129), of each whole window of (length,) samples in [-1, 1] at 8 kHz."""
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
    return torch.hann_window(WINDOW, periodic=True, device="cpu")


def _spectra(samples: Tensor) -> Tensor:
    return torch.fft.rfft(samples.unfold(0, WINDOW, HOP) * _window())


def _signal(spectra: Tensor) -> Tensor:
    # centred, istft leaves out half a window at each end, where one frame alone, near zero, says what is there
    return torch.istft(spectra.mT, WINDOW, HOP, window=_window(), center=True)


def recordings(root: Path, validation_speakers: int) -> dict[str, list[Path]]:
    """Returns the files of "train", "valid" and "test", in an order that does not depend on the file system.

    A folder with TRAIN/DRn/SPEAKER is TIMIT: validation and test are its development and core test speakers, out of
    TEST, and the two sentences that everybody reads (SA1, SA2) are left out of all. In any other, TRAIN and TEST hold a
    folder for each speaker, and `validation_speakers` of TRAIN, evenly spaced by name, are held out for validation. The
    folder may be the only one of this kind in `root`; names are in capitals or not. Raises DataError if there is no
    such layout, or a split would be empty.
    """
    train, test = _halves(root)
    if any(re.fullmatch("dr[1-8]", child.name.lower()) for child in _folders(train)):
        everybody = {half: _speakers(_folders(half), r"sa\d") for half in (train, test)}
        chosen = {
            "train": everybody[train],
            "valid": _named(everybody[test], DEVELOPMENT, "development", test),
            "test": _named(everybody[test], CORE_TEST, "core test", test),
        }
    else:
        speakers = _speakers([train])
        held_out = _spaced(list(speakers), validation_speakers, train)
        chosen = {
            "train": {name: files for name, files in speakers.items() if name not in held_out},
            "valid": {name: files for name, files in speakers.items() if name in held_out},
            "test": _speakers([test]),
        }
    paths_of = {split: [path for files in speakers.values() for path in files] for split, speakers in chosen.items()}
    for split, paths in paths_of.items():
        if not paths:
            raise DataError(f"Task 'speech' needs recordings ({', '.join(ENDINGS)}) in its {split} part, got {root}.")
    return paths_of


def _halves(root: Path) -> tuple[Path, Path]:
    inside = [{child.name.lower(): child for child in _folders(folder)} for folder in (root, *_folders(root))]
    candidates = [(folders["train"], folders["test"]) for folders in inside if {"train", "test"} <= folders.keys()]
    if len(candidates) != 1:
        raise DataError(
            f"Task 'speech' needs one folder with TRAIN and TEST in it, and in these a folder for each speaker, got "
            f"{root} with {len(candidates)} of that kind; {data.REMEDY}."
        )
    return candidates[0]


def _folders(root: Path) -> list[Path]:
    return sorted(child for child in root.iterdir() if child.is_dir() and not child.name.startswith("."))


def _speakers(parents: Iterable[Path], left_out: str = "(?!)") -> dict[str, list[Path]]:
    """Maps a name to recordings; a copy in another format, SX37.WAV.wav beside SX37.WAV, is none of its own."""
    recordings = {}
    for speaker in (speaker for parent in parents for speaker in _folders(parent)):
        files: dict[str, Path] = {}
        for path in sorted(speaker.rglob("*")):
            if any(part.startswith(".") for part in path.relative_to(speaker).parts):
                continue
            name = path.name.lower()
            while name.endswith(ENDINGS):
                name = name.rpartition(".")[0]
            if name != path.name.lower() and path.is_file() and not re.fullmatch(left_out, name):
                files.setdefault(str(path.relative_to(speaker).with_name(name)), path)
        if files:
            recordings[speaker.name.lower()] = list(files.values())
    return recordings


def _named(speakers: Speakers, names: frozenset[str], which: str, folder: Path) -> dict[str, list[Path]]:
    missing = sorted(names - set(speakers))
    if missing:
        raise DataError(
            f"Task 'speech' needs the {len(names)} {which} speakers of TIMIT in {folder}, got none of "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''} ({len(missing)} missing)."
        )
    return {name: files for name, files in speakers.items() if name in names}


def _spaced(names: list[str], count: int, folder: Path) -> set[str]:
    if count >= len(names):
        raise DataError(
            f"Task 'speech' needs more than {count} speakers in {folder}, to hold {count} of them out for validation, "
            f"got {len(names)}; set --validation-speakers."
        )
    return {names[(2 * k + 1) * len(names) // (2 * count)] for k in range(count)}
