"""A recurrence in real rows, cut into chunks of steps that fit a cache: what every fast backend starts from."""

import copy
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stiefelkit.scan.activations import Loop, find_activation
from stiefelkit.scan.checks import Recurrence, Tensors
from stiefelkit.scan.structures import STRUCTURES, Structure
from stiefelkit.scan.structures.structure import fold, from_blocks, matrix_blocks, read_blocks, row_blocks

CHUNK_BYTES = 512 * 1024  # states of a chunk: a quarter to a half of a second-level cache
CHUNK_ROWS = 512  # rows of a chunk, so that the products over a chunk are large enough
GPU_STEPS = 32  # steps of a chunk on a GPU


class Chunk(NamedTuple):
    """Consecutive steps with the same number of rows."""

    steps: int
    batch: int


def cut(sizes: Sequence[int], row_bytes: int, is_cached: bool = True) -> list[Chunk]:
    """Cuts steps of so many rows into chunks, in the order of time, for a CPU's cache or for launches on a GPU."""
    chunks = []
    for batch, run in itertools.groupby(sizes):
        length = len(list(run))
        fitting = max(1, CHUNK_BYTES // max(1, batch * row_bytes), CHUNK_ROWS // max(1, batch))
        most = fitting if is_cached else GPU_STEPS
        for done in range(0, length, most):
            chunks.append(Chunk(min(most, length - done), batch))
    return chunks


def segments(count: int) -> list[slice]:
    """Cuts steps into about as many segments as each of them has steps."""
    length = max(1, round(count**0.5))
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]


class Gradients(NamedTuple):
    """Derivatives by the arguments of `scan`, None for those not asked for; see `scan` for shapes."""

    x: Tensor | None = None
    w: Tensor | None = None
    h0: Tensor | None = None
    u: Tensor | None = None
    bias: Tensor | None = None
    activation_bias: Tensor | None = None


class Outcome(NamedTuple):
    """The states that were kept, what the derivative needs besides, and gradients by states and by the last (B, n)."""

    out: Tensor
    saved: Tensor
    g_out: Tensor | None
    g_last: Tensor | None


