"""A table or an array in a file: predict a number or a class from a stretch of rows."""

from __future__ import annotations

import functools
import zipfile
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

KINDS = ("classification", "regression")
ARRAYS = (".npy", ".npz")
ENDINGS = (".csv", ".tsv", *ARRAYS)
HELD_OUT = 0.15
"""Share of the validation part, and of the test part."""
MAX_CLASSES = 100
"""Classes that integers, or words, may be without a word from the user."""
WHO = "Task 'table'"


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
    def last_only(self) -> bool:
        """False for a target at each step; True where the data are not at hand."""
        return self._at_hand is None or self._at_hand.parts["train"].offset is not None

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
        has_classes = self._at_hand is not None and bool(self._at_hand.classes)
        return ("loss", "accuracy") if self.kind == KINDS[0] or (not self.kind and has_classes) else ("loss",)

    @property
    def baseline(self) -> dict[str, float]:
        """The best constant answer to the test part, or the last value that has been read."""
        return dict(self._prepared.baseline)

    def _split(self, name: str) -> Stretches:
        return self._prepared.parts[name]

    def data_digest(self) -> str:
        """Returns that of the file, and of the targets' own."""
        return data.digest(path.read_bytes() for path in self._paths())

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the mean cross-entropy, or the mean squared error."""
        from torch.nn import functional as F

        return F.mse_loss(output.squeeze(-1), y) if y.is_floating_point() else cross_entropy(output, y)

    @property
    def _at_hand(self) -> Prepared | None:
        try:
            return self._prepared
        except DataError:
            return None

    @functools.cached_property
    def _prepared(self) -> Prepared:
        # as the data are when they are first asked for
        paths = self._paths()
        return prepared(self, tuple(paths), tuple(path.stat().st_mtime_ns for path in paths))

    def _paths(self) -> list[Path]:
        """Returns the file, in the folder of data or where the path leads from here, and the targets of an .npy."""
        homes = [data.folder(self.name)] if data.place() or not self.file else []
        if self.file:
            places = [(home / self.file).resolve() for home in (*homes, Path())]
            found = [path for path in places if path.is_file()][:1]
        else:
            found = [path for path in sorted(homes[0].glob("[!.]*")) if path.suffix.lower() in ENDINGS]
        got = ", ".join(path.name for path in found[:4]) or f"none named {self.file!r} in {(*homes, Path())[0]}"
        needs(len(found) == 1, DataError, WHO, f"one file ({', '.join(ENDINGS)})", f"{got}; name it with --file")
        if found[0].suffix.lower() == ".npy":
            found.append(found[0].with_name(self.target or "?"))
            got = f"none named {self.target!r} beside {found[0]}"
            needs(found[1].is_file(), DataError, WHO, "--target, a file of targets", got)
        return found


@dataclass(frozen=True, eq=False)
class Stretches(Sequences):
    """Stretches of `length` rows: where each begins, and how far from there its target is; None for one at each row."""

    x: Tensor
    y: Tensor
    starts: Tensor
    length: int
    offset: int | None

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x, (B, length, features), and y, (B,) or (B, length), of some of them."""
        import torch

        starts = self.starts[rows]
        inside = starts[:, None] + torch.arange(self.length, device="cpu")
        return self.x[inside], self.y[inside if self.offset is None else starts + self.offset]


@dataclass(frozen=True, eq=False)
class Prepared:
    """The data of a task, read and cut; `parts` are "train", "valid" and "test"."""

    parts: dict[str, Stretches]
    classes: tuple[object, ...]
    scales: dict[str, tuple[float, float]]
    baseline: dict[str, float]


