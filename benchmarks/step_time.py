"""Time of parametrizations and of optimizers of frames, in products g of one n x p with one p x p matrix."""

import stiefelkit as sk
from benchmarks.suite import PLACES, Suite, map_race, optimizer_race, row_of
from stiefelkit.measuring.implementations import own_implementations
from stiefelkit.measuring.plans import OptimizerRace

SIZES = {"64x64": "quick", "256x256": "quick", "2048x32": "quick", "512x512": "full", "1024x1024": "full"}
"""Name of a size to the mode that measures it."""
DTYPES = {"float32": "quick", "complex64": "full"}


class Parametrizations(Suite, track="time"):
    """Forward and backward, or a whole SGD step, of a parametrization that is read as `layer.weight`."""

    unit = "g"
    contenders = tuple(own_implementations(sk.available(), (), {}))
    axes = (contenders, ("forward_backward", "step"), tuple(SIZES), tuple(DTYPES), tuple(PLACES))
    param_names = ("contender", "operation", "size", "dtype", "device")

    def level(self, *cell: str) -> str:
        contender, operation, size, dtype, _ = cell
        if (contender, operation, size, dtype) == ("cayley (exact)", "forward_backward", "64x64", "float32"):
            return "smoke"
        is_slow = operation == "step" or (contender.startswith("givens") and size == "2048x32")
        return "full" if "full" in (SIZES[size], DTYPES[dtype]) or is_slow else "quick"

    def measure(self, *cell: str) -> float:
        contender, operation, size, dtype, device = cell
        return row_of(map_race(contender, operation, size, device, dtype=dtype), contender, dtype)["gemm_units"]


class Optimizers(Suite, track="time"):
    """One step of an optimizer that moves the frame itself."""

    unit = "g"
    axes = (tuple(OptimizerRace().implementations()), tuple(SIZES), tuple(DTYPES), tuple(PLACES))
    param_names = ("optimizer", "size", "dtype", "device")

    def level(self, *cell: str) -> str:
        _, size, dtype, _ = cell
        return "full" if "full" in (SIZES[size], DTYPES[dtype]) else "quick"

    def measure(self, *cell: str) -> float:
        optimizer, size, dtype, device = cell
        return row_of(optimizer_race(optimizer, (), size, device, dtype=dtype), optimizer, dtype)["gemm_units"]
