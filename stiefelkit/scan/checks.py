"""Checks of the tensors of scans, and the recurrence in which they are handed on."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stiefelkit.errors import OptionError, ShapeError, shown
from stiefelkit.numbers import sizes
from stiefelkit.scan.activations import Activation

DTYPES = {
    dtype: (wide := torch.promote_types(dtype, torch.float32), wide.to_real())
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)
}
"""From the dtype of the recurrent matrix to the one that is computed with, and its real counterpart."""


class Tensors(NamedTuple):
    """The tensors of a recurrence, as `scan` takes them; w may be the factors of a `Structure`."""

    x: Tensor
    w: Tensor
    h0: Tensor
    u: Tensor | None = None
    bias: Tensor | None = None
    activation_bias: Tensor | None = None


class Recurrence(NamedTuple):
    """What `scan` has checked and hands on, in types that operators take.

    The backend is not "auto" any more, and `structure` is that of w in factors, which stand in its place, or "".
    """

    activation: str
    sizes: Sequence[int] | None = None
    reverse: bool = False
    last_only: bool = False
    backend: str = "inplace"
    structure: str = ""


SETTINGS = "str activation, int[]? sizes, bool reverse, bool last_only, str backend, str structure"
"""A `Recurrence` in the schema of an operator."""


def row_counts(who: str, batch_sizes: object) -> tuple[int, ...] | None:
    """Returns the rows of each step in Python's integers, or None; raises OptionError for what has none."""
    found = None if batch_sizes is None else sizes(batch_sizes)
    if found is None and batch_sizes is not None:
        raise OptionError(f"{who} needs batch_sizes as a sequence of integers, or None, got {shown(batch_sizes)}.")
    return found


def width_of(who: str, w: Tensor) -> int:
    """Returns n of a recurrent matrix; raises ShapeError unless it is square."""
    if w.dim() != 2 or w.shape[0] != w.shape[1]:
        raise ShapeError(f"{who} needs a square w, got shape {tuple(w.shape)}.")
    return w.shape[0]


def lengths(who: str, x: Tensor, batch_sizes: Sequence[int] | None, width: str = "m") -> tuple[int, int]:
    """Returns B and T of inputs (T, B, `width`), or packed ones; raises ShapeError where the sizes do not fit."""
    if x.dim() != (3 if batch_sizes is None else 2) or x.shape[0] == 0:
        wanted = f"(T, B, {width}) with T >= 1" if batch_sizes is None else f"(rows, {width}) with batch_sizes"
        raise ShapeError(f"{who} needs x of shape {wanted}, got {tuple(x.shape)}.")
    if batch_sizes is None:
        return x.shape[1], x.shape[0]
    if any(b > a or b < 1 for a, b in itertools.pairwise(batch_sizes)):
        raise ShapeError(f"{who} needs batch_sizes that do not increase, each >= 1, got {list(batch_sizes)}.")
    if sum(batch_sizes) != x.shape[0]:
        raise ShapeError(f"{who} needs batch_sizes that add up to the rows of x, {x.shape[0]}, got {sum(batch_sizes)}.")
    return batch_sizes[0], len(batch_sizes)


def check_shapes(who: str, **wanted: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raises ShapeError unless the named tensors, or None, have their shapes."""
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tensor.shape != shape:
            raise ShapeError(f"{who} needs {name} of shape {shape}, got {tuple(tensor.shape)}.")


def check_pairs(activation: Activation, width: int) -> None:
    """Raises ShapeError for an activation of pairs and an odd number of real numbers in a row."""
    if activation.is_paired and width % 2:
        raise ShapeError(f"{type(activation).__name__} needs an even number of units, got {width}.")