@functools.lru_cache(maxsize=2)
def prepared(task: Table, paths: tuple[Path, ...], changed: tuple[int, ...]) -> Prepared:
    """Reads files, last changed at some times, and cuts them into stretches."""
    import numpy as np
    import torch

    read = arrays if paths[0].suffix.lower() in ARRAYS else columns
    (x, y, at_each), path, ahead = read(task, *paths), paths[0], task.ahead
    lengths = np.bincount(y.index)
    is_cut = task.window is not None or (len(lengths) > 1 and lengths.min() == lengths.max())
    got = f"{len(lengths)} of {lengths.min()} to {lengths.max()} rows in {path}"
    needs(is_cut, DataError, WHO, "--window, or --series of one length", got)
    length = task.window or int(lengths[0]) - ahead
    offset = None if at_each else length + ahead - 1
    pieces, starts = _pieces(lengths, path), {}
    for part, ends in pieces.items():
        starts[part] = np.concatenate([np.arange(first, max(first, end - length - ahead + 1)) for first, end in ends])
        most = max(end - first for first, end in ends)
        words = f"--window and --ahead within the {most} rows of its {part} part in {path}"
        needs(length > 0 and len(starts[part]) > 0, DataError, WHO, words, f"{length} and {ahead}")
    trained = np.concatenate([np.arange(*piece) for piece in pieces["train"]])
    inputs, scales = _standardized(x, trained)
    if task.kind == KINDS[1] or (not task.kind and y.dtype.kind == "f"):
        is_varied = y.iloc[trained].nunique() > 1
        needs(is_varied, DataError, WHO, "targets that are different numbers", f"a single one in {path}")
        targets, more = _standardized(y.to_frame(), trained)
        targets, scales, classes = targets[:, 0], scales | more, ()
    else:
        values, codes = np.unique(y.to_numpy(), return_inverse=True)
        most = len(values) if task.kind else MAX_CLASSES
        got = f"{len(values)} different targets in {path}; --kind says whether they are classes"
        needs(1 < len(values) <= most, DataError, WHO, f"2 to {MAX_CLASSES} classes", got)
        targets, classes = torch.from_numpy(codes), tuple(values.tolist())
    parts = {part: Stretches(inputs, targets, torch.from_numpy(s), length, offset) for part, s in starts.items()}
    return Prepared(parts, classes, scales, _baseline(parts["test"], len(classes), ahead > 0 and y.name in x))


def columns(task: Table, path: Path) -> tuple[pd.DataFrame, pd.Series, bool]:
    """Returns the columns of a CSV that are asked for, and the target, indexed by the number of the series."""
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
    target, series, ahead = task.target or names[-1], task.series, task.ahead
    asked = words_of(task.features)
    for name in (target, *asked, *filter(None, [series])):
        if name not in names:
            raise DataError(f"{WHO} finds no column {name!r} in {path}{did_you_mean(name, names)}")
    is_apart = (target not in asked or ahead > 0) and series not in (target, *asked)
    words = f"features beside the target {target!r}, which is one with --ahead alone, and the series {series!r}"
    needs(is_apart, DataError, WHO, words, task.features)
    inputs = list(asked) or [name for name in names if name not in (target, series)]
    numbers = {name: np.asarray(pd.to_numeric(table[name], errors="coerce")) for name in (*inputs, target)}
    is_number = {name: np.isfinite(column.astype(float)) for name, column in numbers.items()}
    has_words = not (is_number[target].all() if task.kind else is_number[target].any())
    if has_words and target not in inputs and task.kind != KINDS[1] and not np.any(pd.isna(table[target])):
        numbers[target] = np.array([str(cell).strip() for cell in table[target]])
        del is_number[target]
    elif ahead > 0 and not asked and numbers[target].dtype.kind in "if":
        inputs.append(target)
    for name, is_known in is_number.items():
        if not is_known.all():
            row = int(is_known.argmin())
            got = f"{table[name].iloc[row]!r} in row {row + 1} of {path}; fill it in, or name other --features"
            raise DataError(f"{WHO} needs a finite number in each cell of column {name!r}, got {got}.")
    index = pd.factorize(table[series], use_na_sentinel=False)[0] if series else np.zeros(len(table), int)
    x = pd.DataFrame({name: numbers[name].astype(float) for name in inputs}, index)
    return x.sort_index(kind="stable"), pd.Series(numbers[target], index, name=target).sort_index(kind="stable"), False


