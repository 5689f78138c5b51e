"""A table in a file: predict a number or a class from a stretch of rows."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from stiefelkit.checks import known_words, of_type, words_of
from stiefelkit.errors import DataError, did_you_mean, needs
from stiefelkit.files import importing
from stiefelkit.numbers import integer, optional, validate_fields_
from stiefelkit.training import data
from stiefelkit.training.recipes import recipes_of
from stiefelkit.training.tasks.task import Parted, Sequences, cross_entropy, generator

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from torch import Tensor

CLASSES, NUMBERS = KINDS = ("classification", "regression")
ENDINGS = (".csv", ".tsv")
PARTS = ("train", "valid", "test")
HELD_OUT = 0.15
"""Share of the validation part, and of the test part."""
MAX_CLASSES = 100
"""Classes that integers, or words, may be without a word from the user."""
WHO = "Task 'table'"


@dataclass(frozen=True)
class Table(Parted):
    """Reads consecutive rows of a table in a file, and must predict a number or a class.

    A CSV file has a line with the names of its columns, then rows in the order of time; commas, semicolons or tabs
    separate them. It is one series, cut into windows of `window` rows, one beginning at each row, or, with `series`, a
    sequence for each value of that column. The target is what its column says in the last row; with `ahead`, that many
    rows later, and a target of numbers is an input, too.

    A target of words or of integers is a class, any other a number. The first 70 % of the rows of one series are for
    training, then 15 % for validation and 15 % for the test, and no window crosses a border; of several sequences these
    shares are drawn at random, always the same. Inputs, and targets that are numbers, get mean 0 and deviation 1 by
    the training part. The loss is the cross-entropy in nats, or the squared error in units of the variance that the
    target has in the training part. The baseline is the best constant answer to the test part; with `ahead`, also the
    last value that has been read.

    Args:
        file: in the folder of data (--data DIR or STIEFELKIT_DATA) or a path; the only one in that folder if left out.
        target: the column; the last one if left out.
        features: columns that are read, separated by commas; all others if left out.
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
    last_only: ClassVar[bool] = True
    recipes = recipes_of("table")

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
    def classes(self) -> tuple[object, ...]:
        """The classes, in the order of the outputs; none for numbers."""
        return self._prepared.classes

    @property
    def scales(self) -> dict[str, tuple[float, float]]:
        """Mean and deviation in the training part: of each column that is read, in order, and of a target of numbers.

        The model reads (column - mean) / deviation; the target is what its answer times the deviation plus the mean is.
        """
        return dict(self._prepared.scales)

    @property
    def headline(self) -> str:
        """The accuracy of classes; the loss of numbers, and where the data that tell them apart are not at hand."""
        return self.scores[-1]

    @property
    def loss_label(self) -> str:
        """By kind."""
        return "cross-entropy (nats)" if "accuracy" in self.scores else "squared error / variance"

    @property
    def scores(self) -> tuple[str, ...]:
        """The loss, and the accuracy of classes."""
        kind = self.kind
        with contextlib.suppress(DataError):
            kind = kind or (CLASSES if self.classes else NUMBERS)
        return ("loss", "accuracy") if kind == CLASSES else ("loss",)

    @property
    def baseline(self) -> dict[str, float]:
        """The best constant answer to the test part, or the last value that has been read."""
        return dict(self._prepared.baseline)

    def _split(self, name: str) -> Stretches:
        return self._prepared.parts[name]

    def data_digest(self) -> str:
        """Returns that of the file."""
        return data.digest([self._path().read_bytes()])

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the mean cross-entropy, or the mean squared error."""
        from torch.nn import functional as F

        return F.mse_loss(output.squeeze(-1), y) if y.is_floating_point() else cross_entropy(output, y)

    @functools.cached_property
    def _prepared(self) -> Prepared:
        # as the data are when they are first asked for
        path = self._path()
        return prepared(self, path, path.stat().st_mtime_ns)

    def _path(self) -> Path:
        """Returns the file, in the folder of data or where the path leads from here."""
        homes = [data.folder(self.name)] if data.place() or not self.file else []
        if self.file:
            places = [(home / self.file).resolve() for home in (*homes, Path())]
            found = [path for path in places if path.is_file()][:1]
        else:
            found = [path for path in sorted(homes[0].glob("[!.]*")) if path.suffix.lower() in ENDINGS]
        got = ", ".join(path.name for path in found[:4]) or f"none named {self.file!r} in {(*homes, Path())[0]}"
        needs(len(found) == 1, DataError, WHO, f"one file ({', '.join(ENDINGS)})", f"{got}; name it with --file")
        return found[0]


@dataclass(frozen=True, eq=False)
class Stretches(Sequences):
    """Stretches of `length` rows: where each begins, and how far from there its target is."""

    x: Tensor
    y: Tensor
    starts: Tensor
    length: int
    offset: int

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x, (B, length, features), and y, (B,), of some of them."""
        import torch

        starts = self.starts[rows]
        inside = starts[:, None] + torch.arange(self.length, device="cpu")
        return self.x[inside], self.y[starts + self.offset]


