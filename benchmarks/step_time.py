"""Time of parametrizations and of optimizers of frames, in products g of one n x p with one p x p matrix."""

import stiefelkit as sk
from benchmarks.suite import PLACES, Suite, of_race, patience, row_of, seconds_of, size_of
from stiefelkit.measuring.races import frames
from stiefelkit.measuring.races.contenders import our_contenders
from stiefelkit.measuring.races.plan import OptimizerRace, ParametrizationRace

SIZES = {"64x64": "quick", "256x256": "quick", "2048x32": "quick", "512x512": "full", "1024x1024": "full"}
"""Name of a size to the mode that measures it."""
DTYPES = {"float32": "quick", "complex64": "full"}


def _calls(contender: str, size: str, dtype: str) -> list[float]:
    """Seconds of the contender, and of the unit beside it."""
    call = seconds_of(contender.partition(" ")[0], *size_of(size), dtype == "complex64")
    return [call, call / 15]


class Parametrizations(Suite):
    """Forward and backward, or a whole SGD step, of a parametrization that is read as `layer.weight`."""

    unit = "g"
    axes = (
        tuple(our_contenders(sk.available(), (), {})),
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
        return "full" if "full" in (SIZES[size], DTYPES[dtype]) or operation == "step" else "quick"

    def predicted(self, named: str, *cell: str) -> float:
        contender, _, size, dtype, _ = cell
        return of_race(named, _calls(contender, size, dtype))

    def measure(self, *cell: str) -> float:
        contender, operation, size, dtype, device = cell
        name, precision = contender.removesuffix(")").split(" (")
        plan = ParametrizationRace(
            parametrizations=(name,),
            precisions=(precision,),
            operations=(operation,),
            sizes=(size_of(size),),
            dtype=dtype,
            device=device,
            **patience(),
        )
        (race,) = frames.races(plan)
        return row_of(race, contender)["gemm_units"]

    def track_time(self, *cell: str) -> float:
        return self.figure


class Optimizers(Suite):
    """One step of an optimizer that moves the frame itself."""

    unit = "g"
    axes = (tuple(OptimizerRace().contenders()), tuple(SIZES), tuple(DTYPES), tuple(PLACES))
    param_names = ("optimizer", "size", "dtype", "device")

    def level(self, *cell: str) -> str:
        _, size, dtype, _ = cell
        return "full" if "full" in (SIZES[size], DTYPES[dtype]) else "quick"

    def predicted(self, named: str, *cell: str) -> float:
        optimizer, size, dtype, _ = cell
        return of_race(named, _calls(optimizer, size, dtype))

    def measure(self, *cell: str) -> float:
        optimizer, size, dtype, device = cell
        name, precision = optimizer.removesuffix(")").split(" (")
        plan = OptimizerRace(
            optimizers=(name,),
            precisions=(precision,),
            sizes=(size_of(size),),
            dtype=dtype,
            device=device,
            **patience(),
        )
        (race,) = frames.races(plan)
        return row_of(race, optimizer)["gemm_units"]

    def track_time(self, *cell: str) -> float:
        return self.figure
