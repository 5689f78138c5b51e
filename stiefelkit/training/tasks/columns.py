"""Tables and arrays as stretches of rows with targets, read once."""

import csv
import functools
import math
import zipfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stiefelkit.errors import DataError, did_you_mean, shown
from stiefelkit.training.tasks.task import generator

HELD_OUT = 0.15
"""Share of the validation part, and of the test part."""
MANY = 100
"""Classes that integers, or words, may be without a word from the user."""
File = tuple[Path, int, int]
"""A path, with the time and the size of what is there."""


@dataclass(frozen=True, eq=False)
class Stretches:
    """Stretches of `length` rows: where each begins, and how far from there its target is; None for one at each row."""

    x: Tensor
    y: Tensor
    starts: Tensor
    length: int
    offset: int | None

    def __len__(self) -> int:
        """Number of stretches."""
        return len(self.starts)

    def read(self, order: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x, (B, length, features), and y, (B,) or (B, length), of some of them."""
        starts = self.starts[order]
        rows = starts[:, None] + torch.arange(self.length, device="cpu")
        return self.x[rows], self.y[rows if self.offset is None else starts + self.offset]

    def all(self) -> tuple[Tensor, Tensor]:
        """Returns x and y of all, in order."""
        return self.read(torch.arange(len(self), device="cpu"))


@dataclass(frozen=True, eq=False)
class Prepared:
    """The data of a task, read and cut.

    Attributes:
        parts: "train", "valid" and "test" to their stretches, standardized.
        classes: of the target, in order; none of a number.
        scales: see `Table`.
        baseline: see `Table`.
    """

    parts: dict[str, Stretches]
    classes: tuple[Any, ...]
    scales: dict[str, tuple[float, float]]
    baseline: dict[str, float]


@dataclass(frozen=True, eq=False)
class _Rows:
    """What a file says: rows (R, features) and targets (R,), series after series, with the lengths of these."""

    x: np.ndarray
    y: np.ndarray
    lengths: np.ndarray
    names: tuple[str, ...]
    """Of the columns of x, and of y."""
    is_table: bool = True
    at_each: bool = False
    """Whether a target is asked for at each row."""
    has_history: bool = False
    """Whether the target is an input, too."""


@functools.lru_cache(maxsize=2)
def prepared(
    files: tuple[File, ...], target: str, features: str, series: str, window: int | None, ahead: int, kind: str
) -> Prepared:
    """Reads a file and cuts it into stretches.

    `files` are that of the table and, of an .npy, that of the targets; the others are options of `Table`. Raises
    DataError if a file is of another kind, lacks a column, holds what is no number, or is too short.
    """
    path = files[0][0]
    try:
        if path.suffix.lower() in (".npy", ".npz"):
            if series or window or ahead:
                raise DataError(f"Task 'table' needs a CSV for --series, --window and --ahead, got {path}.")
            rows = _of_arrays([file[0] for file in files], target, features)
        else:
            rows = _of_csv(path, target, features, series, ahead, kind)
    except OSError as error:
        raise DataError(f"Task 'table' needs a file that can be read, got {path}: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"Task 'table' needs a CSV in UTF-8, got {path}: {error}.") from error
    pieces, length = _pieces(rows, path), window or _common_length(rows, path) - ahead
    reach, starts = length + ahead, {}
    for part, ends in pieces.items():
        starts[part] = np.concatenate([np.arange(first, max(first, end - reach + 1)) for first, end in ends])
        if length < 1 or not len(starts[part]):
            most = max(end - first for first, end in ends)
            raise DataError(
                f"Task 'table' needs --window and --ahead within the {most} rows that its {part} part has in a row in "
                f"{path}, got {length} and {ahead}; lower them."
            )
    trained = np.concatenate([np.arange(*piece) for piece in pieces["train"]])
    x, x_scales = _standardized(rows.x, trained)
    y, y_scales, classes = _targets(rows.y, trained, kind, path)
    offset = None if rows.at_each else reach - 1
    parts = {part: Stretches(x, y, torch.from_numpy(first), length, offset) for part, first in starts.items()}
    scales = dict(zip(rows.names, [*x_scales, *y_scales], strict=False))
    return Prepared(parts, classes, scales, _baseline(parts["test"], classes, rows.has_history, path))


def _of_csv(path: Path, target: str, features: str, series: str, ahead: int, kind: str) -> _Rows:
    """Reads the columns that are asked for, each row's cells as numbers at once."""
    with path.open(newline="", encoding="utf-8-sig") as stream:
        head = stream.readline()
        stream.seek(0)
        reader = csv.reader(stream, delimiter=max(",;\t", key=head.count))
        names = [name.strip() for name in next(reader, [])]
        if len(set(names)) < max(2, len(names)) or all(map(_is_number, names)):
            raise DataError(
                f"Task 'table' needs a first line with the names of two columns or more, got {head.strip()[:60]!r} "
                f"in {path}."
            )
        target = target or names[-1]
        asked = [name.strip() for name in features.split(",")] if features else []
        for name in (target, *asked, *([series] if series else [])):
            if name not in names:
                raise DataError(f"Task 'table' finds no column {name!r} in {path}{did_you_mean(name, names)}")
        if (target in asked and not ahead) or target == series or series in asked:
            raise DataError(
                f"Task 'table' needs features beside the target {target!r}, which is one with --ahead alone, and the "
                f"series {series!r}, got {features!r}."
            )
        asked = asked or [name for name in names if name not in (target, series)]
        chosen, numbers, lines, answers = [names.index(name) for name in asked], array("d"), array("q"), []
        known: dict[str, int] = {}
        groups = array("q")
        for row in reader:
            if not row:
                continue
            if len(row) != len(names):
                raise DataError(
                    f"Task 'table' needs {len(names)} cells in each row, got {len(row)} in line {reader.line_num} of "
                    f"{path}."
                )
            for k in chosen:
                if not _is_number(row[k]):
                    raise _no_number(names[k], row[k], reader.line_num, path)
                numbers.append(float(row[k]))
            answers.append(row[names.index(target)].strip())
            lines.append(reader.line_num)
            groups.append(known.setdefault(row[names.index(series)].strip(), len(known)) if series else 0)
    if not answers:
        raise DataError(f"Task 'table' needs rows, got none in {path}.")
    x, y = np.frombuffer(numbers).reshape(len(answers), -1), _column(answers, target, kind, lines, path)
    has_history = ahead > 0 and (target in asked or not features) and y.dtype.kind in "if"
    if has_history and target not in asked:
        x, asked = np.column_stack([x, y]), [*asked, target]
    if not x.shape[1]:
        raise DataError(f"Task 'table' needs a column to read beside the target {target!r}, got none in {path}.")
    order = np.argsort(groups, kind="stable")
    return _Rows(x[order], y[order], np.bincount(groups), (*asked, target), has_history=has_history)


def _of_arrays(paths: Sequence[Path], target: str, features: str) -> _Rows:
    """Reads sequences and targets from an .npz, or from two .npy."""
    path = paths[0]
    try:
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as held:
                names = list(held)
                target = target or (names[-1] if names else "")
                others = [name for name in names if name != target]
                features = features or (others[0] if len(others) == 1 else "")
                for option, name in (("target", target), ("features", features)):
                    if name not in names:
                        raise DataError(
                            f"Task 'table' needs the name of an array in {path} with --{option}, got {name!r}"
                            f"{did_you_mean(name, names)}"
                        )
                x, y = held[features], held[target]
        elif features or len(paths) == 1:
            raise DataError(
                f"Task 'table' needs --target, the file of the targets beside {path}, and no --features, got "
                f"{target!r} and {features!r}."
            )
        else:
            x, y = (np.load(file, allow_pickle=False) for file in paths)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"Task 'table' needs whole arrays of numbers or words, got {path}: {error}.") from error
    x = x[..., None] if x.ndim == 2 else x
    if x.ndim != 3 or not x.size or x.dtype.kind not in "iufb":
        raise DataError(
            f"Task 'table' needs numbers of shape (N, T, features) or (N, T), got {x.dtype} of {x.shape} in {path}."
        )
    if y.shape not in (x.shape[:1], x.shape[:2]) or y.dtype.kind not in "iufbUS":
        raise DataError(
            f"Task 'table' needs targets of shape {x.shape[:1]} or {x.shape[:2]}, got {y.dtype} of {y.shape} in {path}."
        )
    for what, held in (("inputs", x), ("targets", y)):
        if held.dtype.kind == "f" and not np.isfinite(held).all():
            place = tuple(map(int, np.argwhere(~np.isfinite(held))[0]))
            raise DataError(f"Task 'table' needs finite {what}, got {held[place]} at {place} in {path}.")
    n, steps = x.shape[:2]
    at_each = y.ndim == 2
    y = y.reshape(-1) if at_each else np.repeat(y, steps)
    names = (*map(str, range(x.shape[2])), target)
    return _Rows(x.reshape(n * steps, -1), y, np.full(n, steps), names, is_table=False, at_each=at_each)


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _no_number(name: str, cell: str, line: int, path: Path) -> DataError:
    return DataError(
        f"Task 'table' needs a finite number in each cell of column {name!r}, got {shown(cell)} in line {line} of "
        f"{path}; fill it in or leave the row out, or name other columns with --features."
    )


