"""A table or an array in a file: predict a number or a class from a stretch of rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from stiefelkit.errors import DataError
from stiefelkit.numbers import integer, optional, validate_fields_
from stiefelkit.training import data
from stiefelkit.training.checks import known_words, of_type
from stiefelkit.training.recipes import LRU_RATES, Recipe, of_planes
from stiefelkit.training.tasks.task import Parted, cross_entropy

if TYPE_CHECKING:
    from torch import Tensor

    from stiefelkit.training.tasks.columns import Prepared, Stretches

KINDS = ("classification", "regression")
ENDINGS = (".csv", ".tsv", ".npy", ".npz")

_of = functools.partial(Recipe.of, steps=2000, batch_size=32)
RECIPES = {
    "scornn": _of(96, rates={"skew": 1e-4}, options=lambda n: {"negative": n // 10}),
    "scurnn": _of(64, rates={"skew": 1e-4}),
    "full_urnn": _of(64, optimizer="multiplicative_cayley", rates={"stiefel": 1e-3}),
    "restricted_urnn": _of(64),
    "ornn": _of(96, options=lambda n: {"reflections": n // 4}),
    "eurnn": _of(64, options=lambda n: {"layers": 2}),
    "exprnn": _of(96, rates={"skew": 1e-4}),
    "lie_urnn": _of(64),
    "margin_rnn": _of(96, rates={"skew": 1e-4}),
    "goru": _of(64),
    "rotrnn": _of(64, 4e-3, optimizer="adamw", options=of_planes),
    "lru": _of(64, 4e-3, optimizer="adamw", rates=LRU_RATES),
    "irnn": _of(96, clip_norm=1.0),
    "henaff_rnn": _of(96, clip_norm=1.0),
    "gru": _of(64, 3e-3, clip_norm=1.0),
    "lstm": _of(64, 3e-3, clip_norm=1.0),
}
"""A start for data that nobody has seen: the rates of other tasks, and small nets."""


@dataclass(frozen=True)
class Table(Parted):
    """Reads consecutive rows of a table or an array in a file, and must predict a number or a class.

    A CSV file has a line with the names of its columns, then rows in the order of time; commas, semicolons or tabs
    separate them. It is one series, cut into windows of `window` rows, one beginning at each row, or, with `series`, a
    sequence for each value of that column. The target is what its column says in the last row; with `ahead`, that many
    rows later, and a target of numbers is an input, too.

    An .npz file has sequences (N, T, features) or (N, T), and targets (N,), or (N, T) for one at each step; an .npy
    file has the sequences, and another one the targets.

    A target of words or of integers is a class, any other a number. The first 70 % of the rows of one series are for
    training, then 15 % for validation and 15 % for the test, and no window crosses a border; of several sequences these
    shares are drawn at random, always the same. Inputs, and targets that are numbers, get mean 0 and deviation 1 by
    the training part. The loss is the cross-entropy in nats, or the squared error in units of the variance that the
    target has in the training part. The baseline is the best constant answer to the test part; with `ahead`, also the
    last value that has been read.

    Args:
        file: in the folder of data (--data DIR or STIEFELKIT_DATA) or a path; the only one in that folder if left out.
        target: the column; of an .npz the array, of an .npy the file. The last one of a CSV or an .npz if left out.
        features: columns that are read, separated by commas; all others if left out. Of an .npz the array.
        series: the column that says which series a row belongs to.
        window: rows that are read; whole series if left out.
        ahead: rows from the last one that is read to the target.
        kind: classification or regression; by the target if left out.
        train_size: sequences to train on; all if left out.
    """

    file: str = ""
    target: str = ""
    features: str = ""
    series: str = ""
    window: int | None = None
    ahead: int = 0
    kind: str = ""
    train_size: int | None = None

    name: ClassVar[str] = "table"
    recipes: ClassVar[dict[str, Recipe]] = RECIPES

    def __post_init__(self) -> None:
        sizes = {"window": optional(integer(1)), "ahead": integer(0), "train_size": optional(integer(1))}
        validate_fields_(
            self, "Table", **sizes, **dict.fromkeys(("file", "target", "features", "series", "kind"), of_type(str))
        )
        known_words("Table", "kind", [self.kind] if self.kind else [], KINDS)

    @property
    def input_size(self) -> int:
        """Number of columns that are read."""
        return self._split("train").x.shape[1]

    @property
    def output_size(self) -> int:
        """Number of classes, or 1."""
        return len(self.classes) or 1

    @property
    def classes(self) -> tuple[Any, ...]:
        """The classes, in the order of the outputs; none for numbers."""
        return self._prepared.classes

    @property
    def scales(self) -> dict[str, tuple[float, float]]:
        """Mean and deviation in the training part: of each column that is read, in order, and of a target of numbers.

        The model reads (column - mean) / deviation; the target is what its answer times the deviation plus the mean is.
        """
        return dict(self._prepared.scales)

    @property
    def last_only(self) -> bool:
        """False for a target at each step; True where the data are not at hand."""
        try:
            return self._split("train").offset is not None
        except DataError:
            return True

    @property
    def headline(self) -> str:
        """The accuracy of classes; the loss of numbers, and where the data that tell them apart are not at hand."""
        return "accuracy" if "accuracy" in self.scores else "loss"

    @property
    def loss_label(self) -> str:
        """By kind."""
        return "cross-entropy (nats)" if "accuracy" in self.scores else "squared error / variance"

    @property
    def scores(self) -> tuple[str, ...]:
        """The loss, and the accuracy of classes."""
        try:
            is_class = self.kind == KINDS[0] or (not self.kind and bool(self.classes))
        except DataError:
            is_class = False
        return ("loss", "accuracy") if is_class else ("loss",)

    @property
    def baseline(self) -> dict[str, float]:
        """The best constant answer to the test part, or the last value that has been read."""
        return dict(self._prepared.baseline)

    def _split(self, name: str) -> Stretches:
        """Returns the windows, or the series, of a part of the rows."""
        return self._prepared.parts[name]

    def data_digest(self) -> str:
        """Returns that of the file, and of the targets' own."""
        return data.digest(path.read_bytes() for path in self._paths())

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the mean cross-entropy, or the mean squared error."""
        from torch.nn import functional as F

        return F.mse_loss(output.squeeze(-1), y) if y.is_floating_point() else cross_entropy(output, y)

    def accuracy(self, output: Tensor, y: Tensor) -> Tensor | None:
        """Returns the share of targets that are the likeliest class; None for numbers."""
        return None if y.is_floating_point() else (output.argmax(-1) == y).double().mean()

    @functools.cached_property
    def _prepared(self) -> Prepared:
        """The data as they are when they are first asked for."""
        from stiefelkit.training.tasks.columns import prepared

        stamps = tuple((path.resolve(), path.stat().st_mtime_ns, path.stat().st_size) for path in self._paths())
        return prepared(stamps, self.target, self.features, self.series, self.window, self.ahead, self.kind)

    def _paths(self) -> list[Path]:
        """Returns the file, and that of the targets of an .npy."""
        path = self._path()
        if path.suffix.lower() != ".npy" or not self.target:
            return [path]
        if not (path.parent / self.target).is_file():
            raise DataError(f"Task 'table' needs a file of targets, got none named {self.target!r} beside {path}.")
        return [path, path.parent / self.target]

    def _path(self) -> Path:
        """Returns the file, in the folder of data or where the path leads from here."""
        if not self.file:
            folder = data.folder(self.name)
            paths = sorted(path for path in folder.glob("[!.]*") if path.is_file() and path.suffix.lower() in ENDINGS)
            if len(paths) == 1:
                return paths[0]
            listed = ", ".join(path.name for path in paths[:4]) + (", ..." if len(paths) > 4 else "")
            raise DataError(
                f"Task 'table' needs one file ({', '.join(ENDINGS)}), got {listed or 'none'} in {folder}; name it with "
                "--file."
            )
        homes = [data.folder(self.name), Path()] if data.place() else [Path()]
        for home in homes:
            if (home / self.file).is_file():
                return home / self.file
        looked = " and ".join(str(home) if home.parts else "this folder" for home in homes)
        raise DataError(f"Task 'table' needs a file, got none named {self.file!r} in {looked}; {data.REMEDY}.")
