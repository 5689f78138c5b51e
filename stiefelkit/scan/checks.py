"""What every scan asks of its tensors."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stiefelkit.errors import ShapeError
from stiefelkit.scan.activations import Activation

DTYPES = {
    torch.bfloat16: (torch.float32, torch.float32),
    torch.float16: (torch.float32, torch.float32),
    torch.float32: (torch.float32, torch.float32),
    torch.float64: (torch.float64, torch.float64),
    torch.complex64: (torch.complex64, torch.float32),
    torch.complex128: (torch.complex128, torch.float64),
}
"""From the dtype of the recurrent matrix to the one that is computed with, and its real counterpart."""


def sizes_of(who: str, name: str, w: Tensor, x: Tensor, batch_sizes: Sequence[int] | None) -> tuple[int, int, int, int]:
    """Returns n, m, B and T from the recurrent matrix, of some name, and the inputs.

    Raises:
        ShapeError: the matrix is not square, or x has another number of dimensions, or no step.
    """
    if w.dim() != 2 or w.shape[0] != w.shape[1]:
        raise ShapeError(f"{who} needs a square {name}, got shape {tuple(w.shape)}.")
    if x.dim() != (3 if batch_sizes is None else 2) or x.shape[0] == 0:
        wanted = "(T, B, m) with T >= 1" if batch_sizes is None else "(rows, m) with batch_sizes"
        raise ShapeError(f"{who} needs x of shape {wanted}, got {tuple(x.shape)}.")
    n, m = w.shape[0], x.shape[-1]
    if batch_sizes is None:
        return n, m, x.shape[1], x.shape[0]
    return n, m, next(iter(batch_sizes), 0), len(batch_sizes)


def check_shapes(
    who: str,
    x: Tensor,
    batch_sizes: Sequence[int] | None,
    wanted: Mapping[str, tuple[Tensor | None, tuple[int, ...]]],
) -> None:
    """Raises ShapeError unless the named tensors have their shapes, and the sizes are those of packed rows."""
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tensor.shape != shape:
            raise ShapeError(f"{who} needs {name} of shape {shape}, got {tuple(tensor.shape)}.")
    if batch_sizes is None:
        return
    if any(b > a or b < 1 for a, b in itertools.pairwise(batch_sizes)):
        raise ShapeError(f"{who} needs batch_sizes that do not increase, got {list(batch_sizes)}.")
    if sum(batch_sizes) != x.shape[0]:
        raise ShapeError(f"{who} needs batch_sizes that add up to the rows of x, {x.shape[0]}, got {sum(batch_sizes)}.")


def require_pairs(activation: Activation, width: int) -> None:
    """Raises ShapeError for an activation of pairs and an odd number of real numbers in a row."""
    if activation.is_paired and width % 2:
        raise ShapeError(f"{type(activation).__name__} needs an even number of units, got {width}.")


PLAIN, GATED = "plain", "gated"
"""The cells: h_t = act(x_t u^T + b + h_{t-1} w^T), and the gated one of `goru_scan`, whose matrices are stacked."""
TENSORS = ("x", "w", "h0", "u", "bias", "activation_bias")
"""The tensors of every recurrence, in their order; the last three may be None."""


class Recurrence(NamedTuple):
    """What `scan` and `goru_scan` have checked and hand on, in types that operators take.

    Attributes:
        cell: "plain" or "gated".
        activation: its name.
        sizes: rows alive at each step of packed input, or None.
        reverse: whether the last step comes first.
        last_only: whether the last states alone are asked for.
        half: whether Im h is left out of the gradient by w.
        backend: what runs it, no more "auto".
        structure: that of w if it is in factors, which stand in its place; else "".
    """

    cell: str
    activation: str
    sizes: Sequence[int] | None
    reverse: bool
    last_only: bool
    half: bool
    backend: str
    structure: str = ""


SETTINGS = "str cell, str activation, int[]? sizes, bool reverse, bool last_only, bool half, str backend, str structure"
"""A `Recurrence` in the schema of an operator."""
