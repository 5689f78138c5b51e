"""How the work of a scan is laid out on a GPU: one table, from which the layout follows for every size and device.

A step of a recurrence cannot begin before the one before it has ended, so that what counts for a few sequences is how
long one step of one of them takes, and for many how much all multiprocessors do at once.
"""

from dataclasses import dataclass

__all__ = ["LAYOUTS", "Cost", "Layout", "choose"]


@dataclass(frozen=True)
class Cost:
    """What a compiled program holds at most, for compute capabilities from 8.0 on.

    Args:
        registers: of a thread.
        instructions: of a step.
        barriers: of a step.
        words: that a thread reads from shared memory in a step, of four bytes.
    """

    registers: int
    instructions: int
    barriers: int
    words: int


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
        forward: what its program holds, for modReLU; None for "tiles", which is not taken through its steps this way.
        back: the same of the way back.
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
    forward: Cost | None = None
    back: Cost | None = None
    columns: int = 0
    rows: int = 1


EVERY = float("inf")
LAYOUTS = (
    Layout("rows", "real", 32, EVERY, 1, 32, 1, 4, Cost(64, 70, 1, 32), Cost(64, 70, 1, 32)),
    Layout("rows", "real", 64, EVERY, 1, 64, 4, 16, Cost(72, 85, 2, 16), Cost(72, 90, 2, 16)),
    Layout("rows", "real", 96, EVERY, 2, 64, 4, 16, Cost(128, 155, 4, 25), Cost(128, 165, 4, 25)),
    Layout("rows", "real", 128, EVERY, 1, 128, 8, 16, Cost(120, 125, 2, 32), Cost(128, 125, 2, 32)),
    Layout("rows", "real", 192, 24, 2, 128, 8, 16, Cost(224, 235, 4, 49), Cost(232, 245, 4, 49)),
    Layout("groups", "real", 256, 5, 1, 256, 8, 32, Cost(128, 300, 9, 66), Cost(128, 365, 9, 66), columns=64, rows=2),
    Layout(
        "groups", "real", 512, 8, 1, 512, 8, 32, Cost(176, 860, 9, 258), Cost(200, 1035, 9, 258), columns=64, rows=4
    ),
    Layout("tiles", "real", 512, EVERY, 0, 0, 4),
    Layout("rows", "complex", 32, EVERY, 1, 32, 1, 4, Cost(96, 220, 1, 66), Cost(96, 225, 1, 66)),
    Layout("rows", "complex", 64, EVERY, 1, 64, 4, 8, Cost(152, 220, 2, 64), Cost(152, 225, 2, 64)),
    Layout("rows", "complex", 128, EVERY, 1, 128, 8, 16, Cost(224, 410, 2, 64), Cost(232, 415, 2, 64)),
    Layout(
        "groups",
        "complex",
        256,
        7,
        1,
        512,
        8,
        32,
        Cost(240, 1050, 25, 274),
        Cost(232, 1180, 25, 274),
        columns=64,
        rows=4,
    ),
    Layout("tiles", "complex", 256, EVERY, 0, 0, 4),
    Layout("gates", "gated", 32, EVERY, 1, 32, 4, 16, Cost(64, 140, 2, 8), Cost(80, 255, 10, 26)),
    Layout("gates", "gated", 64, EVERY, 1, 64, 8, 16, Cost(96, 170, 2, 16), Cost(128, 290, 10, 50)),
    Layout("gates", "gated", 128, EVERY, 1, 128, 8, 16, Cost(255, 405, 2, 32), Cost(255, 535, 10, 101)),
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