def arrays(task: Table, *paths: Path) -> tuple[pd.DataFrame, pd.Series, bool]:
    """Returns the same of an .npz, or of two .npy, and whether there is a target at each step."""
    import numpy as np
    import pandas as pd

    path, held = paths[0], {}
    is_plain = not (task.series or task.window or task.ahead)
    needs(is_plain, DataError, WHO, "a CSV for --series, --window and --ahead", str(path))
    try:
        for each in paths:
            found = np.load(each, allow_pickle=False)
            held |= {each.name: found} if isinstance(found, np.ndarray) else dict(found)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{WHO} needs whole arrays of numbers or words, got {path}: {error}.") from error
    target = task.target or ["", *held][-1]
    others = [name for name in held if name != target]
    features = task.features or (others[0] if len(others) == 1 else "")
    got = f"{', '.join(held)} in {path}; name --target and --features"
    needs(target in held and features in others, DataError, WHO, f"{target!r} and {features!r}", got)
    x, y = held[features], held[target]
    x = x[..., None] if x.ndim == 2 else x
    is_sequences = x.ndim == 3 and x.size > 0 and y.shape in (x.shape[:1], x.shape[:2])
    words, got = "sequences (N, T, features) or (N, T) and targets (N,) or (N, T)", f"{x.shape} and {y.shape} in {path}"
    needs(is_sequences, DataError, WHO, words, got)
    is_finite = all(held.dtype.kind != "f" or bool(np.isfinite(held).all()) for held in (x, y))
    needs(is_finite, DataError, WHO, "finite numbers", f"NaN or infinity in {path}")
    index, targets = np.repeat(np.arange(len(x)), x.shape[1]), y if y.ndim == 2 else y.repeat(x.shape[1])
    inputs = pd.DataFrame(x.reshape(len(index), -1), index, [*map(str, range(x.shape[2]))])
    return inputs, pd.Series(targets.reshape(-1), index, name=target), y.ndim == 2


def _pieces(lengths: np.ndarray, path: Path) -> dict[str, list[tuple[int, int]]]:
    """Returns where the stretches of rows of each part begin and end: shares of one series, or series as a whole."""
    import numpy as np
    import torch

    ends = np.cumsum(lengths)
    if len(ends) == 1:
        total = int(ends[0])
        cuts = [0, int((1 - 2 * HELD_OUT) * total), int((1 - HELD_OUT) * total), total]
        return {part: [(cuts[k], cuts[k + 1])] for k, part in enumerate(("train", "valid", "test"))}
    needs(len(ends) > 2, DataError, WHO, "three sequences or more, one for each part", f"{len(ends)} in {path}")
    order = torch.randperm(len(ends), generator=generator(0), device="cpu").numpy()
    held = max(1, round(HELD_OUT * len(ends)))
    parts = {"train": order[2 * held :], "valid": order[held : 2 * held], "test": order[:held]}
    return {part: [(int(ends[k] - lengths[k]), int(ends[k])) for k in sorted(ks)] for part, ks in parts.items()}


def _standardized(values: pd.DataFrame, trained: np.ndarray) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """Returns columns with mean 0 and deviation 1 (if any) over the rows of training, and what these were."""
    import numpy as np
    import torch

    numbers = values.to_numpy()
    known = numbers[trained].astype(np.float64)
    mean, deviation = known.mean(0), np.where(known.max(0) > known.min(0), known.std(0), 1.0)
    scaled = torch.from_numpy(((numbers - mean) / deviation).astype(np.float32))
    return scaled, dict(zip(values.columns, zip(mean.tolist(), deviation.tolist(), strict=True), strict=True))


def _baseline(test: Stretches, classes: int, has_history: bool) -> dict[str, float]:
    """Returns the scores of the best constant answer, and of the last value that has been read if that is better."""
    import torch

    _, y = test.all()
    if classes:
        shares = torch.bincount(y.flatten(), minlength=classes).double() / y.numel()
        return {"loss": float(torch.special.entr(shares).sum()), "accuracy": float(shares.max())}
    loss = float(y.double().var(correction=0))
    needs(loss > 0, DataError, WHO, "targets that differ in its test part", "a single one")
    still = float((test.y[test.starts + test.length - 1] - y).double().square().mean()) if has_history else 0.0
    return {"loss": min(loss, still or loss)}
