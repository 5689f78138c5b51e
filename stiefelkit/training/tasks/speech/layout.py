"""Whose recordings are for training, for validation and for the test."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from stiefelkit.errors import DataError
from stiefelkit.training.audio import ENDINGS
from stiefelkit.training.data import REMEDY

__all__ = ["recordings"]

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


def recordings(root: Path, validation_speakers: int) -> dict[str, list[Path]]:
    """Returns the files of "train", "valid" and "test", in an order that does not depend on the file system.

    A folder with TRAIN/DRn/SPEAKER is TIMIT: validation and test are its development and core test speakers, out of
    TEST, and the two sentences that everybody reads (SA1, SA2) are left out of all. In any other, TRAIN and TEST hold a
    folder for each speaker, and some of TRAIN, evenly spaced in the order of their names, are held out for validation.

    Args:
        root: the folder, or one that holds it alone of this kind; names in capitals or not.
        validation_speakers: how many, where it is not TIMIT.

    Raises:
        DataError: there is no such layout, or a split would be empty.
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
    candidates = [pair for folder in (root, *_folders(root)) if (pair := _pair(folder)) is not None]
    if len(candidates) != 1:
        raise DataError(
            f"Task 'speech' needs one folder with TRAIN and TEST in it, and in these a folder for each speaker, got "
            f"{root} with {len(candidates)} of that kind; {REMEDY}."
        )
    return candidates[0]


def _pair(folder: Path) -> tuple[Path, Path] | None:
    inside = {child.name.lower(): child for child in _folders(folder)}
    return (inside["train"], inside["test"]) if {"train", "test"} <= set(inside) else None


def _folders(root: Path) -> list[Path]:
    return sorted(child for child in root.iterdir() if child.is_dir() and not child.name.startswith("."))


def _speakers(parents: Iterable[Path], left_out: str = "(?!)") -> dict[str, list[Path]]:
    """Name to recordings; a copy in another format, SX37.WAV.wav beside SX37.WAV, is none of its own."""
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
