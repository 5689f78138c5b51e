"""Time of parametrizations and of optimizers of frames, in products g of one n x p with one p x p matrix."""

from typing import Any

import stiefelkit as sk
from benchmarks.suite import PLACES, Suite, named, patience, row_of, size_of
from stiefelkit.measuring import frames
from stiefelkit.measuring.implementations import own_implementations
from stiefelkit.measuring.plans import OptimizerRace, ParametrizationRace

SIZES = {"64x64": "quick", "256x256": "quick", "2048x32": "quick", "512x512": "full", "1024x1024": "full"}
"""Name of a size to the mode that measures it."""
DTYPES = {"float32": "quick", "complex64": "full"}


class Parametrizations(Suite):
    """Forward and backward, or a whole SGD step, of a parametrization that is read as `layer.weight`."""

    unit = "g"
    axes = (
        tuple(own_implementations(sk.available(), (), {})),
        ("forward_backward", "step"),
        tuple(SIZES),
        tuple(DTYPES),
        tuple(PLACES),
    )
    param_names = ("contender", "operation", "size", "dtype", "device")

    def level(self, *cell: str) -> str:
        contender, operation, size, dtype, _ = cell
        if (contender, operation, size, dtype) == ("cayley (exact)", "forward_backward", "64x64", "float32"):
            return "smoke"
        is_slow = operation == "step" or (contender.startswith("givens") and size == "2048x32")
        return "full" if "full" in (SIZES[size], DTYPES[dtype]) or is_slow else "quick"

    def measure(self, *cell: str) -> float:
        contender, operation, size, dtype, device = cell
        where: dict[str, Any] = {"sizes": (size_of(size),), "dtype": dtype, "device": device, **patience()}
        names, precisions = named(contender)
        plan = ParametrizationRace(parametrizations=names, precisions=precisions, operations=(operation,), **where)
        (race,) = frames.races(plan)
        return row_of(race, contender, dtype)["gemm_units"]

    def track_time(self, *cell: str) -> float:
        return self.figure


class Optimizers(Suite):
    """One step of an optimizer that moves the frame itself."""

    unit = "g"
    axes = (tuple(OptimizerRace().implementations()), tuple(SIZES), tuple(DTYPES), tuple(PLACES))
    param_names = ("optimizer", "size", "dtype", "device")

    def level(self, *cell: str) -> str:
        _, size, dtype, _ = cell
        return "full" if "full" in (SIZES[size], DTYPES[dtype]) else "quick"

    def measure(self, *cell: str) -> float:
        optimizer, size, dtype, device = cell
        where: dict[str, Any] = {"sizes": (size_of(size),), "dtype": dtype, "device": device, **patience()}
        names, precisions = named(optimizer)
        (race,) = frames.races(OptimizerRace(optimizers=names, precisions=precisions, **where))
        return row_of(race, optimizer, dtype)["gemm_units"]

    def track_time(self, *cell: str) -> float:
        return self.figure