def _column(cells: Sequence[str], name: str, kind: str, lines: Sequence[int], path: Path) -> np.ndarray:
    """Returns the targets as integers, numbers or words; raises DataError for one that is missing among them."""
    numeric = [_is_number(cell) for cell in cells]
    if all(numeric):
        try:
            return np.array([int(cell) for cell in cells], np.int64)
        except (ValueError, OverflowError):
            return np.array([float(cell) for cell in cells])
    for cell, is_number, line in zip(cells, numeric, lines, strict=True):
        if not cell or (not is_number and kind != "classification" and (any(numeric) or kind)):
            if any(numeric):
                raise _no_number(name, cell, line, path)
            raise DataError(f"Task 'table' needs a target in each row, got {shown(cell)} in line {line} of {path}.")
    return np.array(cells)


def _pieces(rows: _Rows, path: Path) -> dict[str, list[tuple[int, int]]]:
    """Returns where the stretches of rows of each part begin and end: shares of one series, or series as a whole."""
    ends = np.cumsum(rows.lengths)
    if len(ends) == 1 and rows.is_table:
        total = int(ends[0])
        cuts = [0, int((1 - 2 * HELD_OUT) * total), int((1 - HELD_OUT) * total), total]
        return {part: [(cuts[k], cuts[k + 1])] for k, part in enumerate(("train", "valid", "test"))}
    if len(ends) < 3:
        raise DataError(f"Task 'table' needs three sequences or more, one for each part, got {len(ends)} in {path}.")
    order = torch.randperm(len(ends), generator=generator(0), device="cpu").numpy()
    held = max(1, round(HELD_OUT * len(ends)))
    parts = {"train": order[2 * held :], "valid": order[held : 2 * held], "test": order[:held]}
    return {part: [(int(ends[k] - rows.lengths[k]), int(ends[k])) for k in sorted(ks)] for part, ks in parts.items()}