@dataclass(frozen=True, eq=False)
class Prepared:
    """The data of a task, read and cut; `parts` are "train", "valid" and "test"."""

    parts: dict[str, Stretches]
    classes: tuple[object, ...]
    scales: dict[str, tuple[float, float]]
    baseline: dict[str, float]


@functools.lru_cache(maxsize=2)
def prepared(task: Table, path: Path, changed: int) -> Prepared:
    """Reads a file, last changed at some time, and cuts it into stretches."""
    import numpy as np
    import torch

    (table, inputs, target), ahead = columns(task, path), task.ahead
    lengths = np.bincount(table.index)
    is_cut = task.window is not None or (len(lengths) > 1 and lengths.min() == lengths.max())
    got = f"{len(lengths)} of {lengths.min()} to {lengths.max()} rows in {path}"
    needs(is_cut, DataError, WHO, "--window, or --series of one length", got)
    length, series, part = task.window or int(lengths[0]) - ahead, table.index.to_numpy(), _parts_of(lengths, path)
    first = np.arange(max(len(table) - length - ahead + 1, 0))
    last = first + length + ahead - 1
    first, starts = first[(series[first] == series[last]) & (part[first] == part[last])], {}
    for k, name in enumerate(PARTS):
        starts[name] = first[part[first] == k]
        most = np.bincount(series[part == k], minlength=1).max()
        words = f"--window and --ahead within the {most} rows of its {name} part in {path}"
        needs(length > 0 and len(starts[name]) > 0, DataError, WHO, words, f"{length} and {ahead}")
    y, trained = table[target], part == 0
    of_classes = task.kind == CLASSES or (not task.kind and y.dtype.kind != "f")
    scaled = inputs if of_classes or target in inputs else [*inputs, target]
    numbers = table[scaled].to_numpy(float)
    known = numbers[trained]
    mean, deviation = known.mean(0), np.where(known.max(0) > known.min(0), known.std(0), 1.0)
    x, classes = torch.from_numpy(((numbers - mean) / deviation).astype(np.float32)), ()
    if of_classes:
        values, codes = np.unique(y.to_numpy(), return_inverse=True)
        most = len(values) if task.kind else MAX_CLASSES
        got = f"{len(values)} different targets in {path}; --kind says whether they are classes"
        needs(1 < len(values) <= most, DataError, WHO, f"2 to {MAX_CLASSES} classes", got)
        targets, classes = torch.from_numpy(codes), tuple(values.tolist())
    else:
        is_varied = y.iloc[trained].nunique() > 1
        needs(is_varied, DataError, WHO, "targets that are different numbers", f"a single one in {path}")
        targets = x[:, scaled.index(target)]
    x, offset = x[:, : len(inputs)], length + ahead - 1
    parts = {name: Stretches(x, targets, torch.from_numpy(s), length, offset) for name, s in starts.items()}
    scales = dict(zip(scaled, zip(mean.tolist(), deviation.tolist(), strict=True), strict=True))
    return Prepared(parts, classes, scales, _baseline(parts["test"], len(classes), ahead > 0 and target in inputs))


