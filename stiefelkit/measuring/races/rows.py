"""The figures of a race as rows, in a table's order and in a file."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stiefelkit.errors import RunError
from stiefelkit.training.files import refuse_special, writable, write_json

__all__ = ["FrameRow", "LaunchRow", "ScanRow", "check_place", "write_rows"]


@dataclass(frozen=True)
class FrameRow:
    """One contender in one operation at one size.

    Args:
        operation: "forward", "forward_backward" or "step".
        contender: the peer's name, or "name (precision)", with the options that it was given.
        n: rows of the frame.
        p: columns.
        batch: number of frames.
        dtype: of the frame.
        device: cpu or cuda.
        seconds: median time of one call.
        gemm_units: seconds over those of one n x p by p x p product (a batch of them) measured in the same rounds.
        ratio_to_best_peer: seconds of the fastest peer of the family in the same race over `seconds`; None without.
        error_over_limit: ||W^H W - I||_F in float64 over the rounding limit of the dtype, the worst of the batch; None
            if not finite.
        spread: seconds between the quartiles of the samples.
        samples: how many there are.
    """

    operation: str
    contender: str
    n: int
    p: int
    batch: int
    dtype: str
    device: str
    seconds: float
    gemm_units: float
    ratio_to_best_peer: float | None
    error_over_limit: float | None
    spread: float = 0.0
    samples: int = 1


@dataclass(frozen=True)
class LaunchRow:
    """What a device has to do for one contender in one operation at one size.

    Args:
        operation: as in `FrameRow`.
        contender: as in `FrameRow`.
        n: rows of the frame.
        p: columns.
        batch: number of frames.
        dtype: of the frame.
        launches: operators that are no views, forward and backward or one step.
        reads: operators that wait for a value, or for what an algorithm says of its success.
    """

    operation: str
    contender: str
    n: int
    p: int
    batch: int
    dtype: str
    launches: int
    reads: int


@dataclass(frozen=True)
class ScanRow:
    """One contender in one case of a race of recurrences.

    Args:
        operation: "sequence", forward and backward with dL/dh at every step; "last_state", the same with dL/dh_T alone;
            "training_step", a whole step of a model, or its scan alone.
        case: name of the case.
        contender: the peer's name, or "scan (backend)".
        T: steps.
        n: the contender's units, complex numbers if `is_complex`.
        B: sequences of a batch.
        m: width of the input.
        is_complex: whether the contender's states are complex.
        activation: of the case.
        dtype: of the input; real.
        device: cpu or cuda.
        seconds: median time of one call.
        limit_units: seconds over those of the case's LIMIT measured in the same rounds.
        time_over_ours: seconds over those of our scan in the same rounds; None if ours did not run.
        memory_sequence: bytes by which peak memory grows in "sequence"; None unless measured.
        memory_last_state: the same in "last_state".
        spread: seconds between the quartiles of the samples.
        samples: how many there are.
    """

    operation: str
    case: str
    contender: str
    T: int
    n: int
    B: int
    m: int
    is_complex: bool
    activation: str
    dtype: str
    device: str
    seconds: float
    limit_units: float
    time_over_ours: float | None
    memory_sequence: int | None = None
    memory_last_state: int | None = None
    spread: float = 0.0
    samples: int = 1


def check_place(path: Path) -> None:
    """Raises RunError unless a file can be written there."""
    if not path.parent.is_dir():
        raise RunError(f"The race needs an existing folder for its rows, got {path}.")
    with writable("The race", path):
        refuse_special(path)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise RunError(f"The race needs a file that can be written, got {path}.")


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Replaces a file by a JSON list of the rows, dataclasses all, in one step."""
    write_json(path, [dataclasses.asdict(row) for row in rows])