def _common_length(rows: _Rows, path: Path) -> int:
    """Returns the length of all series; raises DataError if there is one series alone, or of several lengths."""
    if len(rows.lengths) == 1:
        raise DataError(
            f"Task 'table' needs --window, the rows to read, or --series, a column that tells series apart, for {path}."
        )
    shortest, longest = int(rows.lengths.min()), int(rows.lengths.max())
    if shortest < longest:
        raise DataError(
            f"Task 'table' needs series of one length, got {shortest} to {longest} rows in {path}; --window cuts them."
        )
    return longest


def _standardized(values: np.ndarray, trained: np.ndarray) -> tuple[Tensor, list[tuple[float, float]]]:
    """Returns columns with mean 0 and deviation 1 over the rows of training, and what these were.

    The deviation of a column that is constant there counts as 1.
    """
    known = values[trained].astype(np.float64)
    mean, deviation = known.mean(0), known.std(0)
    deviation = np.where(known.max(0) > known.min(0), deviation, 1.0)
    scaled = ((values - mean) / deviation).astype(np.float32)
    return torch.from_numpy(scaled), list(zip(mean.tolist(), deviation.tolist(), strict=True))


def _targets(
    y: np.ndarray, trained: np.ndarray, kind: str, path: Path
) -> tuple[Tensor, list[tuple[float, float]], tuple[Any, ...]]:
    """Returns the targets, with their scale if they are numbers and the classes if they are some."""
    if kind == "regression" or (not kind and y.dtype.kind == "f"):
        if y.dtype.kind not in "iufb" or y[trained].min() == y[trained].max():
            raise DataError(
                f"Task 'table' needs targets that are different numbers, got {shown(y[trained][0])} in {path}."
            )
        scaled, scales = _standardized(y[:, None], trained)
        return scaled[:, 0], scales, ()
    classes, codes = np.unique(y, return_inverse=True)
    if len(classes) < 2 or (not kind and len(classes) > MANY):
        raise DataError(
            f"Task 'table' needs 2 to {MANY} classes, got {len(classes)} different targets in {path}; --kind "
            "says whether they are classes."
        )
    return torch.from_numpy(codes), [], tuple(classes.tolist())


def _baseline(test: Stretches, classes: tuple[Any, ...], has_history: bool, path: Path) -> dict[str, float]:
    """Returns the scores of the best constant answer, and of the last value that has been read if that is better."""
    _, y = test.all()
    if classes:
        shares = torch.bincount(y.flatten(), minlength=len(classes)).double() / y.numel()
        return {"loss": float(torch.special.entr(shares).sum()), "accuracy": float(shares.max())}
    loss = float(y.double().var(correction=0))
    if not loss:
        raise DataError(f"Task 'table' needs targets that differ in its test part, got a single one in {path}.")
    still = float((test.y[test.starts + test.length - 1] - y).double().square().mean()) if has_history else 0.0
    return {"loss": min(loss, still or loss)}