def columns(task: Table, path: Path) -> tuple[pd.DataFrame, list[str], str]:
    """Returns all that is asked for, indexed by the number of the series, and the names of inputs and target."""
    import numpy as np

    try:
        import pandas as pd
    except ImportError as error:
        raise DataError(f'{WHO} needs pandas, got an installation without; pip install "stiefelkit[data]".') from error
    with importing(WHO, path, DataError):
        with path.open(encoding="utf-8-sig") as file:
            sep = max(",;\t", key=file.readline().count)
        table = pd.read_csv(path, sep=sep, index_col=False, skipinitialspace=True, keep_default_na=False, na_values="")
    table.columns = names = [str(name).strip() for name in table.columns]
    is_head = len(names) > 1 and bool(np.any(pd.isna(pd.to_numeric(pd.Series(names), errors="coerce"))))
    words, got = "a first line with the names of two columns or more, and rows", f"{', '.join(names)[:60]!r} in {path}"
    needs(is_head and len(table) > 0, DataError, WHO, words, got)
    target, series, asked = task.target or names[-1], task.series, words_of(task.features)
    for name in (target, *asked, *filter(None, [series])):
        if name not in names:
            raise DataError(f"{WHO} finds no column {name!r} in {path}{did_you_mean(name, names)}")
    is_apart = (target not in asked or task.ahead > 0) and series not in (target, *asked)
    words = f"features beside the target {target!r}, which is one with --ahead alone, and the series {series!r}"
    needs(is_apart, DataError, WHO, words, task.features)
    inputs = list(asked) or [name for name in names if name not in (target, series)]
    found = {name: np.asarray(pd.to_numeric(table[name], errors="coerce")) for name in (*inputs, target)}
    gaps = {name: ~np.isfinite(column.astype(float)) for name, column in found.items()}
    has_words = gaps[target].any() if task.kind else gaps[target].all()
    if has_words and target not in inputs and task.kind != NUMBERS and not np.any(pd.isna(table[target])):
        found[target] = np.array([str(cell).strip() for cell in table[target]])
        del gaps[target]
    elif task.ahead > 0 and not asked and found[target].dtype.kind in "if":
        inputs.append(target)
    for name in (name for name, is_gap in gaps.items() if is_gap.any()):
        row = int(gaps[name].argmax())
        got = f"{table[name].iloc[row]!r} in row {row + 1} of {path}; fill it in, or name other --features"
        raise DataError(f"{WHO} needs a finite number in each cell of column {name!r}, got {got}.")
    index = pd.factorize(table[series], use_na_sentinel=False)[0] if series else np.zeros(len(table), int)
    return pd.DataFrame(found, index).sort_index(kind="stable"), inputs, target


def _parts_of(lengths: np.ndarray, path: Path) -> np.ndarray:
    """Returns the number of the part that each row belongs to, by shares of one series, or of whole series."""
    import numpy as np
    import torch

    count, total = len(lengths), int(lengths.sum())
    if count == 1:
        cuts = [int((1 - 2 * HELD_OUT) * total), int((1 - HELD_OUT) * total)]
        return np.searchsorted(cuts, np.arange(total), side="right")
    needs(count > 2, DataError, WHO, "three sequences or more, one for each part", f"{count} in {path}")
    order, held = torch.randperm(count, generator=generator(0), device="cpu").numpy(), max(1, round(HELD_OUT * count))
    part = np.zeros(count, int)
    part[order[: 2 * held]], part[order[:held]] = 1, 2
    return np.repeat(part, lengths)


def _baseline(test: Stretches, classes: int, has_history: bool) -> dict[str, float]:
    """Returns the scores of the best constant answer, and of the last value that has been read if that is better."""
    import torch

    _, y = test.all()
    if classes:
        shares = torch.bincount(y, minlength=classes).double() / len(y)
        return {"loss": float(torch.special.entr(shares).sum()), "accuracy": float(shares.max())}
    loss = float(y.double().var(correction=0))
    needs(loss > 0, DataError, WHO, "targets that differ in its test part", "a single one")
    still = float((test.y[test.starts + test.length - 1] - y).double().square().mean()) if has_history else 0.0
    return {"loss": min(loss, still or loss)}
