"""How the work of a scan is laid out on a GPU: one table, from which the layout follows for every size and device.

A step of a recurrence cannot begin before the one before it has ended, so that what counts for a few sequences is how
long one step of one of them takes, and for many how much all multiprocessors do at once.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """One way to lay out a scan.

    Args:
        program: "rows", a program a sequence, with the matrix in registers; "groups", several programs for some
            sequences, each with some columns of the matrix; "tiles", a program for 16 sequences, which reads the matrix
            at every step; "gates", a program a sequence, with the three matrices of a gated unit in registers.
        states: "real", "complex", or "gated" (`goru_scan`).
        widest: the most units.
        most: the most sequences for each multiprocessor of the GPU.
        blocks: vectors of a row in registers, or of its real parts.
        size: numbers of the first of them; each other has half as many as the one before.
        warps: of a program.
        deep: rows of a block of the matrix that lie side by side, four of them in a thread.
        columns: of a program of "groups".
        rows: sequences that a group takes at a time, an even number.
    """

    program: str
    states: str
    widest: int
    most: float
    blocks: int
    size: int
    warps: int
    deep: int = 0
    columns: int = 0
    rows: int = 1


EVERY = float("inf")
LAYOUTS = (
    Layout("rows", "real", 32, EVERY, 1, 32, 1, 4),
    Layout("rows", "real", 64, EVERY, 1, 64, 4, 16),
    Layout("rows", "real", 96, EVERY, 2, 64, 4, 16),
    Layout("rows", "real", 128, EVERY, 1, 128, 8, 16),
    Layout("rows", "real", 192, 24, 2, 128, 8, 16),
    Layout("groups", "real", 256, 5, 1, 256, 8, 32, columns=64, rows=2),
    Layout("groups", "real", 512, 8, 1, 512, 8, 32, columns=64, rows=4),
    Layout("tiles", "real", 512, EVERY, 0, 0, 4),
    Layout("rows", "complex", 32, EVERY, 1, 32, 1, 4),
    Layout("rows", "complex", 64, EVERY, 1, 64, 4, 8),
    Layout("rows", "complex", 128, EVERY, 1, 128, 8, 16),
    Layout("groups", "complex", 256, 7, 1, 512, 8, 32, columns=64, rows=4),
    Layout("tiles", "complex", 256, EVERY, 0, 0, 4),
    Layout("gates", "gated", 32, EVERY, 1, 32, 4, 16),
    Layout("gates", "gated", 64, EVERY, 1, 64, 8, 16),
    Layout("gates", "gated", 128, EVERY, 1, 128, 8, 16),
)
"""The first of these that fits is taken."""


def choose(states: str, units: int, batch: int, multiprocessors: int) -> Layout:
    """Returns the layout for so many units and sequences on a GPU of so many multiprocessors.

    >>> choose("real", 170, 128, 132).program
    'rows'
    >>> choose("real", 170, 4096, 132).program
    'tiles'
    """
    for layout in LAYOUTS:
        if layout.states == states and units <= layout.widest and batch <= layout.most * multiprocessors:
            return layout
    raise ValueError(f"choose needs {states} states of fewer units, got {units}.")
