"""How a sequence is cut into chunks of steps that fit a cache."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Chunk", "cut", "segments"]

CHUNK_BYTES = 512 * 1024
"""States of a chunk: a quarter to a half of a second-level cache."""
CHUNK_ROWS = 512
"""Rows of a chunk, so that the products over a chunk are large enough."""
GPU_STEPS = 32
"""Steps of a chunk on a GPU."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive steps with the same number of rows.

    Args:
        time: the first step.
        start: its first row among the packed rows.
        steps: how many steps.
        batch: rows of each step.
    """

    time: int
    start: int
    steps: int
    batch: int

    @property
    def times(self) -> slice:
        """The steps."""
        return slice(self.time, self.time + self.steps)

    @property
    def rows(self) -> slice:
        """The packed rows."""
        return slice(self.start, self.start + self.steps * self.batch)


def cut(sizes: Sequence[int], row_bytes: int, is_cached: bool = True) -> list[Chunk]:
    """Cuts steps into chunks, in the order of time.

    Args:
        sizes: rows of each step.
        row_bytes: of a row of states.
        is_cached: whether to cut for a CPU's cache; if not, for launches on a GPU.
    """
    chunks, time, start = [], 0, 0
    for batch, run in itertools.groupby(sizes):
        length = len(list(run))
        fitting = max(1, CHUNK_BYTES // max(1, batch * row_bytes), CHUNK_ROWS // max(1, batch))
        most = fitting if is_cached else GPU_STEPS
        for done in range(0, length, most):
            steps = min(most, length - done)
            chunks.append(Chunk(time, start, steps, batch))
            time, start = time + steps, start + steps * batch
    return chunks


def segments(count: int) -> list[slice]:
    """Cuts steps into about as many segments as each of them has steps."""
    length = max(1, round(count**0.5))
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]
