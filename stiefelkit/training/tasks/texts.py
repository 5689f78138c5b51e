"""Texts as sequences of characters, read once."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stiefelkit.errors import DataError, needs
from stiefelkit.training.data import REMEDY, digest
from stiefelkit.training.tasks.task import Sequences

WHO = "Task 'chars'"
SHARES = {"train": 0.9, "valid": 0.95, "test": 1.0}
"""Where each part of a single text ends."""
NO_TARGET = -100
"""What cross_entropy passes over."""
UNSEEN = 0.01
"""Share of held-out characters that the training part may lack."""


@dataclass(frozen=True, eq=False)
class Pieces(Sequences):
    """Pieces of a text, read one by one: where each begins, and how many inputs, and targets `ahead` of them, it has.

    `codes` has `size`, the number of characters that are known, for those that the training part lacks.
    """

    codes: Tensor
    starts: Tensor
    steps: Tensor
    ahead: int
    size: int

    def __len__(self) -> int:
        """Number of pieces."""
        return len(self.starts)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x, (rows, longest, size), zero where there is nothing, and y, (rows, longest), -100 there."""
        offsets = torch.arange(int(self.steps[rows].max()), device="cpu")
        inside = offsets < self.steps[rows, None]
        places = torch.where(inside, self.starts[rows, None] + offsets, 0)
        x = torch.where(inside, self.codes[places], self.size).long()
        y = self.codes[torch.where(inside, places + self.ahead, 0)].long()
        return F.one_hot(x, self.size + 1)[..., :-1].float(), torch.where(inside & (y < self.size), y, NO_TARGET)

    def targets(self) -> Tensor:
        """Returns the codes of all targets that are known."""
        ends = self.steps.cumsum(0)
        offsets = torch.repeat_interleave(self.starts + self.ahead - ends + self.steps, self.steps)
        codes = self.codes[offsets + torch.arange(len(offsets), device="cpu")].long()
        return codes[codes < self.size]


class Text:
    """A text in three parts, of which the first says which characters there are.

    Args:
        parts: "train", "valid" and "test" to what they say.
        by_line: lines are read one by one, without what is white at their end; else the text is one.
        source: of the text, for messages.

    Raises DataError if a part is empty, or more than one in a hundred characters of the others are not in the first.
    """

    def __init__(self, parts: Mapping[str, str], by_line: bool, source: str):
        self._source, self._by_line = source, by_line
        pieces = {name: [*map(str.rstrip, part.split("\n"))] if by_line else [part] for name, part in parts.items()}
        joined = {name: "".join(part) for name, part in pieces.items()}
        for name, part in joined.items():
            needs(bool(part.strip()), DataError, WHO, f"characters in its {name} part", f"none in {source}")
        self.digest = digest(part.encode("utf-8", "surrogatepass") for part in parts.values())
        self.alphabet = sorted(set(joined["train"]))
        self._codes = {name: self._coded(name, part) for name, part in joined.items()}
        self._lengths = {name: torch.tensor([*map(len, part)], device="cpu") for name, part in pieces.items()}
        # one text may be read in several ways, each of which takes a while to cut
        self.sequences = functools.lru_cache(self._cut)
        self.unigram = functools.lru_cache(self._frequencies)

    def _coded(self, name: str, part: str) -> Tensor:
        letters = np.array([ord(letter) for letter in self.alphabet], np.uint32)
        points = np.frombuffer(part.encode("utf-32-le", "surrogatepass"), np.uint32)
        codes = np.searchsorted(letters, points).clip(max=len(letters) - 1)
        known = letters[codes] == points
        if (~known).mean() > UNSEEN:
            got = f"{(~known).mean():.0%} others in {self._source}, such as {chr(points[~known][0])!r}"
            raise DataError(f"{WHO} needs a {name} part in the characters of its training part, got {got}.")
        return torch.from_numpy(np.where(known, codes, len(letters)).astype(np.int32))

    def _cut(self, split: str, length: int, ahead: int) -> Pieces:
        """Returns the pieces of a part: its lines, or windows of `length` inputs, the last one shorter."""
        codes = self._codes[split]
        if self._by_line:
            ends = self._lengths[split].cumsum(0)
            starts = ends - self._lengths[split]
        else:
            starts = torch.arange(0, len(codes), min(length, len(codes)), device="cpu")
            ends = (starts + min(length, len(codes)) + min(ahead, len(codes))).clamp_max(len(codes))
        steps = ends - starts - min(ahead, len(codes))
        words = f"a line or a window of more than {ahead} characters in its {split} part"
        needs(bool((steps > 0).any()), DataError, WHO, words, f"none in {self._source}; lower --ahead")
        return Pieces(codes, starts[steps > 0], steps[steps > 0], ahead, len(self.alphabet))

    def _frequencies(self, length: int, ahead: int) -> dict[str, float]:
        """Returns the cross-entropy in bits, and the accuracy, of the training part's frequencies on the test part."""
        train, test = (self.sequences(split, length, ahead).targets() for split in ("train", "test"))
        counts = torch.bincount(train, minlength=len(self.alphabet)).clamp_min(1).double()
        bits = -(counts / counts.sum()).log2()[test].mean()
        return {"loss": float(bits), "accuracy": float((test == counts.argmax()).double().mean())}


@functools.lru_cache(maxsize=2)
def text(folder: Path, file: str, by_line: bool) -> Text:
    """Reads one file and cuts it in three, or three files with the names of the parts in theirs."""
    try:
        paths = sorted(path for path in folder.glob(file or "[!.]*.txt") if path.is_file())
    except (ValueError, NotImplementedError):
        paths = []
    source = str(folder / (file or "*.txt"))
    if len(paths) == 1:
        content = _read(paths[0])
        ends = [0, *(int(share * len(content)) for share in SHARES.values())]
        parts = {name: content[ends[i] : ends[i + 1]] for i, name in enumerate(SHARES)}
        return Text(parts, by_line, source)
    named = {name: [path for path in paths if name in path.name.lower()] for name in SHARES}
    if len(paths) != 3 or any(len(parts) != 1 for parts in named.values()):
        listed = ", ".join(path.name for path in paths[:4]) + (", ..." if len(paths) > 4 else "")
        got = f"{listed or 'none'} for {source}; {REMEDY}, and the text with --file"
        raise DataError(f"{WHO} needs one text, or three with train, valid and test in their names, got {got}.")
    return Text({name: _read(path) for name, (path,) in named.items()}, by_line, source)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")  # the mark of byte order that some editors write is no character
    except OSError as error:
        raise DataError(f"{WHO} needs a file that can be read, got {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{WHO} needs a text in UTF-8, got {path}, none at byte {error.start}.") from error
