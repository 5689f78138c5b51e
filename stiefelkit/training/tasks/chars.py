"""Text, character by character: predict the next one, or the one k steps ahead."""

from __future__ import annotations

import functools
import glob
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from stiefelkit.checks import of_type
from stiefelkit.errors import DataError, needs
from stiefelkit.files import importing
from stiefelkit.numbers import integer, one_of, optional, validate_fields_
from stiefelkit.training import data
from stiefelkit.training.recipes import recipes_of
from stiefelkit.training.tasks.task import Parted, Pieces, cross_entropy

if TYPE_CHECKING:
    from torch import Tensor

RESETS = ("window", "line")
WHO = "Task 'chars'"
SHARES = {"train": 0.9, "valid": 0.95, "test": 1.0}  # shares of a single text at which its parts end
NO_TARGET = -100  # the target that cross_entropy ignores
UNSEEN = 0.01  # share of held-out characters that the training part may lack
LONGEST = 2**31  # characters of a window at most


@dataclass(frozen=True)
class Chars(Parted):
    """Reads text character by character, and must predict the character that comes next, or `ahead` steps later.

    Input: one-hot vectors over the characters of the training part. Target: the character `ahead` steps after. The loss
    is the cross-entropy in bits per character, averaged over all targets. A sequence begins with the model's initial
    state: each window of T characters, whose first ones are predicted with little to go by (a longer T makes that
    matter less), or each line. The baseline knows how often each character is there, and nothing of those before.

    The data are a folder of yours (--data DIR or STIEFELKIT_DATA) with one text, of which the first nine tenths are for
    training, then a twentieth for validation and the last for the test; or three, with train, valid and test in their
    names, as the Penn Treebank comes. Characters that the training part does not have are neither input nor target.

    Reference: Mikolov et al. 2012; per line and with ahead = 1 or 5 in the form of Mhammedi et al. 2017.

    Args:
        file: the text in the folder of data, or a pattern for three, such as ptb.*.txt; what ends in .txt if left out.
        ahead: steps from the last character that has been read to the one that is to be predicted.
        reset: where the state begins anew: window, every T characters; line, whose end is no character then.
        T: characters of a window.
        train_size: sequences to train on; all if left out.
    """

    file: str = ""
    ahead: int = 1
    reset: str = RESETS[0]
    T: int = 100
    train_size: int | None = None

    name: ClassVar[str] = "chars"
    last_only: ClassVar[bool] = False
    headline: ClassVar[str] = "loss"
    loss_label: ClassVar[str] = "bits per character"
    recipes = recipes_of("chars")
    scores: ClassVar[tuple[str, ...]] = ("loss", "accuracy")

    def __post_init__(self) -> None:
        sizes = {**dict.fromkeys(("T", "ahead"), integer(1, LONGEST)), "train_size": optional(integer(1))}
        validate_fields_(self, "Chars", **sizes, file=of_type(str), reset=one_of(*RESETS))

    @property
    def input_size(self) -> int:
        return len(self._text().alphabet)

    @property
    def output_size(self) -> int:
        return self.input_size

    @property
    def baseline(self) -> dict[str, float]:
        """The frequencies of the training part, and its commonest character."""
        import torch

        parts = [self._split(name).pieces for name in ("train", "test")]
        train, test = (torch.cat([piece[self.ahead :] for piece in pieces]) for pieces in parts)
        counts = torch.bincount(train[train < self.input_size], minlength=self.input_size).clamp_min(1).double()
        known = test[test < self.input_size].long()
        bits = -(counts / counts.sum()).log2()[known].mean()
        return {"loss": float(bits), "accuracy": float((known == counts.argmax()).double().mean())}

    def _split(self, name: str) -> Letters:
        return cut(self._text(), name, self.T, self.ahead)

    def data_digest(self) -> str:
        return self._text().digest

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the cross-entropy in bits, mean over all characters that are targets."""
        return cross_entropy(output, y) / math.log(2)

    def totals(self, output: Tensor, y: Tensor) -> dict[str, tuple[float, float]]:
        count = int((y >= 0).sum())
        scores = {"loss": self.loss(output, y), "accuracy": self.accuracy(output, y)}
        return {key: (float(score) * count if count else 0.0, count) for key, score in scores.items()}

    def _text(self) -> Text:
        return text(data.folder(self.name), self.file, self.reset == RESETS[1])


class Letters(Pieces):
    """Pieces of a text as codes of characters, in which the last filling stands for those that training lacks."""

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns one-hot vectors, zero where there is nothing, and codes, -100 there."""
        from torch.nn import functional as F

        (x, y), size = super().read(rows), int(self.filling[0])
        return F.one_hot(x.long(), size + 1)[..., :-1].float(), y.long().masked_fill(y == size, NO_TARGET)


