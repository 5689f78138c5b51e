"""How many operators a device launches for a parametrization, or for a step of an optimizer of frames."""

import stiefelkit as sk
from benchmarks.suite import Suite, row_of, size_of
from stiefelkit.measuring.races import frames
from stiefelkit.measuring.races.contenders import our_contenders
from stiefelkit.measuring.races.plan import OptimizerRace, ParametrizationRace

SIZES = ("64x64", "128x32")
DEVICES = ("cpu",)
"""Counted on a CPU, by the road of a device: where no GPU is at hand as well."""


class Parametrizations(Suite):
    """Forward and backward."""

    unit = "launches"
    axes = (tuple(our_contenders(sk.available(), (), {})), SIZES, ("float32", "complex64"), DEVICES)
    param_names = ("contender", "size", "dtype", "device")

    def level(self, *cell: str) -> str:
        return "smoke" if cell[:3] == ("cayley (exact)", "64x64", "float32") else "quick"

    def measure(self, *cell: str) -> float:
        contender, size, dtype, _ = cell
        name, precision = contender.removesuffix(")").split(" (")
        plan = ParametrizationRace(
            parametrizations=(name,),
            precisions=(precision,),
            operations=("forward_backward",),
            sizes=(size_of(size),),
            dtype=dtype,
            launches=True,
        )
        (race,) = frames.races(plan)
        return row_of(race, contender)["launches"]

    def track_launches(self, *cell: str) -> float:
        return self.figure


class Optimizers(Suite):
    """One step."""

    unit = "launches"
    axes = (tuple(OptimizerRace().contenders()), SIZES, ("float32", "complex64"), DEVICES)
    param_names = ("optimizer", "size", "dtype", "device")

    def level(self, *cell: str) -> str:
        return "quick"

    def measure(self, *cell: str) -> float:
        optimizer, size, dtype, _ = cell
        name, precision = optimizer.removesuffix(")").split(" (")
        plan = OptimizerRace(
            optimizers=(name,), precisions=(precision,), sizes=(size_of(size),), dtype=dtype, launches=True
        )
        (race,) = frames.races(plan)
        return row_of(race, optimizer)["launches"]

    def track_launches(self, *cell: str) -> float:
        return self.figure
