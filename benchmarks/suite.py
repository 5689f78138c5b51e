"""What the suites have in common: the cells of a table, and which of them are measured."""

import itertools
import os
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch._dynamo  # optimizers import it at their first step: done here, the processes of all cells have it

from stiefelkit.errors import StiefelkitError
from stiefelkit.measuring import frames
from stiefelkit.measuring.contest import Race, Row
from stiefelkit.measuring.plans import OptimizerRace, ParametrizationRace

MODES = ("smoke", "quick", "full")
"""Each measures more cells than the one before, and none measures a cell in another way."""
VARIABLE = "STIEFELKIT_BENCH"
PLACES: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": {"device": "cuda"}}
"""Name of a device to the options that a plan gets for it."""
PATIENCE: dict[str, dict[str, Any]] = {
    "smoke": {"repeats": 30, "seconds": 0.25},
    "quick": {"repeats": 30, "seconds": 0.25},
    "full": {"repeats": 100, "seconds": 1.0},
}
"""How long the implementations of a race are sampled, mode by mode."""


def mode() -> str:
    """The mode that the environment names; quick if none."""
    named = os.environ.get(VARIABLE) or "quick"
    if named not in MODES:
        raise ValueError(f"{VARIABLE} needs to be one of {', '.join(MODES)}, got {named!r}.")
    return named


class Suite:
    """A table of figures, smaller is better, with one cell for each combination of the values on its axes.

    `class Name(Suite, track="time")` has the method `track_time` for asv, which hands on what `setup` has measured. asv
    leaves a cell empty, without calling it a failure, if `setup` raises NotImplementedError: where a parametrization
    refuses a cell (a real dtype), or the mode leaves it out. Values for which a whole table would be empty, such as a
    GPU where there is none, are left out of `params`; asv finds older figures by value: they stay with their history.

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

    def __init_subclass__(cls, track: str = "") -> None:
        if track:
            setattr(cls, f"track_{track}", lambda self, *cell: self.figure)
        due = [cell for cell in itertools.product(*cls.axes) if cls().reason_against(*cell) is None]
        kept = [{cell[axis] for cell in due} for axis in range(len(cls.axes))]
        # a table without a cell keeps one, since asv knows none of size zero
        cls.params = [
            [value for value in axis if value in values] or list(axis[:1])
            for axis, values in zip(cls.axes, kept, strict=True)
        ]

    def level(self, *cell: str) -> str:
        """The smallest mode that measures a cell."""
        raise NotImplementedError

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


def map_race(contender: str, operation: str, size: str, device: str, **options: Any) -> Race:
    """Races one of our parametrizations in one operation."""
    names, precisions = named(contender)
    own: Any = {"parametrizations": names, "precisions": precisions, "operations": (operation,), **options}
    (race,) = frames.races(ParametrizationRace(sizes=(size_of(size),), device=device, **own, **patience()))
    return race


def optimizer_race(optimizer: str, peers: Iterable[str], size: str, device: str, **options: Any) -> Race:
    """Races one of our optimizers beside peers, in one step."""
    names, precisions = named(optimizer)
    own: Any = {"optimizers": (*names, *peers), "precisions": precisions, **options}
    (race,) = frames.races(OptimizerRace(sizes=(size_of(size),), device=device, **own, **patience()))
    return race


def row_of(race: Race, contender: str, dtype: str = "float32") -> Row:
    """The row of a contender, or NotImplementedError with the reason why there is none in this dtype."""
    for row in race.rows:
        if row.name == contender and row["dtype"] == dtype:
            return row
    raise NotImplementedError(race.left_out.get(contender, f"{contender} does not race in {dtype}"))


def patience() -> dict[str, Any]:
    """How long the implementations of a race are sampled, as options of its plan."""
    return PATIENCE[mode()]


def named(contender: str) -> tuple[tuple[str], tuple[str]]:
    """From "cayley (exact)" to (("cayley",), ("exact",))."""
    name, precision = contender.removesuffix(")").split(" (")
    return (name,), (precision,)


def size_of(words: str) -> tuple[int, int]:
    """From "2048x32" to (2048, 32)."""
    n, _, p = words.partition("x")
    return int(n), int(p)