class Problem:
    """The arguments of `scan`, with complex numbers as [Re | Im]; in the place of w there may be factors."""

    def __init__(self, recurrence: Recurrence, tensors: Tensors):
        x, w, h0, *_ = tensors
        self.w, self.u, self.bias, self.activation_bias = w, tensors.u, tensors.bias, tensors.activation_bias
        self.reverse, sizes = recurrence.reverse, recurrence.sizes
        self.n, self.is_complex, self.is_packed = h0.shape[-1], w.is_complex(), sizes is not None
        self.activation = find_activation(recurrence.activation, self.is_complex)
        self.structure: Structure | None = STRUCTURES[recurrence.structure](w) if recurrence.structure else None
        self.width = self.n * (1 + self.is_complex)
        self.dtype = w.dtype.to_real()
        self._loop: tuple[int, Loop] | None = None
        self._take(x, h0, list(sizes) if sizes is not None else [x.shape[1]] * x.shape[0])

    def _take(self, x: Tensor, h0: Tensor, sizes: list[int]) -> None:
        self.x, self.h0, self.sizes = x, h0, sizes
        self.first = row_blocks(h0)
        self.chunks = cut(sizes, self.width * self.dtype.itemsize, x.device.type == "cpu")
        if self.reverse:
            self.chunks = self.chunks[::-1]

    def segment(self, part: slice, h: Tensor) -> "Problem":
        """Returns the problem of some steps, from the states (B, n) before them, with the same matrices."""
        # Worked out before the copy is made, and so once.
        _ = self.ut, self.row_bias
        if self.structure is None:
            _ = self.wt, self.rows_w
        sub = copy.copy(self)
        sizes = self.sizes[part]
        sub._take(self.x[self.rows(part)], h[: max(sizes)], sizes)
        return sub

    def rows(self, part: slice) -> slice:
        """Returns where the rows of some steps are in x."""
        if not self.is_packed:
            return part
        start = sum(self.sizes[: part.start])
        return slice(start, start + sum(self.sizes[part]))

    @functools.cached_property
    def wt(self) -> Tensor:
        """The matrix (N, N) by which rows of states are multiplied from the right."""
        return matrix_blocks(self.w) if self.is_complex else self.w.mT.contiguous()

    @functools.cached_property
    def rows_w(self) -> Tensor:
        """The matrix (N, N) by which rows of gradients are multiplied from the right."""
        return self.wt.mT.contiguous()

    @functools.cached_property
    def ut(self) -> Tensor | None:
        """The matrix (M, N) by which rows of x, real or [Re | Im], are multiplied from the right."""
        if self.u is None:
            return None
        if self.x.is_complex():
            return matrix_blocks(self.u)
        return torch.cat([self.u.real.mT, self.u.imag.mT], 1) if self.is_complex else self.u.mT.contiguous()

    @functools.cached_property
    def row_bias(self) -> Tensor | None:
        """The bias as a real row (N,)."""
        return None if self.bias is None else row_blocks(self.bias)

    def loop(self, like: Tensor) -> Loop:
        """Returns the activation's loop, of rows such as `like` (batch, N); that of the last batch is kept."""
        if self._loop is None or self._loop[0] != len(like):
            self._loop = len(like), self.activation.loop(like, self.activation_bias)
        return self._loop[1]

    def project(self, z: Tensor, x: Tensor) -> None:
        """Writes the projected inputs of a chunk, from real rows (steps, batch, M), into z (steps, batch, N)."""
        ut, bias = self.ut, self.row_bias
        if ut is not None:
            rows, into = x.flatten(0, 1), z.flatten(0, 1)
            torch.mm(rows, ut, out=into) if bias is None else torch.addmm(bias, rows, ut, out=into)
            return
        into = z
        if self.is_complex and not self.x.is_complex():
            into = z[..., : self.n]
            z[..., self.n :] = 0
        into.copy_(x)
        if bias is not None:
            z.add_(bias)

    def saved_like(self, keep: bool) -> Tensor:
        """Returns room for what the derivative needs besides the states; without `keep`, of no step."""
        width, dtype = self.activation.saved_like(self.n, self.w.dtype)
        rows = self.x.shape[:-1] if keep else (0, *self.x.shape[1:-1])
        return self.x.new_empty(*rows, width, dtype=dtype)

    def parts(self, rows: Tensor | None) -> Sequence[Tensor]:
        """Returns the rows of each chunk, (steps, batch, width), in the order of `chunks`, without a copy."""
        if rows is None or not self.chunks:
            return ()
        chunks = self.chunks[::-1] if self.reverse else self.chunks
        parts = rows.split_with_sizes([chunk.steps * (chunk.batch if self.is_packed else 1) for chunk in chunks])
        if self.is_packed:
            shapes = [(chunk.steps, chunk.batch, *rows.shape[1:]) for chunk in chunks]
            parts = tuple(map(Tensor.view, parts, shapes))
        return parts[::-1] if self.reverse else parts

    def inputs(self) -> Iterable[Tensor]:
        """Returns the inputs of each chunk as real rows: views, or copies of complex ones, one at a time."""
        x = self.parts(self.x)
        return map(read_blocks, x, self.rooms(2 * self.x.shape[-1])) if self.x.is_complex() else x

    def rooms(self, width: int, dtype: torch.dtype | None = None, more: int = 0) -> list[Tensor]:
        """Returns one buffer for all chunks, seen as (steps + more, batch, width) for each."""
        counts = [(chunk.steps + more) * chunk.batch * width for chunk in self.chunks]
        buffer = self.x.new_empty(max(counts, default=0), dtype=dtype or self.dtype)
        shapes = [(chunk.steps + more, chunk.batch, width) for chunk in self.chunks]
        return [buffer[:count].view(shape) for count, shape in zip(counts, shapes, strict=True)]

    def states(self, outs: Sequence[Tensor], i: int, room: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the states of the i-th chunk and those before each of them, views of `outs` or in the room."""
        h = outs[i]
        if not self.is_complex and i and len(outs[i - 1][0]) == len(h[0]):
            before = h.storage_offset() + h.stride(0) * (1 if self.reverse else -1)
            return h, h.as_strided(h.shape, h.stride(), before)
        h, before = (room[:-1], room[1:]) if self.reverse else (room[1:], room[:-1])
        last = self.first[:0] if i == 0 else row_blocks(outs[i - 1][0 if self.reverse else -1])
        # A sequence that only begins here starts from its first state.
        batch = room.shape[1]
        before[-1 if self.reverse else 0] = torch.cat([last, self.first[len(last) : batch]])[:batch]
        read_blocks(outs[i], h) if self.is_complex else h.copy_(outs[i])
        return h, before

    def matrix_gradient(self, blocks: Tensor, columns_complex: bool) -> Tensor:
        """Returns the gradient by a matrix from d^T h in real rows."""
        if self.is_complex:
            return fold(blocks) if columns_complex else torch.complex(*blocks.chunk(2, 0))
        return blocks

    def row_gradient(self, blocks: Tensor) -> Tensor:
        """Returns the gradient by rows of the recurrence's dtype."""
        return from_blocks(blocks) if self.is_complex else blocks
