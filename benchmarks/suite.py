"""What the suites have in common: the cells of a table, and which of them are measured."""

import itertools
import os
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch._dynamo  # optimizers import it at their first step: done here, the processes of all cells have it

from stiefelkit.errors import StiefelkitError
from stiefelkit.measuring.races.clock import predicted
from stiefelkit.measuring.races.field import Race, Row

MODES = ("smoke", "quick", "full")
"""Each measures more cells than the one before, and none measures a cell in another way."""
VARIABLE = "STIEFELKIT_BENCH"
PLACES: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": {"device": "cuda"}}
"""Name of a device to the options that a plan gets for it."""
BUDGET = 8.0
"""Seconds: a cell that is predicted to take longer on the machine of `PRODUCTS` belongs to full."""
PRODUCTS = 4e10
"""Floating-point operations a second of float32 products that predictions count with; the machine they were made on is
near twice as fast, when idle."""
START = 0.05
"""Seconds for the process of a cell, and for what it draws."""
RACE = 0.3
"""Seconds for what a race imports, and for the garbage that it collects first."""
PATIENCE: dict[str, dict[str, Any]] = {
    "smoke": {"repeats": 30, "seconds": 0.25},
    "quick": {"repeats": 30, "seconds": 0.25},
    "full": {"repeats": 100, "seconds": 1.0},
}
"""How long the contenders of a race are sampled, mode by mode."""


def mode() -> str:
    """The mode that the environment names; quick if none."""
    named = os.environ.get(VARIABLE) or "quick"
    if named not in MODES:
        raise ValueError(f"{VARIABLE} needs to be one of {', '.join(MODES)}, got {named!r}.")
    return named


class Suite:
    """A table of figures, smaller is better, with one cell for each combination of the values on its axes.

    A cell is measured in `setup`, and the method `track_...` hands the figure on: asv leaves a cell empty, without
    calling it a failure, if `setup` raises NotImplementedError. That is what happens to cells that a parametrization
    refuses (a real dtype) or that the mode leaves out. Values for which a whole table would be empty, such as a GPU
    where there is none, are left out of `params`; asv finds older figures by value, so they stay with their history.

    Attributes:
        unit: of the figure.
        version: asv starts a new history when it changes; without it, at each change of the code.
        timeout: seconds for one cell.
        axes: all values along each axis.
        param_names: the names of the axes.
        params: the values along each axis that asv goes through.
    """

    unit: ClassVar[str]
    version: ClassVar[str] = "1"
    timeout: ClassVar[float] = 1800.0
    axes: ClassVar[tuple[tuple[str, ...], ...]]
    param_names: ClassVar[tuple[str, ...]]
    params: ClassVar[list[list[str]]]

    def __init_subclass__(cls) -> None:
        due = [cell for cell in itertools.product(*cls.axes) if cls().reason_against(*cell) is None]
        kept = [{cell[axis] for cell in due} for axis in range(len(cls.axes))]
        # a table without a cell keeps one, since asv knows none of size zero
        cls.params = [
            [value for value in axis if value in values] or list(axis[:1])
            for axis, values in zip(cls.axes, kept, strict=True)
        ]

    def level(self, *cell: str) -> str:
        """The smallest mode that measures a cell, as long as its budget lasts."""
        raise NotImplementedError

    def predicted(self, named: str, *cell: str) -> float:
        """Seconds of CPU time that a cell takes in a mode, on one core of the machine of `PRODUCTS`."""
        return START

    def measure(self, *cell: str) -> float:
        """The figure of a cell.

        Raises:
            StiefelkitError, NotImplementedError: there is none; the message says why.
        """
        raise NotImplementedError

    def reason_against(self, *cell: str) -> str | None:
        """Why a cell is not to be measured here and now."""
        named = mode()
        if MODES.index(self.level(*cell)) > MODES.index(named):
            return f"the mode {named} leaves it out"
        if named != "full" and (seconds := self.predicted(named, *cell)) > BUDGET:
            return f"the mode {named} leaves it out: it would take about {seconds:.0f} s of the {BUDGET:.0f} of a cell"
        wanted = cell[self.param_names.index("device")]
        return "there is no CUDA device" if wanted.startswith("cuda") and not torch.cuda.is_available() else None

    def setup(self, *cell: str) -> None:
        reason = self.reason_against(*cell)
        if reason is not None:
            raise NotImplementedError(reason)
        try:
            # asv prints all digits that there are
            self.figure = float(f"{self.measure(*cell):.4g}")
        except StiefelkitError as error:
            raise NotImplementedError(str(error)) from error


def row_of(race: Race, contender: str) -> Row:
    """The row of a contender.

    Raises:
        NotImplementedError: it was left out of the race; the message says why.
    """
    for row in race.rows:
        if row.contender == contender:
            return row
    raise NotImplementedError(race.left_out.get(contender, f"{contender} does not race here"))


def patience() -> dict[str, Any]:
    """How long the contenders of a race are sampled, as options of its plan."""
    return PATIENCE[mode()]


def of_race(named: str, calls: Iterable[float]) -> float:
    """Predicted seconds of a cell that races versions in a mode, by the seconds of one call of each."""
    return START + RACE + sum(call + predicted(call, **PATIENCE[named]) for call in calls)


def seconds_of(name: str, n: int, p: int, is_complex: bool = False) -> float:
    """Predicted seconds of a gradient by a map, or of a step of an optimizer, of an n x p frame, by its name."""
    products = 2 * n * p * p * (4 if is_complex else 1) / PRODUCTS
    if name == "givens":
        # a layer of rotations is a call of its own, and slow where all layers together do not fit the cache
        return n * (1e-4 if n * n * p < 1 << 25 else 1.5e-3)
    return 1e-3 + 15 * products


def size_of(words: str) -> tuple[int, int]:
    """From "2048x32" to (2048, 32)."""
    n, _, p = words.partition("x")
    return int(n), int(p)