@dataclass(frozen=True, eq=False)
class Text:
    """A text: the characters of its training part, the codes of each part line by line or as one, and its digest."""

    alphabet: list[str]
    lines: dict[str, list[Tensor]]
    by_line: bool
    source: str
    digest: str


@functools.lru_cache(maxsize=8)
def cut(text: Text, split: str, length: int, ahead: int) -> Letters:
    """Returns the lines of a part, or its windows of `length` inputs, the last one shorter."""
    pieces = text.lines[split]
    if not text.by_line:
        pieces = [codes[k : k + length + ahead] for codes in pieces for k in range(0, len(codes), length)]
    pieces = [piece for piece in pieces if len(piece) > ahead]
    words = f"a line or a window of more than {ahead} characters in its {split} part"
    needs(bool(pieces), DataError, WHO, words, f"none in {text.source}; lower --ahead")
    return Letters(pieces, (len(text.alphabet), NO_TARGET), ahead)


@functools.lru_cache(maxsize=2)
def text(folder: Path, file: str, by_line: bool) -> Text:
    """Reads a text; raises DataError if more than one in a hundred held-out characters are not in its training part."""
    import numpy as np
    import torch

    source, coded = str(folder / (file or "*.txt")), {}
    parts = _parts(folder, file, source)
    lines = {name: [*map(str.rstrip, part.split("\n"))] if by_line else [part] for name, part in parts.items()}
    alphabet = sorted(set("".join(lines["train"])))
    letters = np.array([*map(ord, alphabet)], np.uint32)
    for name, part in lines.items():
        points = np.frombuffer("".join(part).encode("utf-32-le"), np.uint32)
        needs(len(points) > 0, DataError, WHO, f"characters in its {name} part", f"none in {source}")
        codes = np.searchsorted(letters, points).clip(max=len(letters) - 1)
        known = letters[codes] == points
        if (~known).mean() > UNSEEN:
            got = f"{(~known).mean():.0%} others in {source}, such as {chr(points[~known][0])!r}"
            raise DataError(f"{WHO} needs a {name} part in the characters of its training part, got {got}.")
        codes = torch.from_numpy(np.where(known, codes, len(letters)).astype(np.int32))
        coded[name] = [*codes.split([*map(len, part)])]
    return Text(alphabet, coded, by_line, source, data.digest(part.encode() for part in parts.values()))


def _parts(folder: Path, file: str, source: str) -> dict[str, str]:
    """Returns what each part says: shares of one file, or three files with the names of the parts in theirs."""
    paths = sorted(path for name in glob.glob(file or "*.txt", root_dir=folder) if (path := folder / name).is_file())
    if len(paths) == 1:
        content = _read(paths[0])
        ends = [0, *(int(share * len(content)) for share in SHARES.values())]
        return {name: content[ends[i] : ends[i + 1]] for i, name in enumerate(SHARES)}
    named = {name: [path for path in paths if name in path.name.lower()] for name in SHARES}
    listed = ", ".join(path.name for path in paths[:4]) or "none"
    is_three = len(paths) == 3 and all(len(parts) == 1 for parts in named.values())
    words = "one text, or three with train, valid and test in their names"
    needs(is_three, DataError, WHO, words, f"{listed} for {source}; {data.REMEDY}, and the text with --file")
    return {name: _read(path) for name, (path,) in named.items()}


def _read(path: Path) -> str:
    with importing(f"{WHO}, which reads UTF-8,", path, DataError):
        return path.read_text("utf-8-sig")  # the mark of byte order that some editors write is no character
